from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from server_worlds import READY, Api, MakeApi, ScriptedEngine
from tiny_model import EOS

from skipjoin.core.request import FinishReason, RequestOptions
from skipjoin.engine.text import Output
from skipjoin.sampling import SamplingParams
from skipjoin.server.engines import crash_isolation
from skipjoin.server.engines.engine_client import EngineClient
from skipjoin.server.engines.errors import EngineDeadError, LostRequestError, NoReplicaError
from skipjoin.server.engines.messages import Ready, Refused, StepOutputs
from skipjoin.server.engines.sequences import EngineSequence, OnEnd, OutputQueue
from skipjoin.server.metrics import Metrics
from support.waiting import Clock

pytestmark = pytest.mark.anyio

PROMPT = [7, 8, 9, 10]


class World:
    def __init__(self, engines: int = 2, ready: Ready = READY, **settings: Any) -> None:
        self.clock = Clock(100.0)
        self.ready = ready
        self.metrics = Metrics()
        self.client = EngineClient(self.metrics, wanted=engines, clock=self.clock, **settings)
        self.engines = [self.new_engine() for _ in range(engines)]
        self.mailbox = OutputQueue()
        self.ended: list[int] = []

    def new_engine(self) -> ScriptedEngine:
        engine = ScriptedEngine(self.client)
        engine.paused = True
        engine.join(self.ready)
        return engine

    def submit(self, index: int = 0, prompt: list[int] = PROMPT, **options: Any) -> EngineSequence:
        params = options.pop("params", None) or SamplingParams(max_tokens=options.pop("max_tokens", 10))
        on_end: OnEnd = lambda reason, tokens: self.ended.append(index)  # noqa: E731
        return self.client.submit(self.mailbox, index, prompt, params, on_end=on_end, **options)

    def engine_in_use(self) -> ScriptedEngine:
        (engine,) = [engine for engine in self.engines if engine.live]
        return engine

    def take_outputs(self) -> list[Output]:
        items, self.mailbox._items = self.mailbox._items, []
        return items


async def test_output_is_unchanged_by_engine_death_at_any_token() -> None:
    """Engines die before the first token and after each one, once and twice in a row."""
    for tokens in range(10):
        for deaths in (1, 2):
            world = World(engines=3)
            world.submit(max_tokens=10)
            for _ in range(tokens):
                world.engine_in_use().step()
            for _ in range(deaths):
                world.engine_in_use().die()
            assert world.client.alive == 3 - deaths
            engine = world.engine_in_use()
            (add,) = engine.added
            assert add.output == [PROMPT[n % 4] for n in range(tokens)]
            while engine.live:
                engine.step()
            outputs = world.take_outputs()
            assert [output.token for output in outputs] == [PROMPT[n % 4] for n in range(10)]
            assert [output.reason for output in outputs] == [None] * 9 + [FinishReason.LENGTH]
            assert world.ended == [0]
            assert world.client.active == 0


@pytest.mark.parametrize("caches", [True, False])
async def test_requests_are_routed_by_prefix_affinity(caches: bool) -> None:
    """Prefixes include output tokens and the cache salt, and are forgotten when their engine dies."""
    world = World(engines=3, ready=replace(READY, caches_prefixes=caches))

    def route(prompt: list[int], salt: str = "", scores: int | None = None) -> int:
        before = [len(engine.added) for engine in world.engines]
        params = SamplingParams(max_tokens=20, prompt_logprobs=scores)
        world.submit(prompt=prompt, params=params, options=RequestOptions(cache_salt=salt))
        (index,) = (at for at, engine in enumerate(world.engines) if len(engine.added) > before[at])
        return index

    def finish() -> None:
        for engine in world.engines:
            while engine.live:
                engine.step()

    firsts = [[number] * 200 for number in (1, 2, 3)]
    assert [route(prompt) for prompt in firsts] == [0, 1, 2]
    finish()
    assert [route(prompt + prompt[:20] + [9, 9]) for prompt in firsts[::-1]] == ([2, 1, 0] if caches else [0, 1, 2])
    finish()
    assert route(firsts[2], "salt") == 0
    finish()
    assert route(firsts[2], scores=1) == 0
    finish()
    world.engines[2].die()
    world.engines[2] = world.new_engine()
    assert route(firsts[2]) == 0
    finish()
    assert route(firsts[1], "salt") == 0


async def test_choices_share_prefix_keys_and_single_engine_has_none() -> None:
    world, prompt = World(), list(range(100))
    first = world.submit(prompt=prompt)
    second = world.submit(1, prompt, like=first)
    one, two = (sequence.request.prefix for sequence in (first, second))
    assert one is not two
    assert one.keys(first.request.tokens, 96) == two.keys(second.request.tokens, 96)
    assert World(engines=1).submit(prompt=prompt).request.prefix is None


