from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from server_worlds import MakeApi
from simulated_engine import SimulatedLoop

from skipjoin.config import EngineConfig
from skipjoin.config.key_files import KeyRights, owner_of_key
from skipjoin.core.forecast import Forecast
from skipjoin.core.request import ServiceClass
from skipjoin.sampling import SamplingParams
from skipjoin.server.api import debug
from skipjoin.server.engines.engine_observer import describe
from skipjoin.server.engines.engine_server import EngineServer
from skipjoin.server.engines.messages import (
    Abort,
    Add,
    Reforecast,
    RequestReport,
    RequestStates,
    Setup,
    ToEngine,
)
from support.load import make
from support.policies import OnCall
from support.watch import Stepper, World

pytestmark = pytest.mark.anyio


def state(number: int, **fields: Any) -> RequestReport:
    empty = {"computed_tokens": 0, "device_blocks": 0, "cpu_blocks": 0, "wait_reason": None, "wait_s": None}
    rank = {"service": ServiceClass.REAL_TIME, "is_urgent": False, "priority": 0}
    base = {"state": "waiting", **rank, "place": 0, "prompt_tokens": 8, "output_tokens": 0, **empty}
    return RequestReport(number=number, **{**base, **fields})


def test_request_states_and_order() -> None:
    """Three requests run and one waits. Then two new ones take slots, and one request is swapped out."""
    eviction = OnCall()
    world = World("fcfs", eviction=lambda: eviction, device_blocks=20, max_seqs=3)
    stepper = Stepper(world.core())
    core, blocks = stepper.core, stepper.core.kv.blocks_for
    stepper.add(make(0, max_tokens=30, priority=5), *(make(number, max_tokens=30) for number in (1, 2, 3)))
    stepper.step()
    found = describe(core, stepper.now)
    assert [row.number for row in found] == [1, 2, 3, 0]
    rest = {"max_tokens": 30, "age_s": stepper.now}
    assert found[0] == state(1, state="running", output_tokens=1, computed_tokens=8, device_blocks=blocks(8), **rest)
    assert found[3] == state(0, priority=5, place=3, wait_reason="no_slot", wait_s=stepper.now, **rest)

    stepper.add(make(4, max_tokens=30, priority=-1), make(5, max_tokens=30, priority=-1))
    stepper.step()
    eviction.out = [core.requests[3]]
    stepper.step()
    rows = {row.number: row for row in describe(core, stepper.now)}
    assert [(row.number, row.state, row.wait_reason) for row in rows.values()] == [
        (4, "running", None),
        (5, "running", None),
        (1, "running", None),
        (2, "preempted", "no_slot"),
        (3, "swapped", "no_slot"),
        (0, "waiting", "no_slot"),
    ]
    assert (rows[2].device_blocks, rows[2].cpu_blocks) == (blocks(8), 0)
    assert (rows[3].device_blocks, rows[3].cpu_blocks) == (0, blocks(8))
    stepper.drain()
    assert describe(core, stepper.now) == []


async def test_debug_routes_can_be_disabled(make_api: MakeApi) -> None:
    async with make_api(console=False) as api:
        assert (await api.http.get("/debug/requests")).status_code == 404


