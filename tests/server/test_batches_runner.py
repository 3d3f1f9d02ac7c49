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
from skipjoin.server import lifecycle
from skipjoin.server.api.service import Phase
from skipjoin.server.batches import phases, runner, service
from skipjoin.server.batches.batch_rows import BatchRows
from skipjoin.server.batches.line_check import Rules
from skipjoin.server.batches.line_rows import LineRows
from skipjoin.server.batches.phases import validate
from skipjoin.server.batches.records import LinePlace, NoSpace, StoreUnavailable
from skipjoin.server.batches.service import Batches
from skipjoin.server.batches.store import Store
from skipjoin.server.engines.errors import EngineDeadError
from support.pace import max_stall_s
from support.waiting import until
from support.worlds import exhaustive

pytestmark = pytest.mark.anyio
INFLIGHT = 8
SHORT = {"prompt": "abc", "max_tokens": 4, "ignore_eos": True}


class World:
    """API with batches, of which at most `inflight` sequences run in the engine."""

    def __init__(self, api: Api, inflight: int = INFLIGHT) -> None:
        self.api = api
        self.batches = Batches(api.service, most=inflight)
        self.batches.add_routes(api.app.app)  # type: ignore[arg-type]

    @property
    def store(self) -> Store:
        return self.batches.context.store

    async def submit(self, *lines: bytes, window: str = "24h", endpoint: str = COMPLETIONS) -> str:
        data = b"\n".join(lines) + b"\n"
        file = await self.api.http.post("/v1/files", files={"file": ("x", data)}, data={"purpose": "batch"})
        assert file.status_code == 200, file.text
        body = {"input_file_id": file.json()["id"], "endpoint": endpoint, "completion_window": window}
        made = await self.api.http.post("/v1/batches", json=body)
        assert made.status_code == 200, made.text
        return str(made.json()["id"])

    async def batch(self, batch_id: str) -> dict[str, Any]:
        found = await self.api.http.get(f"/v1/batches/{batch_id}")
        assert found.status_code == 200, found.text
        return found.json()

    async def until(self, batch_id: str, *statuses: str) -> dict[str, Any]:
        """Wait until the batch has one of `statuses` (default: any final one) and return it."""
        async with asyncio.timeout(30):
            while (found := await self.batch(batch_id))["status"] not in (statuses or FINAL):
                await asyncio.sleep(0.02)
        return found

    async def answers(self, file_id: str | None) -> dict[str, Any]:
        """Return the lines of a file by custom_id, after checking that none is repeated."""
        if file_id is None:
            return {}
        text = (await self.api.http.get(f"/v1/files/{file_id}/content")).text
        found = [json.loads(line) for line in text.splitlines()]
        assert len({line["custom_id"] for line in found}) == len(found)
        return {line["custom_id"]: line for line in found}

    def metric(self, name: str) -> float:
        text = self.api.metrics.render().decode()
        return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"skipjoin:{name} "))