async def test_request_finishes_if_engine_dies_after_last_token() -> None:
    world = World()
    world.submit(max_tokens=3)
    engine = world.engine_in_use()
    for _ in range(3):
        engine.step()
    engine.die()
    assert not any(engine.live for engine in world.engines)
    assert [output.reason for output in world.take_outputs()] == [None, None, FinishReason.LENGTH]
    assert world.ended == [0]


async def test_moved_request_keeps_seed_options_and_age() -> None:
    """Prompt scores are requested again only if they were not received yet."""
    world = World()
    params = SamplingParams(max_tokens=9, logprobs=1, prompt_logprobs=2)
    world.submit(params=params, options=RequestOptions(priority=-3, deadline_s=30.0))
    first = world.engine_in_use()
    world.clock.now += 4.0
    first.die()
    second = world.engine_in_use()
    second.step()
    world.clock.now += 5.0
    world.engines.append(world.new_engine())
    second.die()
    begun, restarted, resumed = first.added[0], second.added[0], world.engine_in_use().added[0]
    assert begun.params.seed is not None
    assert begun.params.seed == restarted.params.seed == resumed.params.seed
    assert begun.options == restarted.options == resumed.options == RequestOptions(priority=-3, deadline_s=30.0)
    assert (begun.age_s, restarted.age_s, resumed.age_s) == (0.0, 4.0, 9.0)
    assert restarted.params == begun.params
    assert (resumed.params.prompt_logprobs, resumed.params.logprobs) == (None, 1)
    assert resumed.output == PROMPT[:1]


async def test_cached_tokens_are_those_of_the_engine_that_began_the_output() -> None:
    world = World(engines=3)
    sequence = world.submit()
    found = []
    for cached in (16, 32, 48):  # the second engine restarts the request, the third one resumes it
        engine = world.engine_in_use()
        engine.tell(StepOutputs(started=[sequence.id], cached={sequence.id: cached}))
        found.append(sequence.cached_tokens)
        if cached == 32:
            engine.tell(StepOutputs([sequence.id], PROMPT[:1]))
        engine.die()
    assert found == [16, 32, 32]


async def test_seeds_are_deterministic_and_distinct() -> None:
    def seeds() -> list[int | None]:
        world = World(engines=1, seed=5)
        for index in range(3):
            world.submit(index)
        world.submit(3, params=SamplingParams(seed=77))
        return [add.params.seed for add in world.engines[0].added]

    assert seeds() == seeds()
    assert len(set(seeds())) == 4
    assert seeds()[3] == 77


async def test_messages_of_a_dead_engine_are_ignored() -> None:
    world = World()
    sequence = world.submit()
    first = world.engine_in_use()
    first.die()
    first.tell(StepOutputs([sequence.id], [99], {}, [(sequence.id, "length")], []))
    first.tell(Refused(sequence.id, None, "no"))
    assert world.take_outputs() == []
    world.engine_in_use().step()
    assert [output.token for output in world.take_outputs()] == PROMPT[:1]


async def test_aborted_request_is_not_moved() -> None:
    world = World()
    sequence = world.submit()
    first = world.engine_in_use()
    world.client.abort([sequence])
    assert first.aborted == [sequence.id]
    first.die()
    assert not any(engine.live for engine in world.engines)
    assert world.client.active == 0


async def test_waiting_requests_run_on_the_first_new_engine() -> None:
    world = World()
    for index in range(4):
        world.submit(index)
    for engine in world.engines:
        engine.step()
    for engine in list(world.engines):
        engine.die()
    assert (world.client.alive, world.client.active) == (0, 4)
    with pytest.raises(NoReplicaError):
        world.submit(9)
    late = world.new_engine()
    assert len(late.added) == 1  # suspects of a crash run one at a time
    while late.live:
        late.step()
    outputs = world.take_outputs()
    by_index = {index: [output.token for output in outputs if output.choice == index] for index in range(4)}
    assert by_index == {index: [PROMPT[n % 4] for n in range(10)] for index in range(4)}


async def test_new_engine_may_die_while_requests_wait() -> None:
    world = World(engines=1)
    world.submit()
    world.engines[0].step()
    world.engines[0].die()
    world.new_engine().die()
    last = world.new_engine()
    assert last.added[0].output == PROMPT[:1]
    assert world.client.active == 1


async def test_request_aborted_while_waiting_is_dropped() -> None:
    world = World(engines=1)
    sequence = world.submit()
    world.engines[0].die()
    world.client.abort([sequence])
    assert world.ended == [0]
    assert world.new_engine().added == []