async def test_silent_replicas_are_listed(make_api: MakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """One replica answers, also with an already finished request; one does not answer; one dies first."""
    monkeypatch.setattr(debug, "TIMEOUT_S", 0.2)
    async with make_api(replicas=3, priority_range="0:2") as api:
        for engine in api.engines:
            engine.paused = True
        tasks = [asyncio.create_task(api.complete(priority=number)) for number in range(3)]
        while not all(engine.live for engine in api.engines):
            await asyncio.sleep(0)
        asked = asyncio.create_task(api.http.get("/debug/requests"))
        first, _, last = api.engines
        while not last.asked:
            await asyncio.sleep(0)
        states = [state(number) for number in (*first.live, 999)]
        first.tell(RequestStates(first.asked[0], states))
        last.die()
        body = (await asked).json()
        assert sorted(body["silent_replicas"]) == [1, 2]
        (row,) = body["requests"]
        assert row.pop("id").startswith("cmpl-")
        assert row == {
            "choice": 0,
            "replica": 0,
            "adapter": None,
            **{name: getattr(states[0], name) for name in states[0].__struct_fields__},
        }

        for engine in api.engines[:2]:
            engine.die()
        waiting = (await api.http.get("/debug/requests")).json()["requests"]
        assert [(row["state"], row["wait_reason"], row["replica"]) for row in waiting] == [
            ("waiting", "no_replica", None)
        ] * 3
        assert sorted(row["priority"] for row in waiting) == [0, 1, 2]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def test_forecasts_arrive_with_and_after_requests() -> None:
    """Messages pass through serialization. A forecast for a finished request has no effect."""
    loop = SimulatedLoop(Setup(EngineConfig(), "", 0), 0.0, 10, 100)
    server = EngineServer(None, 0)  # type: ignore[arg-type]

    def expected(message: ToEngine) -> list[tuple[float | None, str | None]]:
        server._handle(loop, msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ToEngine))
        return [(row.predicted_tokens, row.forecast_source) for row in describe(loop.core, 0.0)]

    params, mass = SamplingParams(max_tokens=4), (0.5, 0.5)
    assert expected(Add(1, [5], params)) == [(None, None)]
    assert expected(Add(2, [5], params, forecast=Forecast(1.5, "prior", mass))) == [(None, None), (1.5, "prior")]
    assert expected(Reforecast(1, Forecast(3.0, "learned"))) == [(3.0, "learned"), (1.5, "prior")]
    assert loop.core.requests[2].progress.forecast == Forecast(1.5, "prior", mass)
    (first, _) = describe(loop.core, 0.0, has_facts=True)
    told = {fact.label: fact.value for fact in first.facts}
    assert (told["forecast from"], told["chance to end"]) == (1, pytest.approx(0.5, abs=0.5))
    assert describe(loop.core, 0.0)[0].facts == []
    assert expected(Abort([1])) == expected(Reforecast(1, Forecast(2.0, "learned"))) == [(1.5, "prior")]


class Inbox:
    """Socket that gets a message when it was polled for the fourth time."""

    polls = 0

    def poll(self, timeout: int) -> int:
        self.polls += 1
        return int(self.polls > 3)


def test_idle_engine_measures_steps_until_a_message_arrives() -> None:
    loop = SimulatedLoop(Setup(EngineConfig(), "", 0), 0.0, 10, 100)
    inbox, measured = Inbox(), []
    loop.calibrate = lambda: not measured.append(inbox.polls)  # type: ignore[method-assign, func-returns-value]
    EngineServer(inbox, 0)._read_inbox(loop, wait=True)  # type: ignore[arg-type]
    assert (measured, inbox.polls) == ([2, 3], 4)


def with_key(name: str) -> dict[str, Any]:
    return {"headers": {"Authorization": f"Bearer {name}"}}


@pytest.mark.parametrize("keys", [("one", "two", "operator"), ()])
async def test_key_sees_its_own_requests_and_operator_sees_all(make_api: MakeApi, keys: tuple[str, ...]) -> None:
    rights = {owner_of_key(b"operator"): KeyRights(is_operator=True)} if keys else {}
    async with make_api(api_keys=keys, key_rights=rights) as api:
        api.engine.paused = True
        tasks = []
        for number, name in enumerate(("one", "one", "two"), 1):
            body = {"prompt": "abc", "max_tokens": 2, "n": number}
            tasks.append(asyncio.create_task(api.http.post("/v1/completions", json=body, **with_key(name))))
            while len(api.engine.live) < number * (number + 1) // 2:
                await asyncio.sleep(0.01)
        numbers = list(api.engine.live)

        async def listed(name: str) -> list[int]:
            asking = asyncio.create_task(api.http.get("/debug/requests", **with_key(name)))
            while not api.engine.asked:
                await asyncio.sleep(0.01)
            api.engine.tell(RequestStates(api.engine.asked.pop(), [state(number) for number in numbers]))
            return [row["number"] for row in (await asking).json()["requests"]]

        assert await listed("one") == (numbers[:3] if keys else numbers)
        assert await listed("two") == (numbers[3:] if keys else numbers)
        assert await listed("operator") == numbers
        api.engine.paused = False
        assert {answer.status_code for answer in await asyncio.gather(*tasks)} == {200}
