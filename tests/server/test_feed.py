from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from server_worlds import Api, MakeApi, StartServer
from test_server_debug import state
from typer.testing import CliRunner

from skipjoin.cli import app
from skipjoin.config.key_files import KeyRights, owner_of_key
from skipjoin.core.events import Arrived
from skipjoin.core.request import NO_TARGET, Request, ServiceClass
from skipjoin.observe.history import RUNNING, History, Interval
from skipjoin.observe.metrics import EngineMetrics
from skipjoin.observe.steps import StepSummary
from skipjoin.recipes import DEFAULT
from skipjoin.server.api import feed
from skipjoin.server.api.auth import Viewer, viewer_of
from skipjoin.server.api.errors import ApiError
from skipjoin.server.api.feed import Feed
from skipjoin.server.engines.messages import RequestGroup, RequestStates, Stats

pytestmark = pytest.mark.anyio

OPERATOR = Viewer("operator", None, has_totals=True)


def parse(event: bytes) -> tuple[str, Any]:
    name, data = event.decode().split("\n")[:2]
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def reply(api: Api, **parts: Any) -> None:
    while not api.engine.asked:
        await asyncio.sleep(0)
    numbers = list(api.engine.live)
    api.engine.tell(RequestStates(api.engine.asked.pop(), [state(number) for number in numbers], **parts))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def history(number: int) -> History:
    intervals = [Interval("no_slot", 0.0, 1.0), Interval(RUNNING, 1.0, 3.0)]
    facts = {"output_tokens": 5, "first_token": 1.5, "ended": 3.0, "reason": "stop", "intervals": intervals}
    return History(number, 0.0, 8, 16, ServiceClass.REAL_TIME, False, 0, NO_TARGET, **facts)  # type: ignore[arg-type]


async def test_listeners_share_snapshots_and_none_is_taken_without_them(
    make_api: MakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "PERIOD_S", 0.01)
    async with make_api() as api:
        source = Feed(api.service)
        await asyncio.sleep(0.05)
        assert not api.engine.asked
        streams = [source.events(OPERATOR) for _ in range(3)]
        for stream in streams:
            name, hello = parse(await anext(stream))
            assert (name, hello["model"], hello["finished"]) == ("hello", "tiny", [])
        waiting = [asyncio.create_task(anext(stream)) for stream in streams]
        await reply(api, finished=[history(7)], total_finished=1, now=4.0)
        first, *others = await asyncio.gather(*waiting)
        assert all(other == first for other in others)
        name, snapshot = parse(first)
        (row,) = snapshot["finished"]
        assert name == "snapshot"
        assert (row["ttft_s"], row["tpot_s"], row["jct_s"], row["waited_s"]) == (1.5, 0.375, 3.0, 1.0)
        assert row["ended_at"] == pytest.approx(snapshot["time"] - 1.0)

        late = source.events(OPERATOR)
        assert parse(await anext(late))[1]["finished"] == [row]
        for stream in (*streams, late):
            await stream.aclose()
        task = source._task
        while not task.done():
            api.engine.asked and await reply(api)
            await asyncio.sleep(0.001)
        api.engine.asked.clear()
        await asyncio.sleep(0.05)
        assert not api.engine.asked


async def test_viewers_see_their_own_requests_and_operators_see_all(make_api: MakeApi) -> None:
    async with make_api() as api:
        api.engine.paused = True
        task = asyncio.create_task(api.complete(max_tokens=2))
        while not api.engine.live:
            await asyncio.sleep(0)
        source = Feed(api.service)
        viewers = (OPERATOR, Viewer("anonymous", "anonymous", has_totals=True), Viewer("b", "b", has_totals=False))
        streams = {viewer.owner: source.events(viewer) for viewer in viewers}
        for stream in streams.values():
            await anext(stream)
        waiting = {owner: asyncio.create_task(anext(stream)) for owner, stream in streams.items()}
        (number,) = api.engine.live
        await reply(api, finished=[history(number)])
        found = {owner: parse(await event)[1] for owner, event in waiting.items()}
        assert [len(found[owner]["rows"]) for owner in found] == [1, 1, 0]
        assert [len(found[owner]["finished"]) for owner in found] == [1, 1, 0]
        assert found[None]["rows"][0]["id"].startswith("cmpl-")
        assert found["anonymous"]["engines"] == found[None]["engines"]
        source.close()
        for stream in streams.values():
            assert [event async for event in stream] == []
        api.engine.paused = False
        await task


