"""Which program a request belongs to, and what clients learn about their place in the queue."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
from server_worlds import Api, MakeApi

from skipjoin.config import ConfigError, ServerConfig
from skipjoin.config.access import with_keys_of_files
from skipjoin.config.key_files import owner_of_key
from skipjoin.core.request import ProgramId
from skipjoin.server.api import replies
from skipjoin.server.api.auth import ANONYMOUS
from skipjoin.server.api.finish_times import COVERED
from skipjoin.server.api.limits import Admission, AdmissionSlot
from skipjoin.server.metrics import Metrics
from support.waiting import Clock, until

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "hello"}]


async def program_of(api: Api, path: str, headers: dict[str, str], **body: Any) -> ProgramId | None:
    prompt = {"prompt": "ab"} if path == "/v1/completions" else {"messages": HELLO}
    sent = await api.http.post(path, headers=headers, json={"max_tokens": 1, **prompt, **body})
    assert sent.status_code == 200, sent.text
    return api.engine.added[-1].options.program


@pytest.mark.parametrize(
    ("headers", "body", "name", "is_stated"),
    [
        ({"x-program-id": "run 7"}, {"prompt_cache_key": "key"}, "run 7", True),
        ({"x-llm-d-inference-fairness-id": "flow"}, {"prompt_cache_key": "key", "user": "me"}, "key", False),
        ({"x-llm-d-inference-fairness-id": "flow"}, {"metadata": {"session_id": "s-1"}}, "s-1", False),
        ({"x-llm-d-inference-fairness-id": "flow"}, {"user": "me"}, "flow", False),
        ({}, {"user": "me"}, None, False),
    ],
)
async def test_programs_are_named_by_headers_and_sessions(
    api: Api, headers: dict[str, str], body: dict[str, Any], name: str | None, is_stated: bool
) -> None:
    found = await program_of(api, "/v1/completions", headers, **body)
    assert found == (None if name is None else ProgramId(ANONYMOUS, name, is_stated))


async def test_messages_name_sessions_in_their_metadata(api: Api) -> None:
    for metadata, name in (
        ({"session_id": "s-1"}, "s-1"),
        ({"user_id": "user_1_account_2_session_3"}, "user_1_account_2_session_3"),
        ({"user_id": "me"}, None),
    ):
        found = await program_of(api, "/v1/messages", {}, metadata=metadata)
        assert (found and found.name) == name


@pytest.mark.parametrize(("source", "name"), [("none", None), ("header", None), ("user", "me")])
async def test_operators_choose_what_names_a_program(make_api: MakeApi, source: str, name: str | None) -> None:
    async with make_api(program_by=source) as api:
        found = await program_of(api, "/v1/completions", {}, user="me")
        assert (found and found.name) == name
        stated = await program_of(api, "/v1/completions", {"x-program-id": "run"})
        assert (stated and stated.name) == (None if source == "none" else "run")


async def test_equal_ids_of_two_keys_differ(make_api: MakeApi) -> None:
    async with make_api(api_keys=("one", "two")) as api:
        found = {
            await program_of(api, "/v1/completions", {"x-program-id": "same", "authorization": f"Bearer {key}"})
            for key in ("one", "two")
        }
    assert found == {ProgramId(owner_of_key(key), "same") for key in (b"one", b"two")}


@pytest.mark.parametrize("name", ["", "x" * 513, "a\x7f"])
async def test_invalid_ids_are_refused(api: Api, name: str) -> None:
    sent = await api.http.post("/v1/completions", headers={"x-program-id": name}, json={"prompt": "ab"})
    assert sent.status_code == 400
    assert "x-program-id must be 1 to 512 printable characters" in sent.json()["error"]["message"]


async def test_keys_have_weights_where_they_share_the_service(make_api: MakeApi, tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n[weight=3]\ntwo\n")
    config = with_keys_of_files(ServerConfig(api_key_file=str(file)))
    async with make_api(api_keys=config.api_keys, key_rights=config.key_rights) as api:
        for key in ("one", "two"):
            await program_of(api, "/v1/completions", {"authorization": f"Bearer {key}"})
    assert [add.options.weight for add in api.engine.added] == [1.0, 3.0]
    with pytest.raises(ConfigError, match="weight of API keys needs fair_by"):
        ServerConfig(api_keys=config.api_keys, key_rights=config.key_rights, fair_by="none")
    file.write_text("[weight=0]\none\n")
    with pytest.raises(ConfigError, match=r"line 1: weight must be a number in \(0, 1000\], got '0'"):
        with_keys_of_files(ServerConfig(api_key_file=str(file), fair_by="key"))


# -- places in the queue ----------------------------------------------------------------------------------


async def test_streams_tell_their_place_while_they_wait(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "_FIRST_NOTE_S", 0.01)
    api.engine.paused = True
    options = {"stream": True, "max_tokens": 2, "stream_options": {"include_usage": True}}
    one, other = (asyncio.create_task(api.complete(**options)) for _ in range(2))
    await until(lambda: len(api.engine.added) == 2)
    await asyncio.sleep(0.1)
    api.engine.paused = False
    for number, answer in enumerate(await asyncio.gather(one, other), 1):
        assert answer.text.startswith(f": x-queue-position {number}\n\ndata: ")
        assert answer.text.count("x-queue-position") == 1
        assert '"queue_time":0.' in answer.text


async def test_refusals_tell_the_place_in_the_queue(make_api: MakeApi) -> None:
    async with make_api(max_queued_requests=1) as api:
        for _ in range(6):
            await api.complete(max_tokens=1)
        api.engine.paused = True
        waiting = asyncio.create_task(api.complete(max_tokens=1))
        await until(lambda: len(api.engine.added) == 7)
        refused = await api.complete()
        api.engine.paused = False
        await waiting
    assert refused.status_code == 429
    assert refused.headers["x-queue-position"] == "2"
    assert 0 < int(refused.headers["x-estimated-wait-ms"]) < 10_000


@pytest.mark.parametrize("slower", [1.0, 1.4])
def test_estimates_cover_four_of_five_waits(slower: float) -> None:
    """Requests come in bursts to a server with two slots, which is `slower` in the second half."""
    clock, draw = Clock(), random.Random(5)
    admission = Admission(10_000, 1_000_000, Metrics(), clock)
    waiting: deque[AdmissionSlot] = deque()
    ends: list[tuple[float, int, AdmissionSlot]] = []
    covered: list[bool] = []
    arrival = 0.0
    for number in range(3_000):
        arrival += draw.expovariate(1.8 if number // 50 % 2 else 0.7)
        while ends and ends[0][0] <= arrival:
            clock.now, _, ended = heapq.heappop(ends)
            ended.ended()
            covered += start(waiting, ends, clock.now + draw.expovariate(1.0) * (slower if number > 1_500 else 1.0))
        clock.now = arrival
        waiting += admission.reserve([1])
        if len(ends) < 2:
            covered += start(waiting, ends, clock.now + draw.expovariate(1.0))
    assert len(covered) > 2_000
    assert COVERED - 0.05 < sum(covered) / len(covered) < COVERED + 0.1


def start(waiting: deque[AdmissionSlot], ends: list[tuple[float, int, AdmissionSlot]], end: float) -> Iterator[bool]:
    """Start the first one, and yield whether its wait was covered."""
    if waiting:
        slot = waiting.popleft()
        slot.started()
        heapq.heappush(ends, (end, id(slot), slot))
        if slot.queue.estimate_s is not None and slot.waited_s is not None:
            yield slot.waited_s <= slot.queue.estimate_s


async def test_a_program_goes_on_after_its_engine_died_within_and_between_calls(make_api: MakeApi) -> None:
    async with make_api(replicas=2) as api:
        for engine in api.engines:
            engine.paused = True
        headers = {"x-program-id": "run"}
        body = {"prompt": "abcdef", "max_tokens": 4}
        call = asyncio.create_task(api.http.post("/v1/completions", headers=headers, json=body))
        await until(lambda: any(engine.live for engine in api.engines))
        dying, other = sorted(api.engines, key=lambda engine: -len(engine.live))
        dying.step()
        other.paused = False
        dying.die()
        assert (await call).json()["choices"][0]["text"] == "abcd"
        again = await api.http.post("/v1/completions", headers=headers, json=body)
        assert again.json()["choices"][0]["text"] == "abcd"
        assert [add.options.program for add in other.added] == [ProgramId(ANONYMOUS, "run")] * 2