async def test_waiting_requests_fail_after_patience_s() -> None:
    world = World(engines=1, patience_s=0.01)
    world.submit()
    world.engines[0].die()
    with pytest.raises(NoReplicaError):
        await world.mailbox.get()
    assert world.ended == [0]
    assert world.new_engine().added == []


async def test_deadline_applies_while_waiting_for_an_engine() -> None:
    world = World(engines=1)
    world.submit(options=RequestOptions(deadline_s=0.02))
    world.engines[0].die()
    world.clock.now += 0.02
    (output,) = await world.mailbox.get()
    assert output.reason is FinishReason.DEADLINE
    assert world.client.active == 0


async def test_all_requests_fail_when_no_engine_can_return() -> None:
    world = World()
    for index in range(3):
        world.submit(index)
    world.engines[0].die()
    world.client.died()
    with pytest.raises(EngineDeadError):
        await world.mailbox.get()
    assert sorted(world.ended) == [0, 1, 2]
    assert (world.client.active, world.client.alive) == (0, 0)
    with pytest.raises(EngineDeadError):
        world.submit()


async def test_requests_go_to_engine_with_least_remaining_work() -> None:
    world = World()
    world.submit(0, max_tokens=400)
    long, short = world.engines if world.engines[0].live else world.engines[::-1]
    for index in range(1, 5):
        world.submit(index, max_tokens=10)
    assert (len(long.live), len(short.live)) == (1, 4)
    short.die()
    new = world.new_engine()
    world.submit(5, max_tokens=10)
    assert len(new.live) == 1  # the idle engine
    assert len(long.live) == 5


async def test_request_fails_after_crashing_two_engines() -> None:
    world = World(engines=3)
    sequence = world.submit()
    for _ in range(2):
        engine = world.engine_in_use()
        engine.tell(StepOutputs(started=[sequence.id]))
        engine.die()
    with pytest.raises(LostRequestError, match="ended 2 times"):
        await world.mailbox.get()
    assert (world.client.alive, world.client.active, world.ended) == (1, 0, [0])


async def test_engine_deaths_per_request_are_limited_despite_progress() -> None:
    world = World(engines=9)
    world.submit(max_tokens=100)
    deaths = 0
    while world.client.active:
        world.engine_in_use().step()
        world.engine_in_use().die()
        deaths += 1
    assert deaths == 8
    assert len(world.take_outputs()) == 8


async def test_suspects_of_a_crash_are_retried_one_at_a_time() -> None:
    """A crash is blamed on the request on trial. Requests that had not started run immediately."""
    world = World(engines=1)
    sequences = [world.submit(index) for index in range(4)]
    first = world.engines[0]
    first.step()
    fresh = world.submit(4)
    first.die()
    second = world.new_engine()
    assert sorted(second.live) == [sequences[0].id, fresh.id]
    second.step()
    assert sorted(second.live) == [*(sequence.id for sequence in sequences[:2]), fresh.id]
    second.tell(StepOutputs(started=[sequences[1].id]))
    second.die()
    world.take_outputs()
    with pytest.raises(LostRequestError):
        await world.mailbox.get()
    assert world.ended == [1]
    last = world.new_engine()
    while last.live:
        last.step()
    assert sorted(world.ended) == [0, 1, 2, 3, 4]


async def test_queued_trial_delays_other_suspects_for_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crash_isolation, "TRIAL_S", 0.01)
    world = World()
    for index in range(3):
        world.submit(index)
    for engine in world.engines:
        engine.step()
    world.engines[0].die()
    world.engines[1].die()
    late = world.new_engine()
    assert len(late.live) == 1
    async with asyncio.timeout(10):
        while len(late.live) < 3:
            await asyncio.sleep(0.005)


@pytest.fixture
async def two(make_api: MakeApi) -> AsyncIterator[Api]:
    async with make_api(replicas=2) as api:
        yield api
        assert api.is_clean()


def choices_of(response: httpx.Response) -> list[Any]:
    """Return the choices of an answer or of its events, sorted by choice, without ids and times."""
    if "data: " not in response.text:
        body = response.json()
        body["usage"].pop("queue_time")
        return [body["choices"], body["usage"]]
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    assert response.text.rstrip().endswith("[DONE]")
    return sorted((event["choices"] for event in events), key=lambda found: [choice["index"] for choice in found])


