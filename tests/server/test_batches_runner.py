"""How lines run: over a scripted engine in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from batch_client import COMPLETIONS, FINAL, line
from batch_worlds import LoopWatch
from server_worlds import Api, MakeApi

from skipjoin.core.request import FinishReason, ServiceClass
from skipjoin.server.api.service import Phase
from skipjoin.server.batches import input_validator, periodic, runner, service
from skipjoin.server.batches.line_check import Rules
from skipjoin.server.batches.records import LinePlace, NoSpace, StoreUnavailable
from skipjoin.server.batches.service import Batches
from skipjoin.server.batches.store import Store
from skipjoin.server.batches.validate import validate
from skipjoin.server.engines.errors import EngineDeadError
from support.pace import max_stall_s

pytestmark = pytest.mark.anyio
INFLIGHT = 8
SHORT = {"prompt": "abc", "max_tokens": 4, "ignore_eos": True}


class Place:
    """An API with batches. most: sequences of batches in the engine."""

    def __init__(self, api: Api, most: int = INFLIGHT) -> None:
        self.api = api
        self.batches = Batches(api.service, most=most)
        self.batches.add_routes(api.app.app)  # type: ignore[arg-type]

    @property
    def store(self) -> Store:
        return self.batches.context.store

    async def submit(self, *lines: bytes, window: str = "24h") -> str:
        data = b"\n".join(lines) + b"\n"
        file = await self.api.http.post("/v1/files", files={"file": ("x", data)}, data={"purpose": "batch"})
        assert file.status_code == 200, file.text
        body = {"input_file_id": file.json()["id"], "endpoint": COMPLETIONS, "completion_window": window}
        made = await self.api.http.post("/v1/batches", json=body)
        assert made.status_code == 200, made.text
        return str(made.json()["id"])

    async def batch(self, batch_id: str) -> dict[str, Any]:
        found = await self.api.http.get(f"/v1/batches/{batch_id}")
        assert found.status_code == 200, found.text
        return found.json()

    async def until(self, batch_id: str, *statuses: str) -> dict[str, Any]:
        """The batch in one of these states, by default one that is final."""
        async with asyncio.timeout(30):
            while (found := await self.batch(batch_id))["status"] not in (statuses or FINAL):
                await asyncio.sleep(0.02)
        return found

    async def answers(self, file_id: str | None) -> dict[str, Any]:
        """Lines of a file by custom_id, each exactly once."""
        if file_id is None:
            return {}
        text = (await self.api.http.get(f"/v1/files/{file_id}/content")).text
        found = [json.loads(one) for one in text.splitlines()]
        assert len({one["custom_id"] for one in found}) == len(found)
        return {one["custom_id"]: one for one in found}

    def metric(self, name: str) -> float:
        text = self.api.metrics.render().decode()
        return next(float(one.split()[1]) for one in text.splitlines() if one.startswith(f"skipjoin:{name} "))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
def open_place(make_api: MakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr(service, "_LOOK_S", 0.2)
    monkeypatch.setattr(periodic, "_LONGEST_S", 1.0)

    @asynccontextmanager
    async def make(most: int = INFLIGHT, **settings: Any) -> AsyncIterator[Place]:
        async with make_api(batch_dir=str(tmp_path / "batches"), **settings) as api:
            place = Place(api, most)
            await place.batches.open()
            yield place
            await place.batches.close()
            assert api.is_clean()

    return make


async def test_lines_leave_the_limits_of_others_alone(open_place: Callable[..., Any]) -> None:
    """They are best effort, as many at once as they may be, and end with the window."""
    async with open_place(max_queued_requests=2) as place:
        engine = place.api.engine
        engine.paused = True
        batch = await place.submit(*(line(str(n), **SHORT) for n in range(30)), window="60s")
        await until(lambda: len(engine.live) == INFLIGHT)
        await asyncio.sleep(0.05)
        assert len(engine.live) == INFLIGHT
        for add in engine.added:
            assert add.options.service is ServiceClass.BEST_EFFORT
            assert 50 < add.options.deadline_s <= 61
        assert len({add.params.seed for add in engine.added}) == INFLIGHT
        # Two requests over HTTP find their queue empty, and a third one full.
        chats = [asyncio.create_task(place.api.complete(max_tokens=2)) for _ in range(2)]
        await until(lambda: len(engine.live) == INFLIGHT + 2)
        assert (await place.api.complete()).status_code == 429
        engine.paused = False
        assert [answer.status_code for answer in await asyncio.gather(*chats)] == [200, 200]
        done = await place.until(batch)
        assert done["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
        assert place.metric("batch_generation_tokens_total") == 30 * SHORT["max_tokens"]
        assert place.metric('batch_lines_ended_total{state="done"}') == 30


async def test_what_is_tried_again_and_what_is_not(open_place: Callable[..., Any]) -> None:
    async with open_place() as place:
        engine = place.api.engine
        engine.paused = True
        batch = await place.submit(
            *(line(str(n), **SHORT) for n in range(4)), line("late", **SHORT, deadline_ms=60_000)
        )
        await until(lambda: len(engine.live) == 5)
        first = {tuple(add.prompt): add.params.seed for add in engine.added}
        seeds = sorted(add.params.seed for add in engine.added)
        engine.end_all(FinishReason.ABORT)  # 503
        await until(lambda: len(engine.live) == 5)
        assert first
        assert sorted(add.params.seed for add in engine.added[5:]) == seeds
        engine.die()
        engine.join(place.api.ready)
        await until(lambda: len(engine.live) == 5)
        late = next(key for key, (add, _) in engine.live.items() if add.options.deadline_s < 61)
        lost, *others = [key for key in engine.live if key != late]
        for key, reason, error in ((late, FinishReason.DEADLINE, ""), (lost, FinishReason.ERROR, "it is too large")):
            kept = {other: engine.live.pop(other) for other in list(engine.live) if other != key}
            engine.end_all(reason, error)
            engine.live.update(kept)
        assert len(others) == 3
        engine.paused = False
        done = await place.until(batch)
        assert done["request_counts"] == {"total": 5, "completed": 3, "failed": 2}
        failed = await place.answers(done["error_file_id"])
        assert failed.pop("late")["response"]["body"]["error"]["code"] == "deadline_exceeded"
        ((_, one),) = failed.items()
        assert one["response"]["status_code"] == 500
        assert one["response"]["body"]["error"]["message"] == "it is too large"
        assert place.metric("batch_lines_requeued_total") == 5


async def test_a_line_that_ends_engines_is_given_up(
    open_place: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines beside it, which end with it at first, are not."""
    for name in ("_IDLE_S", "_FIRST_RETRY_S", "_LAST_RETRY_S"):
        monkeypatch.setattr(runner, name, 0.01)
    async with open_place() as place:
        engine, ends = place.api.engine, 0
        engine.paused = True
        batch = await place.submit(*(line(f"{n}", **{**SHORT, "max_tokens": 4 + n}) for n in range(6)))
        while (done := await place.batch(batch))["status"] != "completed":
            if any(add.params.max_tokens == 7 for add, _ in engine.live.values()):
                ends += 1
                place.api.service.client.fail_all(EngineDeadError())
            elif engine.live:
                engine.step()
            await asyncio.sleep(0.002)
        assert ends == runner.MAX_LOST
        assert done["request_counts"] == {"total": 6, "completed": 5, "failed": 1}
        ((name, one),) = (await place.answers(done["error_file_id"])).items()
        assert name == "3"
        assert one["response"]["body"]["error"]["code"] == "engine_lost"