@pytest.fixture
def open_world(make_api: MakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr(service, "_LOOK_S", 0.2)
    monkeypatch.setattr(service, "_LONGEST_PAUSE_S", 1.0)

    @asynccontextmanager
    async def make(inflight: int = INFLIGHT, **settings: Any) -> AsyncIterator[World]:
        async with make_api(batch_dir=str(tmp_path / "batches"), **settings) as api:
            world = World(api, inflight)
            await world.batches.open()
            yield world
            await world.batches.close()
            assert api.is_clean()

    return make


async def test_batch_lines_do_not_count_against_request_limits(open_world: Callable[..., Any]) -> None:
    """They are best effort, limited in number, and have the batch's window as deadline."""
    async with open_world(max_queued_requests=2) as world:
        engine = world.api.engine
        engine.paused = True
        batch = await world.submit(*(line(str(n), **SHORT) for n in range(30)), window="60s")
        await until(lambda: len(engine.live) == INFLIGHT)
        await asyncio.sleep(0.05)
        assert len(engine.live) == INFLIGHT
        for add in engine.added:
            assert add.options.service is ServiceClass.BEST_EFFORT
            assert 50 < add.options.deadline_s <= 61
        assert len({add.params.seed for add in engine.added}) == INFLIGHT
        # The queue of direct requests has two slots, which batch lines do not occupy.
        chats = [asyncio.create_task(world.api.complete(max_tokens=2)) for _ in range(2)]
        await until(lambda: len(engine.live) == INFLIGHT + 2)
        assert (await world.api.complete()).status_code == 429
        engine.paused = False
        assert [answer.status_code for answer in await asyncio.gather(*chats)] == [200, 200]
        done = await world.until(batch)
        assert done["request_counts"] == {"total": 30, "completed": 30, "failed": 0}
        assert world.metric("batch_generation_tokens_total") == 30 * SHORT["max_tokens"]
        assert world.metric('batch_lines_ended_total{state="done"}') == 30


@pytest.mark.parametrize("field", [{"priority": 9}, exhaustive({"priority": -1}), {"service_tier": "priority"}])
async def test_lines_have_the_rights_of_their_key(open_world: Callable[..., Any], field: dict[str, Any]) -> None:
    async with open_world(priority_range="0:5") as world:
        refused = await world.api.http.post("/v1/completions", json=SHORT | field)
        batch = await world.until(await world.submit(line("bad", **SHORT, **field), line("good", **SHORT, priority=5)))
        (bad,) = (await world.answers(batch["error_file_id"])).values()
        assert (refused.status_code, bad["response"]["status_code"]) == (400, 400)
        assert bad["response"]["body"] == refused.json()
        assert list(await world.answers(batch["output_file_id"])) == ["good"]


async def test_lost_lines_are_retried_and_failed_lines_are_not(open_world: Callable[..., Any]) -> None:
    async with open_world() as world:
        engine = world.api.engine
        engine.paused = True
        batch = await world.submit(
            *(line(str(n), **SHORT) for n in range(4)), line("late", **SHORT, deadline_ms=60_000)
        )
        await until(lambda: len(engine.live) == 5)
        first = {tuple(add.prompt): add.params.seed for add in engine.added}
        seeds = sorted(add.params.seed for add in engine.added)
        engine.end_all(FinishReason.ABORT)  # retried, because the answer is 503
        await until(lambda: len(engine.live) == 5)
        assert first
        assert sorted(add.params.seed for add in engine.added[5:]) == seeds
        engine.die()
        engine.join(world.api.ready)
        await until(lambda: len(engine.live) == 5)
        late = next(key for key, (add, _) in engine.live.items() if add.options.deadline_s < 61)
        lost, *others = [key for key in engine.live if key != late]
        for key, reason, error in ((late, FinishReason.DEADLINE, ""), (lost, FinishReason.ERROR, "it is too large")):
            others_live = {other: engine.live.pop(other) for other in list(engine.live) if other != key}
            engine.end_all(reason, error)
            engine.live.update(others_live)
        assert len(others) == 3
        engine.paused = False
        done = await world.until(batch)
        assert done["request_counts"] == {"total": 5, "completed": 3, "failed": 2}
        failed = await world.answers(done["error_file_id"])
        assert failed.pop("late")["response"]["body"]["error"]["code"] == "deadline_exceeded"
        ((_, one),) = failed.items()
        assert one["response"]["status_code"] == 500
        assert one["response"]["body"]["error"]["message"] == "it is too large"
        assert world.metric("batch_lines_requeued_total") == 5


async def test_line_that_crashes_engines_fails_alone(
    open_world: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Lines that ran concurrently are retried and complete."""
    for name in ("_IDLE_S", "_FIRST_RETRY_S", "_LAST_RETRY_S"):
        monkeypatch.setattr(runner, name, 0.01)
    async with open_world() as world:
        engine, crashes = world.api.engine, 0
        engine.paused = True
        batch = await world.submit(*(line(f"{n}", **{**SHORT, "max_tokens": 4 + n}) for n in range(6)))
        while (done := await world.batch(batch))["status"] != "completed":
            if any(add.params.max_tokens == 7 for add, _ in engine.live.values()):
                crashes += 1
                world.api.service.client.fail_all(EngineDeadError())
            elif engine.live:
                engine.step()
            await asyncio.sleep(0.002)
        assert crashes == runner.MAX_LOST
        assert "batches wait: a line is tried again: the engine has stopped" in caplog.text
        assert done["request_counts"] == {"total": 6, "completed": 5, "failed": 1}
        ((name, one),) = (await world.answers(done["error_file_id"])).items()
        assert name == "3"
        assert one["response"]["body"]["error"]["code"] == "engine_lost"


@pytest.mark.parametrize("failure", [exhaustive(NoSpace("the disk is full")), StoreUnavailable("the database is gone")])
async def test_lines_survive_temporary_store_failure(
    open_world: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    """Direct requests still work, batch routes report the error, and no line is lost or runs twice."""
    async with open_world() as world:
        batch = await world.submit(*(line(str(n), **SHORT) for n in range(40)))
        await until(lambda: world.metric("batch_generation_tokens_total") > 0)

        async def fail(*args: object, **kwargs: object) -> None:
            raise failure

        with monkeypatch.context() as patched:
            for name in ("finish", "put_back", "take"):
                patched.setattr(LineRows, name, fail)
            for name in ("due", "get", "add"):
                patched.setattr(BatchRows, name, fail)
            patched.setattr(Store, "renew", fail)
            generated = 0.0  # lines taken before the failure continue, and no others start
            while (now := world.metric("batch_generation_tokens_total")) != generated:
                generated = now
                await asyncio.sleep(0.3)
            assert generated < 40 * SHORT["max_tokens"]
            assert (await world.api.complete(max_tokens=2)).status_code == 200
            answer = await world.api.http.get(f"/v1/batches/{batch}")
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] in ("insufficient_storage", "batch_store_unavailable")
        done = await world.until(batch)
        assert done["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
        assert len(await world.answers(done["output_file_id"])) == 40
        assert world.metric("batch_generation_tokens_total") == 40 * SHORT["max_tokens"]


@pytest.mark.parametrize("error", [NoSpace("the disk is full"), exhaustive(RuntimeError("unexpected"))])
async def test_failed_finalization_backs_off_without_blocking_others(
    open_world: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    start, attempts, batch = BatchRows.start_finalizing, 0, ""

    async def fail(rows: BatchRows, batch_id: str) -> Any:
        nonlocal attempts
        if batch_id != batch:
            return await start(rows, batch_id)
        attempts += 1
        raise error

    async with open_world() as world:
        with monkeypatch.context() as patched:
            patched.setattr(BatchRows, "start_finalizing", fail)
            batch = await world.submit(line("a", **SHORT), line("b", **SHORT))
            await until(lambda: attempts)
            await asyncio.sleep(0.5)
            assert attempts <= 3
            other = await world.submit(line("a", **SHORT))
            assert (await world.until(other))["status"] == "completed"
        assert (await world.until(batch))["status"] == "completed"


async def test_running_lines_are_returned_on_shutdown(
    open_world: Callable[..., Any], make_api: MakeApi, tmp_path: Path
) -> None:
    """The next server finishes them."""
    async with open_world() as world:
        world.api.engine.paused = True
        batch = await world.submit(*(line(str(n), **SHORT) for n in range(20)))
        await until(lambda: len(world.api.engine.live) == INFLIGHT)
        world.api.service.drain()
        await asyncio.wait_for(world.batches.close(), 20)
        assert not world.api.engine.live
    async with open_world() as world:
        done = await world.until(batch)
        assert done["request_counts"]["completed"] == 20


async def test_lines_wait_until_engine_is_ready(open_world: Callable[..., Any]) -> None:
    async with open_world() as world:
        world.api.service.phase = Phase.STARTING
        batch = await world.submit(line("a", **SHORT))
        await asyncio.sleep(0.3)
        assert not world.api.engine.added
        world.api.service.phase = Phase.OPEN
        assert (await world.until(batch))["status"] == "completed"


async def test_missing_input_file_fails_only_its_own_lines(open_world: Callable[..., Any], tmp_path: Path) -> None:
    """The file is deleted before validation, and while lines wait. Other batches continue."""
    async with open_world(inflight=1) as world:
        world.api.service.phase = Phase.STARTING
        blobs = tmp_path / "batches" / "files"
        early = await world.submit(line("a", **SHORT))
        for blob in blobs.iterdir():
            blob.unlink()
        late = await world.submit(*(line(str(n), **SHORT) for n in range(3)))
        world.api.engine.paused = True
        world.api.service.phase = Phase.OPEN
        assert (await world.until(early))["errors"]["data"][0]["code"] == "input_file_gone"
        await until(lambda: world.api.engine.live)
        for blob in blobs.iterdir():
            blob.unlink()
        world.api.engine.paused = False
        done = await world.until(late)
        assert done["request_counts"] == {"total": 3, "completed": 1, "failed": 2}
        for answer in (await world.answers(done["error_file_id"])).values():
            assert answer["response"]["body"]["error"]["code"] == "input_file_gone"
        assert (await world.until(await world.submit(line("a", **SHORT))))["status"] == "completed"


async def test_running_a_batch_does_not_block_event_loop(open_world: Callable[..., Any]) -> None:
    """The batch has one large line and many small ones."""
    async with open_world(inflight=64) as world, LoopWatch() as watch:
        large = line("large", prompt="x" * 1_000_000)
        batch = await world.submit(large, *(line(str(n), **SHORT) for n in range(200)))
        done = await world.until(batch)
        assert done["request_counts"] == {"total": 201, "completed": 200, "failed": 1}
    assert watch.longest_s < max_stall_s()


async def test_batches_can_be_disabled(make_api: MakeApi) -> None:
    async with make_api(batch_dir="none") as api:
        lifecycle._batches(api.service, INFLIGHT).add_routes(api.app.app)  # type: ignore[arg-type]
        answers: list[httpx.Response] = [await api.http.get(path) for path in ("/v1/files", "/v1/batches")]
        assert [answer.status_code for answer in answers] == [404, 404]
        message = "this server has no files and batches: it was started with batch_dir none"
        assert [answer.json()["error"]["message"] for answer in answers] == [message] * 2


async def test_unwritten_outputs_count_against_quota(open_world: Callable[..., Any]) -> None:
    """Answers beyond the key's quota become errors, and later lines do not run."""
    max_bytes = 20_000
    async with open_world(batch_max_bytes_per_key=max_bytes) as world:
        engine = world.api.engine
        count = 60
        batch_id = await world.submit(*(line(str(n), **SHORT) for n in range(count)))
        done = await world.until(batch_id)
        assert done["status"] == "completed"
        good, bad = await world.answers(done["output_file_id"]), await world.answers(done["error_file_id"])
        assert len(good) + len(bad) == count
        assert {line["response"]["body"]["error"]["code"] for line in bad.values()} == {"quota_exceeded"}
        assert {line["response"]["status_code"] for line in bad.values()} == {429}
        assert done["request_counts"] == {"total": count, "completed": len(good), "failed": len(bad)}
        assert 10 < len(good) < len(engine.added) < count
        assert world.metric('batch_lines_ended_total{state="done"}') == len(good)
        files = (await world.api.http.get("/v1/files")).json()["data"]
        answered = sum(file["bytes"] for file in files if not file["filename"].endswith("error.jsonl"))
        assert answered <= max_bytes
        input_id = next(file["id"] for file in files if file["purpose"] == "batch")
        body = {"input_file_id": input_id, "endpoint": COMPLETIONS, "completion_window": "24h"}
        refused = await world.api.http.post("/v1/batches", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "quota_exceeded")
        for file in files:
            await world.api.http.delete(f"/v1/files/{file['id']}")
        batch_id = await world.submit(line("a", **SHORT))
        assert (await world.until(batch_id))["request_counts"]["completed"] == 1


async def test_batch_cancelled_during_validation_reports_every_line(
    open_world: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are the same as those of a batch that is cancelled after its first line ran."""
    started, proceed = asyncio.Event(), asyncio.Event()

    async def slow(path: Path, rules: Rules) -> AsyncIterator[list[LinePlace]]:
        async for chunk in validate(path, rules):
            started.set()
            await proceed.wait()
            yield chunk

    monkeypatch.setattr(phases, "validate", slow)
    async with open_world() as world:
        for lines, codes, wrong in (
            ([line(str(n), **SHORT) for n in range(5)], {"batch_cancelled"}, None),
            ([line("a", **SHORT), b"no JSON"], set(), [2]),
        ):
            started.clear()
            proceed.clear()
            batch_id = await world.submit(*lines)
            if not wrong:
                await asyncio.wait_for(started.wait(), 30)
            cancelled = await world.api.http.post(f"/v1/batches/{batch_id}/cancel")
            assert cancelled.json()["status"] in ("cancelling", "cancelled")
            proceed.set()
            done = await world.until(batch_id)
            assert done["status"] == "cancelled"
            assert done["in_progress_at"] is None
            assert done["output_file_id"] is None
            bad = await world.answers(done["error_file_id"])
            assert {line["error"]["code"] for line in bad.values()} == codes
            assert len(bad) == done["request_counts"]["total"] == (0 if wrong else len(lines))
            assert (done["errors"] and [error["line"] for error in done["errors"]["data"]]) == wrong
        assert not world.api.engine.added


async def test_batch_lines_and_requests_of_a_key_have_separate_queues(open_world: Callable[..., Any]) -> None:
    """With `fair_by=key`, lines run even if their key's share of the queue is full, and do not use the queue."""
    async with open_world(api_keys=("noisy", "quiet"), fair_by="key", max_queued_requests=8) as world:
        api, engine = world.api, world.api.engine
        api.http.headers["Authorization"] = "Bearer noisy"
        engine.paused = True
        flood = [asyncio.create_task(api.complete(max_tokens=2)) for _ in range(7)]
        await until(lambda: len(engine.live) == 7)
        assert (await api.complete()).status_code == 429
        batch = await world.submit(*(line(str(n), **SHORT) for n in range(20)))
        await until(lambda: len(engine.live) == 7 + INFLIGHT)
        api.http.headers["Authorization"] = "Bearer quiet"
        chat = asyncio.create_task(api.complete(max_tokens=2))
        await until(lambda: len(engine.live) == 7 + INFLIGHT + 1)
        engine.paused = False
        assert {answer.status_code for answer in await asyncio.gather(chat, *flood)} == {200}
        api.http.headers["Authorization"] = "Bearer noisy"
        done = await world.until(batch)
        assert done["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