BODIES: list[dict[str, Any]] = [
    {"max_tokens": 12},
    {"max_tokens": 12, "stream": True},
    {"max_tokens": 12, "stream": True, "n": 3, "seed": 4},
    {"max_tokens": 30, "stop": "fab", "include_stop_str_in_output": True},
    {"max_tokens": 30, "stream": True, "stop": ["efabcd", "zz"]},
    {"max_tokens": 8, "logprobs": 2, "echo": True},
    {"max_tokens": 8, "logprobs": 2, "stream": True},
    {"max_tokens": 9, "min_tokens": 5, "prompt": [5, 6, EOS]},
    {"max_tokens": 5, "prompt": ["abc", "wxyz"]},
]


@pytest.mark.parametrize("body", BODIES, ids=[str(number) for number in range(len(BODIES))])
async def test_responses_are_unchanged_by_engine_deaths(two: Api, body: dict[str, Any]) -> None:
    """Engines die alternately, every few tokens, and each answer is compared with one without deaths."""
    undisturbed = choices_of(await two.complete(**body))
    for every in (1, 2, 3):
        for engine in two.engines:
            engine.paused = True
        task = asyncio.create_task(two.complete(**body))
        while not any(engine.live for engine in two.engines):
            await asyncio.sleep(0)
        steps = 0
        while not task.done():
            for engine in two.engines:
                if engine.live:
                    engine.step()
                    await asyncio.sleep(0)
            steps += 1
            if steps % every == 0 and steps // every < 8:  # the eighth death would fail the request
                victim = two.engines[steps // every % 2]
                victim.die()
                victim.join(two.ready)
            await asyncio.sleep(0)
        answer = await task
        assert answer.status_code == 200
        assert choices_of(answer) == undisturbed
        for engine in two.engines:
            engine.paused = False


async def test_health_and_readiness_count_replicas(two: Api) -> None:
    async def both() -> list[tuple[int, Any]]:
        answers = [await two.http.get(f"/{path}") for path in ("health", "ready")]
        return [(answer.status_code, answer.json()) for answer in answers]

    def counted(status: str, alive: int) -> tuple[int, dict[str, Any]]:
        return 200, {"status": status, "replicas_alive": alive, "replicas": 2}

    assert await both() == [counted("ok", 2), counted("ready", 2)]
    two.engines[0].die()
    assert await both() == [counted("ok", 1), counted("ready", 1)]
    two.engines[1].die()
    for status, body in await both():
        assert status == 503
        assert body["error"]["code"] == "no_replica"
    refused = await two.complete()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_replica")
    assert (await two.http.get("/live")).status_code == 200
    two.engines[1].join(two.ready)
    assert await both() == [counted("ok", 1), counted("ready", 1)]
    assert (await two.complete()).status_code == 200
    assert (await two.http.get("/v1/models")).json()["data"][0]["id"] == "tiny"


async def test_disconnect_aborts_choices_on_every_engine(two: Api) -> None:
    for engine in two.engines:
        engine.paused = True
    task = asyncio.create_task(two.complete(max_tokens=50, n=4))
    while sum(len(engine.live) for engine in two.engines) < 4:
        await asyncio.sleep(0)
    assert all(engine.live for engine in two.engines)  # choices of one request run on both engines
    for engine in two.engines:
        engine.step()
    two.engines[0].die()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not two.engines[1].live


async def test_request_that_crashes_engines_must_not_be_retried(two: Api, caplog: pytest.LogCaptureFixture) -> None:
    for engine in two.engines:
        engine.paused = True
    task = asyncio.create_task(two.complete())
    for deaths in (1, 2):
        while not (in_use := [engine for engine in two.engines if engine.live]):
            await asyncio.sleep(0)
        in_use[0].tell(StepOutputs(started=list(in_use[0].live)))
        in_use[0].die()
        assert two.client.alive == 2 - deaths
    response = await task
    assert (response.status_code, response.headers["x-should-retry"]) == (500, "false")
    error = response.json()["error"]
    assert error["code"] == "engine_lost"
    assert "ended 2 times while they ran this request, which may be the cause" in error["message"]
    assert re.search(r"cmpl-\w+ is not tried again: engines ended 2 times while they ran it, 2 of them", caplog.text)


async def test_hung_engine_enforces_deadlines_and_rejects_requests(make_api: MakeApi) -> None:
    async with make_api() as api:
        api.engine.paused = True
        response = await api.complete(deadline_ms=50)
        assert (response.status_code, response.json()["error"]["code"]) == (408, "deadline_exceeded")
        assert api.engine.aborted == [api.engine.added[0].id]
        api.engine.replica.is_hung = True
        for answer in (await api.http.get("/health"), await api.http.get("/ready"), await api.complete()):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_hung")
        api.engine.replica.is_hung = False
        assert (await api.http.get("/health")).status_code == 200
        assert api.is_clean()
