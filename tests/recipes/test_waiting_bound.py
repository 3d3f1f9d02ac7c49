"""With adversarial arrivals, no request waits forever, and none longer than a promised bound.

Adversaries watch the engine and replace finished requests, so that as many requests are live as the bound allows.
Memory holds few of them. A wait begins with a request's arrival or the end of a step that ran it, and ends with the
next step that runs it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import pytest

from skipjoin.core.events import Event
from skipjoin.core.request import Request
from skipjoin.core.step import StepPlan
from skipjoin.policies.cost import LinearCost
from skipjoin.policies.mlfq import SkipJoinMlfq
from skipjoin.policies.ordering import Prioritized
from skipjoin.policies.starvation import WorstCase, min_bound, starvation_within
from support.bounds import BoundedRun
from support.policies import COST
from support.watch import World
from support.worlds import checkered

MAX_LEN, BLOCK_SIZE = 64, 4
LIMITS = WorstCase(
    COST,
    requests=4,
    max_len=MAX_LEN,
    max_seqs=2,
    max_tokens=64,
    device_blocks=20,
    cpu_blocks=0,
    block_size=BLOCK_SIZE,
    depth=1,
    moves_overlapped=False,
)
# Attention makes long KV worth moving on both links; on the slow one a move takes as long as a step.
FAST = replace(COST, attention_pair=1e-5, block=1e-5, transfer_floor=1e-5)
SLOW = replace(COST, attention_pair=3e-5, block=1.2e-3)
# Kinds of eviction: the recipe, the machine, the number of CPU blocks, and whether moves overlap steps.
MODES: dict[str, tuple[str, LinearCost, int, bool]] = {
    "recompute": ("fastserve-recompute", FAST, 0, False),
    "reactive": ("fastserve-reactive", FAST, 60, False),
    "reactive, slow link": ("fastserve-reactive", SLOW, 60, False),
    "proactive": ("fastserve", FAST, 60, True),
    "proactive, slow link": ("fastserve", SLOW, 60, True),
    "proactive, few CPU blocks": ("fastserve", FAST, 17, True),
    "plain queues": ("mlfq", FAST, 60, True),
}
# Returns the next prompt and max_tokens, from the number of requests sent, those in the first queue, and random draws.
Adversary = Callable[[int, int, random.Random], tuple[int, int]]


def floods(sent: int, first: int, draw: random.Random) -> tuple[int, int]:
    """Send a long request, and then minimal ones that join the first queue, without end."""
    return (40, 24) if sent == 0 else (1, draw.choice([1, 1, 2]))


def takes_all_tokens(sent: int, first: int, draw: random.Random) -> tuple[int, int]:
    return MAX_LEN - 2, 2


def starves_all(sent: int, first: int, draw: random.Random) -> tuple[int, int]:
    """Send requests that all starve at once and have much to recompute."""
    return MAX_LEN // 2, MAX_LEN // 2


def waits_for_promotions(sent: int, first: int, draw: random.Random) -> tuple[int, int]:
    """Send long requests until one is promoted, then short ones that run in between."""
    return (1, 1) if first else (draw.randint(20, 50), 14)


def fills_the_device(sent: int, first: int, draw: random.Random) -> tuple[int, int]:
    """Send one request of nearly the maximum length, and medium ones that leave too little room for it."""
    return (MAX_LEN - 12, 12) if sent == 0 else (draw.randint(6, 17), 6)


def sends_random_requests(sent: int, first: int, draw: random.Random) -> tuple[int, int]:
    prompt = draw.randint(1, MAX_LEN - 1)
    return prompt, draw.randint(1, MAX_LEN - prompt)


ADVERSARIES = (floods, takes_all_tokens, starves_all, waits_for_promotions, fills_the_device, sends_random_requests)


@dataclass
class LongestWait:
    """The longest wait so far. With `of_best`, waits count only while no live request has a better priority."""

    of_best: bool = False
    seconds: float = 0.0
    since: dict[Request, float] = field(default_factory=dict)

    def check(self, run: BoundedRun, plan: StepPlan, begin: float, events: Sequence[Event]) -> None:
        for piece in plan.slices:
            self.seconds = max(self.seconds, self.of(piece.request, run.now))
            self.since[piece.request] = run.now
        best = min((request.options.priority for request in run.live), default=0)
        for request in run.live if self.of_best else ():
            if request.options.priority > best:
                self.since[request] = run.now

    def of(self, request: Request, now: float) -> float:
        return now - self.since.get(request, request.arrival)


def longest_wait(
    seconds: float,
    recipe: str,
    limits: WorstCase,
    adversary: Adversary,
    starvation_s: float,
    *,
    seed: int = 0,
    mixed_s: float = 0.0,
    send: Callable[[BoundedRun], None] | None = None,
) -> float:
    """Let an adversary replace finished requests, until `mixed_s` every other one by one of a better priority."""
    draw, waits = random.Random(seed), LongestWait(of_best=mixed_s > 0)

    def replace_finished(run: BoundedRun) -> None:
        while len(run.live) < limits.requests:
            priority = -1 if run.count % 2 and run.now < mixed_s else 0
            run.add(*adversary(run.count, in_first_queue(run), draw), priority=priority)

    world = World(
        recipe,
        limits.depth,
        limits.depth > limits.stages,
        device_blocks=limits.device_blocks,
        cpu_blocks=limits.cpu_blocks,
        block_size=limits.block_size,
        max_seqs=limits.max_seqs,
        max_tokens=limits.max_tokens,
        starvation_s=starvation_s,
        stages=limits.stages,
        cost=limits.cost,
        params=(
            ("paced", False),
            ("promotion", ("first-queue", "one-quantum")[seed % 2]),
            ("order", ("arrival", "shortest-prefill")[seed // 2 % 2]),
        ),
    )
    run = BoundedRun(world, send or replace_finished, [waits])
    run.run(lambda: run.now >= seconds)
    return max(waits.seconds, *(waits.of(request, run.now) for request in run.live))


def in_first_queue(run: BoundedRun) -> int:
    ordering = run.core.scheduler.policies.ordering
    assert isinstance(ordering, Prioritized)
    queues = ordering._bands.get((False, True, 0))
    assert queues is None or isinstance(queues, SkipJoinMlfq)
    asked = [request for request in run.live if request.options.priority == 0]
    return sum(queues.level(request) == 0 for request in asked) if queues else 0


def extremes(mode: str, depth: int, requests: int, slots: int, stages: int = 1) -> tuple[str, WorstCase]:
    recipe, cost, cpu_blocks, overlapped = MODES[mode]
    limits = replace(LIMITS, cost=cost, cpu_blocks=cpu_blocks, moves_overlapped=overlapped, stages=stages)
    return recipe, replace(limits, depth=depth, requests=requests, max_seqs=slots)


def duels(deep: set[tuple[str, int]]) -> pytest.MarkDecorator:
    """Run a test for every mode, number of plans in flight and number of stages.

    `make test` has a third of the adversaries, which alternate.
    """
    cases = []
    for number, mode in enumerate(MODES):
        for third in range(3):
            marks = () if third == number % 3 else pytest.mark.exhaustive
            cases.append(pytest.param(mode, 1, 1, range(third, len(ADVERSARIES), 3), id=f"{mode}-{third}", marks=marks))
        for stages, third in product((1, 2), range(3)):
            is_usual = (mode, stages) in deep and third == (number + stages) % 3
            seeds, name = range(third, len(ADVERSARIES), 3), f"{mode}-2-{stages}-{third}"
            cases.append(
                pytest.param(mode, 2, stages, seeds, id=name, marks=() if is_usual else pytest.mark.exhaustive)
            )
    return pytest.mark.parametrize(("mode", "depth", "stages", "seeds"), cases)


@duels({("reactive", 1), ("proactive", 2)})
def test_no_wait_exceeds_the_minimum_bound(mode: str, depth: int, stages: int, seeds: Sequence[int]) -> None:
    recipe, limits = extremes(mode, depth, 4, 2, stages)
    bound = min_bound(limits)
    for seed in seeds:
        adversary = ADVERSARIES[seed]
        longest = longest_wait(1.1 * bound, recipe, limits, adversary, starvation_within(bound, limits), seed=seed)
        assert longest <= bound, f"{adversary.__name__}: a wait takes {longest / bound:.0%} of the bound"


@duels({("proactive", 1)})
def test_a_promoted_request_runs_within_the_time_that_the_bound_allows_for(
    mode: str, depth: int, stages: int, seeds: Sequence[int]
) -> None:
    """A threshold below the one that keeps the bound causes many more promotions in a short time."""
    recipe, limits = extremes(mode, depth, 6, 1, stages)
    for seed in seeds:
        adversary = ADVERSARIES[seed]
        alpha = 0.15 * limits.stay_s
        longest = longest_wait(1.5 * limits.stay_s, recipe, limits, adversary, alpha, seed=seed)
        allowed = alpha + limits.stay_s + limits.around_s
        assert longest <= allowed, f"{adversary.__name__}: a wait takes {longest / allowed:.0%} of what is allowed for"


def recomputes_in_turn(sent: int, first: int, draw: random.Random) -> tuple[int, int]:
    """Send long prompts that starve together behind a flood, on a device that holds one of them."""
    return (1, 1) if sent >= 11 else (MAX_LEN - 2, 2)


def test_the_bound_is_within_a_factor_of_ten_of_real_waits() -> None:
    """Beyond the threshold, which every request may have to wait, real waits reach a good part of what remains."""
    cost = LinearCost(floor=1e-3, prefill_token=1e-3, decode=1e-3)
    limits = replace(LIMITS, cost=cost, requests=12, max_seqs=1, device_blocks=16)
    bound = min_bound(limits)
    alpha = starvation_within(bound, limits)
    longest = longest_wait(1.3 * bound, "fastserve-recompute", limits, recomputes_in_turn, alpha)
    share = (longest - alpha) / (bound - alpha)
    assert 0.1 <= share <= 1, f"the worst wait takes {share:.0%} of what the bound allows beyond the threshold"


def test_without_promotion_a_flood_starves_a_long_request() -> None:
    recipe, limits = extremes("recompute", 1, 4, 1)
    bound = min_bound(limits)
    assert longest_wait(3 * bound, recipe, limits, floods, 1e6) > 2 * bound


@pytest.mark.parametrize(("blocks", "long", "short"), [(20, (36, 28), (12, 7)), (17, (50, 14), (4, 4))])
def test_swapped_requests_run_though_running_ones_leave_no_room_for_overlapped_moves(
    blocks: int, long: tuple[int, int], short: tuple[int, int]
) -> None:
    """Short requests, each replaced when finished, always hold some blocks, and run no later than the long one."""
    cost = replace(COST, attention_pair=3e-5, block=5e-4)
    limits = replace(LIMITS, cost=cost, requests=3, device_blocks=blocks, cpu_blocks=20, moves_overlapped=True)
    assert longest_wait(15.0, "fastserve", limits, lambda sent, *_: long if sent == 0 else short, 1.0) < 1.5


@pytest.mark.parametrize(("mode", "half"), checkered(["recompute", "reactive", "proactive"], [0, 1]))
def test_the_bound_holds_for_the_best_live_priority(mode: str, half: int) -> None:
    recipe, limits = extremes(mode, 1, 4, 2)
    bound = min_bound(limits)
    for seed, adversary in [*enumerate(ADVERSARIES)][half::2]:
        alpha = starvation_within(bound, limits)
        longest = longest_wait(1.75 * bound, recipe, limits, adversary, alpha, seed=seed, mixed_s=0.7 * bound)
        assert longest <= bound, f"{adversary.__name__}: a wait takes {longest / bound:.0%} of the bound"


def follows_a_leader(run: BoundedRun) -> None:
    """Send a long prompt, the same one again as soon as the first is being computed, and a flood.

    The flood leaves one token of each step. The last request waits for the leader's prefix unless its turn has come.
    """
    world = run.world
    flood, long = world.max_tokens - 1, [request for request in run.live if len(request.prompt) > world.max_tokens]
    if not run.count or (len(long) == 1 and long[0].progress.computed >= 2):
        run.add([7] * 488, 4)
    while len(run.live) + (len(long) < 2) < 3:
        run.add(range(10_000 + run.count * flood, 10_000 + (run.count + 1) * flood), 1)


@pytest.mark.parametrize(("mode", "depth", "stages"), [("recompute", 1, 1), ("proactive", 2, 1), ("proactive", 2, 2)])
def test_the_bound_holds_behind_a_shared_prefix(mode: str, depth: int, stages: int) -> None:
    recipe, _, cpu_blocks, overlapped = MODES[mode]
    limits = WorstCase(
        LinearCost(floor=5e-3, prefill_token=1e-5, decode=1e-5),
        requests=3,
        max_len=512,
        max_seqs=8,
        max_tokens=64,
        device_blocks=120,
        cpu_blocks=cpu_blocks,
        block_size=16,
        depth=depth,
        moves_overlapped=overlapped,
        stages=stages,
    )
    bound = min_bound(limits)
    alpha = starvation_within(bound, limits)
    longest = longest_wait(min(1.3 * bound, 4.0), recipe, limits, floods, alpha, send=follows_a_leader)
    assert longest <= bound, f"a wait takes {longest / bound:.0%} of the bound"