@pytest.mark.parametrize("failure", [NoSpace("the disk is full"), StoreUnavailable("the database is gone")])
async def test_a_store_that_fails_for_a_while(
    open_place: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    """Chat goes on, routes say what is wrong, no answer is lost and no line runs twice."""
    async with open_place() as place:
        batch = await place.submit(*(line(str(n), **SHORT) for n in range(40)))
        await until(lambda: place.metric("batch_generation_tokens_total") > 0)

        async def fail(*args: object, **kwargs: object) -> None:
            raise failure

        with monkeypatch.context() as patched:
            for name in ("finish", "put_back", "take_lines", "due", "renew", "batch", "add_batch"):
                patched.setattr(Store, name, fail)
            ran = 0.0  # lines that were taken before go on, and no others are begun
            while (now := place.metric("batch_generation_tokens_total")) != ran:
                ran = now
                await asyncio.sleep(0.3)
            assert ran < 40 * SHORT["max_tokens"]
            assert (await place.api.complete(max_tokens=2)).status_code == 200
            answer = await place.api.http.get(f"/v1/batches/{batch}")
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] in ("insufficient_storage", "batch_store_unavailable")
        done = await place.until(batch)
        assert done["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
        assert len(await place.answers(done["output_file_id"])) == 40
        assert place.metric("batch_generation_tokens_total") == 40 * SHORT["max_tokens"]


@pytest.mark.parametrize("error", [NoSpace("the disk is full"), RuntimeError("unexpected")])
async def test_a_batch_that_cannot_end_is_tried_with_pauses_and_holds_up_no_other(
    open_place: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    start, tries, batch = Store.start_finalizing, 0, ""

    async def fail(store: Store, batch_id: str) -> Any:
        nonlocal tries
        if batch_id != batch:
            return await start(store, batch_id)
        tries += 1
        raise error

    async with open_place() as place:
        with monkeypatch.context() as patched:
            patched.setattr(Store, "start_finalizing", fail)
            batch = await place.submit(line("a", **SHORT), line("b", **SHORT))
            await until(lambda: tries)
            await asyncio.sleep(0.5)
            assert tries <= 3
            other = await place.submit(line("a", **SHORT))
            assert (await place.until(other))["status"] == "completed"
        assert (await place.until(batch))["status"] == "completed"


async def test_the_end_of_the_server_returns_what_runs(
    open_place: Callable[..., Any], make_api: MakeApi, tmp_path: Path
) -> None:
    """And the next one goes on."""
    async with open_place() as place:
        place.api.engine.paused = True
        batch = await place.submit(*(line(str(n), **SHORT) for n in range(20)))
        await until(lambda: len(place.api.engine.live) == INFLIGHT)
        place.api.service.drain()
        await asyncio.wait_for(place.batches.close(), 20)
        assert not place.api.engine.live
    async with open_place() as place:
        done = await place.until(batch)
        assert done["request_counts"]["completed"] == 20


async def test_no_lines_before_the_engine_is_there(open_place: Callable[..., Any]) -> None:
    async with open_place() as place:
        place.api.service.phase = Phase.STARTING
        batch = await place.submit(line("a", **SHORT))
        await asyncio.sleep(0.3)
        assert not place.api.engine.added
        place.api.service.phase = Phase.OPEN
        assert (await place.until(batch))["status"] == "completed"


async def test_input_files_that_are_gone(open_place: Callable[..., Any], tmp_path: Path) -> None:
    """Before the validation, and while lines wait; other batches go on."""
    async with open_place(most=1) as place:
        place.api.service.phase = Phase.STARTING
        blobs = tmp_path / "batches" / "files"
        early = await place.submit(line("a", **SHORT))
        for blob in blobs.iterdir():
            blob.unlink()
        late = await place.submit(*(line(str(n), **SHORT) for n in range(3)))
        place.api.engine.paused = True
        place.api.service.phase = Phase.OPEN
        assert (await place.until(early))["errors"]["data"][0]["code"] == "input_file_gone"
        await until(lambda: place.api.engine.live)
        for blob in blobs.iterdir():
            blob.unlink()
        place.api.engine.paused = False
        done = await place.until(late)
        assert done["request_counts"] == {"total": 3, "completed": 1, "failed": 2}
        for one in (await place.answers(done["error_file_id"])).values():
            assert one["response"]["body"]["error"]["code"] == "input_file_gone"
        assert (await place.until(await place.submit(line("a", **SHORT))))["status"] == "completed"


async def test_the_event_loop_is_free(open_place: Callable[..., Any]) -> None:
    """Large and many lines: the loop's thread computes for less than 50 ms between two turns."""
    async with open_place(most=64) as place, LoopWatch() as watch:
        large = line("large", prompt="x" * 1_000_000)
        batch = await place.submit(large, *(line(str(n), **SHORT) for n in range(200)))
        done = await place.until(batch)
        assert done["request_counts"] == {"total": 201, "completed": 200, "failed": 1}
    assert watch.longest_s < max_stall_s()


async def test_a_server_without_batches(make_api: MakeApi) -> None:
    async with make_api(batch_dir="none") as api:
        place = Place(api)
        await place.batches.open()
        answers: list[httpx.Response] = [await api.http.get(path) for path in ("/v1/files", "/v1/batches")]
        assert [answer.status_code for answer in answers] == [404, 404]
        assert "batch_dir none" in answers[0].json()["error"]["message"]


async def test_outputs_count_before_they_are_written(open_place: Callable[..., Any]) -> None:
    """Answers that do not fit into the bytes of their key are errors, and lines after them do not run."""
    most = 20_000
    async with open_place(batch_max_bytes_per_key=most) as place:
        engine = place.api.engine
        count = 60
        batch_id = await place.submit(*(line(str(n), **SHORT) for n in range(count)))
        done = await place.until(batch_id)
        assert done["status"] == "completed"
        good, bad = await place.answers(done["output_file_id"]), await place.answers(done["error_file_id"])
        assert len(good) + len(bad) == count
        assert {one["response"]["body"]["error"]["code"] for one in bad.values()} == {"quota_exceeded"}
        assert {one["response"]["status_code"] for one in bad.values()} == {429}
        assert done["request_counts"] == {"total": count, "completed": len(good), "failed": len(bad)}
        assert 10 < len(good) < len(engine.added) < count
        assert place.metric('batch_lines_ended_total{state="done"}') == len(good)
        files = (await place.api.http.get("/v1/files")).json()["data"]
        answered = sum(file["bytes"] for file in files if not file["filename"].endswith("error.jsonl"))
        assert answered <= most
        input_id = next(file["id"] for file in files if file["purpose"] == "batch")
        body = {"input_file_id": input_id, "endpoint": COMPLETIONS, "completion_window": "24h"}
        refused = await place.api.http.post("/v1/batches", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "quota_exceeded")
        for file in files:
            await place.api.http.delete(f"/v1/files/{file['id']}")
        batch_id = await place.submit(line("a", **SHORT))
        assert (await place.until(batch_id))["request_counts"]["completed"] == 1


async def test_a_batch_that_is_cancelled_while_it_is_validated_answers_each_line(
    open_place: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it was cancelled before or after its first line ran makes no difference to its files."""
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow(path: Path, rules: Rules) -> AsyncIterator[list[LinePlace]]:
        async for chunk in validate(path, rules):
            begun.set()
            await go_on.wait()
            yield chunk

    monkeypatch.setattr(input_validator, "validate", slow)
    async with open_place() as place:
        for lines, codes, wrong in (
            ([line(str(n), **SHORT) for n in range(5)], {"batch_cancelled"}, None),
            ([line("a", **SHORT), b"no JSON"], set(), [2]),
        ):
            begun.clear()
            go_on.clear()
            batch_id = await place.submit(*lines)
            if not wrong:
                await asyncio.wait_for(begun.wait(), 30)
            cancelled = await place.api.http.post(f"/v1/batches/{batch_id}/cancel")
            assert cancelled.json()["status"] in ("cancelling", "cancelled")
            go_on.set()
            done = await place.until(batch_id)
            assert done["status"] == "cancelled"
            assert done["in_progress_at"] is None
            assert done["output_file_id"] is None
            bad = await place.answers(done["error_file_id"])
            assert {one["error"]["code"] for one in bad.values()} == codes
            assert len(bad) == done["request_counts"]["total"] == (0 if wrong else len(lines))
            assert (done["errors"] and [one["line"] for one in done["errors"]["data"]]) == wrong
        assert not place.api.engine.added


async def test_lines_and_requests_of_a_key_have_queues_of_their_own(open_place: Callable[..., Any]) -> None:
    """Where keys share the queue, lines run though their key has all of it that it may, and take nothing of it."""
    async with open_place(api_keys=("noisy", "quiet"), fair_by="key", max_queued_requests=8) as place:
        api, engine = place.api, place.api.engine
        api.http.headers["Authorization"] = "Bearer noisy"
        engine.paused = True
        flood = [asyncio.create_task(api.complete(max_tokens=2)) for _ in range(7)]
        await until(lambda: len(engine.live) == 7)
        assert (await api.complete()).status_code == 429
        batch = await place.submit(*(line(str(n), **SHORT) for n in range(20)))
        await until(lambda: len(engine.live) == 7 + INFLIGHT)
        api.http.headers["Authorization"] = "Bearer quiet"
        chat = asyncio.create_task(api.complete(max_tokens=2))
        await until(lambda: len(engine.live) == 7 + INFLIGHT + 1)
        engine.paused = False
        assert {answer.status_code for answer in await asyncio.gather(chat, *flood)} == {200}
        api.http.headers["Authorization"] = "Bearer noisy"
        done = await place.until(batch)
        assert done["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