def figures(part: Any) -> list[float]:
    if isinstance(part, dict | list):
        return [number for inner in (part.values() if isinstance(part, dict) else part) for number in figures(inner)]
    return [part] if isinstance(part, int | float) else []


@pytest.mark.parametrize("path", ["/debug/events", "/load"])
async def test_figures_of_a_key_do_not_depend_on_lengths_of_others(
    make_api: MakeApi, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """The same requests with other lengths give the same answer, except for the key itself and operators."""
    rights = {owner_of_key(b"operator"): KeyRights(is_operator=True)}
    seen: dict[str, list[Any]] = {"other": [], "operator": []}
    for tokens in (1, 9):
        async with make_api(api_keys=("one", "other", "operator"), key_rights=rights) as api:
            api.engine.paused = True
            body = {"prompt": [5] * tokens, "max_tokens": 2 * tokens}
            task = asyncio.create_task(api.http.post("/v1/completions", json=body, headers=bearer("one")))
            while not api.engine.live:
                await asyncio.sleep(0)
            metrics = EngineMetrics(device_blocks=8, block_size=8, block_bytes=1)
            prompt = Request(0, 0.0, range(tokens), 4)
            metrics.observe([Arrived(prompt, 0.0)])
            metrics.measured({"queue_requests": [tokens] * 16, "deadline_requests": [tokens, tokens]})
            api.engine.tell(Stats(tokens, metrics.snapshot()))
            for key, found in seen.items():
                if path == "/load":
                    found.append((await api.http.get(path, headers=bearer(key))).json())
                    continue
                source = Feed(api.service)
                stream = source.events(viewer_of(api.service.config, owner_of_key(key.encode())))
                await anext(stream)
                event = asyncio.create_task(anext(stream))
                step = StepSummary(0.0, 1.0, prefill=tokens, decodes=tokens, blocks_in=tokens)
                group = RequestGroup(ServiceClass.REAL_TIME, "running", None, 1, tokens, tokens)
                await reply(api, steps=[step], groups=[group], now=time.time())
                found.append(parse(await event)[1] | {"time": 0.0})
                await stream.aclose()
                source.close()
            api.engine.paused = False
            await task
    assert seen["other"][0] == seen["other"][1]
    assert figures(seen["operator"][0]) != figures(seen["operator"][1])


async def test_one_key_cannot_hold_all_streams(make_api: MakeApi) -> None:
    async with make_api(api_keys=("one", "other")) as api:
        source = Feed(api.service)
        one, other = (viewer_of(api.service.config, owner_of_key(key)) for key in (b"one", b"other"))
        streams = [source.events(one) for _ in range(feed.MAX_OF_KEY)]
        for stream in streams:
            await anext(stream)
        with pytest.raises(ApiError, match="4 consoles of this key listen already"):
            await anext(source.events(one))
        await anext(source.events(other))
        await streams[0].aclose()
        await anext(source.events(one))


async def test_number_of_listeners_is_bounded(make_api: MakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "MAX_LISTENERS", 2)
    async with make_api() as api:
        source = Feed(api.service)
        streams = [source.events(OPERATOR) for _ in range(2)]
        for stream in streams:
            await anext(stream)
        with pytest.raises(ApiError, match="2 consoles listen already"):
            await anext(source.events(OPERATOR))
        await streams[0].aclose()
        await anext(source.events(OPERATOR))


def test_top_shows_a_running_server_and_its_end_is_not_delayed(start_server: StartServer) -> None:
    server = start_server()
    shown = CliRunner().invoke(app, ["top", "--url", server.url])
    assert shown.exit_code == 0, shown.output
    assert f"tiny, recipe {DEFAULT}" in shown.output
    assert "0 running, 0 waiting" in shown.output
