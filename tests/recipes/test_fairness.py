from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from skipjoin.core.decide.scheduler import Scheduler
from skipjoin.core.engine import EngineCore
from skipjoin.core.events import Event, Finished, Token
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.request import Request
from skipjoin.exec.simulated import SimulatedExecutor
from skipjoin.options import ConfigError
from skipjoin.policies.cost import LinearCost
from skipjoin.recipes import Settings
from skipjoin.sim.driver import Replica, simulate
from support.load import load, make
from support.policies import COST, SOME_SYSTEMS
from support.recipes import build
from support.watch import Run, World, run
from support.worlds import each_recipe, exhaustive, halved

WEIGHT = 2.0
# A few steps. The paper's bound, for a server that cannot pause requests, is twice the pool's weighted capacity.
BOUND = 300
# A step of the load takes 25 ms, and the longest batch of `static` takes 30 steps.
MAX_TTFT_S = 1.0


def world(recipe: str, weight: float | None) -> World:
    """Return a world with room for few of the requests at a time, and objectives that never limit a step."""
    params = (("ttft_s", 1000.0), ("tpot_s", 1000.0))
    return World(recipe, device_blocks=80, cpu_blocks=80, fair_output_weight=weight, params=params)


def flood(client: str, count: int, first_id: int, *, output: int, at: float = 0.0) -> list[Request]:
    return [make(first_id + number, 20, output, arrival=at, client=client) for number in range(count)]


def service(done: Run, until: float) -> Counter[str]:
    """Return the service of each client until then, where a prompt counts with its first token."""
    found: Counter[str] = Counter()
    first: set[Request] = set()
    for event in done.events:
        if isinstance(event, Token) and event.now <= until:
            request = event.request
            found[request.options.client] += int(WEIGHT)
            if request not in first:
                first.add(request)
                found[request.options.client] += len(request.prompt)
    return found


def two_floods() -> list[Request]:
    """Return many long requests of a client, and some short ones of another a little later."""
    return [*flood("noisy", 46, 0, output=30), *flood("quiet", 48, 1000, output=10, at=0.05)]


def while_both_wait(recipe: str, weight: float | None) -> Counter[str]:
    """Return the service of both clients until no request of the quiet one waits."""
    done = run(world(recipe, weight), two_floods())
    ends = [
        event.now for event in done.events if isinstance(event, Finished) and event.request.options.client == "quiet"
    ]
    return service(done, until=ends[-World.max_seqs - 1])


@pytest.mark.parametrize("recipe", each_recipe(parts=4))
def test_clients_that_compete_get_equal_service(recipe: str) -> None:
    served = while_both_wait(recipe, WEIGHT)
    assert served["quiet"] > 5 * BOUND
    assert abs(served["noisy"] - served["quiet"]) <= BOUND


def test_without_fairness_the_noisy_client_gets_all_service() -> None:
    served = while_both_wait("fcfs", None)
    assert served["noisy"] > served["quiet"] + 5 * BOUND


@pytest.mark.parametrize("recipe", ["fcfs", "fastserve", exhaustive("bros-recompute")])
def test_clients_do_not_evict_each_other_in_turn(recipe: str) -> None:
    alike, apart = (run(world(recipe, weight), two_floods()) for weight in (None, WEIGHT))
    evictions = [request.progress.evictions for request in apart.requests]
    assert max(evictions) <= 6
    assert sum(evictions) <= sum(request.progress.evictions for request in alike.requests) + len(evictions) / 2
    assert apart.end < 1.1 * alike.end


# With fairness, `adaptive` limits the recomputation that first tokens cause.
@pytest.mark.parametrize("recipe", each_recipe("adaptive", parts=2, begin=1))
def test_fairness_changes_no_plan_of_a_single_client(recipe: str) -> None:
    assert run(world(recipe, WEIGHT), load(5, 16)).trace == run(world(recipe, None), load(5, 16)).trace


@pytest.mark.parametrize("recipe", halved(SOME_SYSTEMS))
def test_a_quiet_client_gets_the_next_free_blocks(recipe: str) -> None:
    """It gets them whatever another client has sent before: users.md 4.4, 23."""
    asked = make(1000, 20, 5, arrival=1.0, client="quiet")
    done = run(world(recipe, WEIGHT), [*flood("noisy", 60, 0, output=30), asked])
    (first, *_) = (event.now for event in done.events if isinstance(event, Token) and event.request is asked)
    assert first - asked.arrival < MAX_TTFT_S


# A step of 256 sequences takes 40 times as long as one of a single sequence.
STEEP = LinearCost(floor=0.002, prefill_token=1e-4, decode=3e-4)


class ChatFinishedError(Exception):
    """The chat has finished; other requests need not."""


def chat_s(recipe: str, others: list[Request]) -> float:
    chat = make(10_000, 20, 40, arrival=0.3, client="chat")
    params = (("ttft_s", 1000.0), ("tpot_s", 1000.0))
    world = World(recipe, device_blocks=20_000, max_seqs=256, fair_output_weight=WEIGHT, params=params, cost=STEEP)
    core = EngineCore(Scheduler(world.policies(), KVLedger(world.device_blocks, 0, world.block_size)))
    ends: list[float] = []

    def stop(events: Sequence[Event]) -> None:
        ends.extend(event.now for event in events if isinstance(event, Finished) and event.request is chat)
        if ends:
            raise ChatFinishedError

    with pytest.raises(ChatFinishedError):
        simulate(Replica(core, SimulatedExecutor(STEEP)), [*others, chat], on_events=stop)
    return ends[0] - chat.arrival


@pytest.mark.parametrize("recipe", each_recipe("static", "round-robin", parts=2))
def test_a_chat_takes_at_most_three_times_as_long_alongside_640_sequences(recipe: str) -> None:
    """This excludes recipes whose batch or turn runs to its end."""
    assert chat_s(recipe, flood("noisy", 640, 0, output=100)) <= 3 * chat_s(recipe, [])


def test_the_bound_on_waiting_excludes_fairness() -> None:
    settings = Settings(COST, fair_output_weight=WEIGHT)
    with pytest.raises(ConfigError, match="starvation_bound_s must not be set together with fair_by"):
        build("fastserve", settings, {"starvation_bound_s": 60.0})
