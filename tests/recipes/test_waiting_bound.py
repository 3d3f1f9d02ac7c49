"""Under adversarial arrivals nobody waits without end, and nobody longer than a bound that was promised.

Adversaries watch the engine and replace whoever leaves, so that as many requests are live as the bound allows. Memory
holds few of them. A wait goes from a request's arrival, or the end of a step that ran it, to the end of the next step
that runs it.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from skipjoin.core.engine import EngineCore
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.request import Request
from skipjoin.core.scheduling.scheduler import Scheduler
from skipjoin.exec.simulated import SimulatedExecutor, SimulatedHandle
from skipjoin.policies.cost import LinearCost
from skipjoin.policies.mlfq import SkipJoinMlfq
from skipjoin.policies.ordering import Prioritized
from skipjoin.policies.starvation import WorstCase, min_bound, starvation_within
from skipjoin.recipes import Settings
from support.load import make
from support.policies import COST
from support.recipes import build

LONGEST, BLOCK_SIZE = 64, 4
MOST = WorstCase(
    COST,
    requests=4,
    max_len=LONGEST,
    max_seqs=2,
    max_tokens=64,
    device_blocks=20,
    host_blocks=0,
    block_size=BLOCK_SIZE,
    depth=1,
    moves_overlapped=False,
)
# Attention makes long KV worth moving on both links; on the slow one that takes as long as a step.
FAST = replace(COST, attention_pair=1e-5, block=1e-5, transfer_floor=1e-5)
SLOW = replace(COST, attention_pair=3e-5, block=1.2e-3)
# The ways in which KV makes way: the recipe, the machine, host blocks, and whether moves go beside steps.
MODES: dict[str, tuple[str, LinearCost, int, bool]] = {
    "recompute": ("fastserve-recompute", FAST, 0, False),
    "reactive": ("fastserve-reactive", FAST, 60, False),
    "reactive, slow link": ("fastserve-reactive", SLOW, 60, False),
    "proactive": ("fastserve", FAST, 60, True),
    "proactive, slow link": ("fastserve", SLOW, 60, True),
    "proactive, little host": ("fastserve", FAST, 17, True),
    "plain queues": ("mlfq", FAST, 60, True),
}
# What an adversary sends next: (how many it has sent, the requests in the first queue, dice) -> prompt and max_tokens.
Adversary = Callable[[int, int, random.Random], tuple[int, int]]


def floods(sent: int, first: int, draw: random.Random) -> tuple[int, int]:
    """A long request, and minimal ones that join the first queue, without end."""
    return (40, 24) if sent == 0 else (1, draw.choice([1, 1, 2]))


def eats_the_budget(sent: int, first: int, draw: random.Random) -> tuple[int, int]:
    """Prompts that take all tokens of a step."""
    return LONGEST - 2, 2


def starves_all(sent: int, first: int, draw: random.Random) -> tuple[int, int]:
    """Requests that all starve at once, and have much to compute again."""
    return LONGEST // 2, LONGEST // 2


def waits_for_promotions(sent: int, first: int, draw: random.Random) -> tuple[int, int]:
    """Long requests until one is promoted, then short ones that get between."""
    return (1, 1) if first else (draw.randint(20, 50), 14)


def fills_the_device(sent: int, first: int, draw: random.Random) -> tuple[int, int]:
    """One request as long as can be, and middling ones that leave too little room for it."""
    return (LONGEST - 12, 12) if sent == 0 else (draw.randint(6, 17), 6)


def rolls_dice(sent: int, first: int, draw: random.Random) -> tuple[int, int]:
    """Anything."""
    prompt = draw.randint(1, LONGEST - 1)
    return prompt, draw.randint(1, LONGEST - prompt)


ADVERSARIES = (floods, eats_the_budget, starves_all, waits_for_promotions, fills_the_device, rolls_dice)


@dataclass
class Duel:
    """An engine and its adversary. longest: the longest wait so far in seconds, of requests that still wait, too."""

    recipe: str
    most: WorstCase
    adversary: Adversary
    starvation_s: float
    seed: int = 0

    def __post_init__(self) -> None:
        most = self.most
        settings = Settings(most.cost, most.max_seqs, most.max_tokens, stages=most.stages)
        policies = build(self.recipe, settings, {"starvation_s": self.starvation_s, "paced": False})
        kv = KVLedger(most.device_blocks, most.host_blocks, most.block_size)
        scheduler = Scheduler(policies, kv, depth=most.depth, overlap=most.depth > most.stages)
        self.core = EngineCore(scheduler)
        self.longest = self.now = 0.0
        self._executor = SimulatedExecutor(most.cost, stages=most.stages)
        self._flying: deque[SimulatedHandle] = deque()
        self._since: dict[Request, float] = {}
        self._sent = 0
        self._draw = random.Random(self.seed)

    def run(self, seconds: float) -> float:
        """Until that many seconds have passed; the longest wait."""
        while self.now < seconds:
            self._send()
            while (plan := self.core.start_step(self.now)) is not None:
                self._flying.append(self._executor.submit(plan, self.now))
            self.core.take_events()
            self.now = max(self.now, self._flying[0].ready_at)
            self._settle(self._flying.popleft())
        waits = [self.now - since for since in self._since.values()]
        self.longest = max(self.longest, *waits)
        return self.longest

    def _send(self) -> None:
        while len(self.core.requests) < self.most.requests:
            prompt, tokens = self.adversary(self._sent, self._in_first_queue(), self._draw)
            request = make(self._sent, prompt, tokens, arrival=self.now)
            self._sent += 1
            self._since[request] = self.now
            self.core.add(request, self.now)

    def _in_first_queue(self) -> int:
        ordering = self.core.scheduler.policies.ordering
        assert isinstance(ordering, Prioritized)
        queues = ordering._bands.get((False, True, 0))
        assert queues is None or isinstance(queues, SkipJoinMlfq)
        asked = [request for request in self.core.requests.values() if request.options.priority == 0]
        return sum(queues.level(request) == 0 for request in asked) if queues else 0

    def _settle(self, handle: SimulatedHandle) -> None:
        result = handle.result()
        for piece in result.plan.slices:
            self.longest = max(self.longest, self.now - self._since[piece.request])
            self._since[piece.request] = self.now
        self.core.finish_step(result, self.now)
        self._since = {request: since for request, since in self._since.items() if request.finish_reason is None}


def extremes(mode: str, depth: int, requests: int, slots: int, stages: int = 1) -> tuple[str, WorstCase]:
    recipe, cost, host_blocks, overlapped = MODES[mode]
    most = replace(MOST, cost=cost, host_blocks=host_blocks, moves_overlapped=overlapped, stages=stages)
    return recipe, replace(most, depth=depth, requests=requests, max_seqs=slots)


# Plans in flight, and stages that share the work.
pipelines = pytest.mark.parametrize(("depth", "stages"), [(1, 1), (2, 1), (2, 2)])


@pipelines
@pytest.mark.parametrize("mode", MODES)
def test_no_wait_exceeds_the_least_bound(mode: str, depth: int, stages: int) -> None:
    recipe, most = extremes(mode, depth, 4, 2, stages)
    bound = min_bound(most)
    for seed, adversary in enumerate(ADVERSARIES):
        duel = Duel(recipe, most, adversary, starvation_within(bound, most), seed)
        longest = duel.run(1.3 * bound)
        assert longest <= bound, f"{adversary.__name__}: a wait takes {longest / bound:.0%} of the bound"


@pipelines
@pytest.mark.parametrize("mode", MODES)
def test_a_promoted_request_runs_within_the_stay_that_the_bound_allows_for(mode: str, depth: int, stages: int) -> None:
    """A threshold below what the bound asks for provokes many more promotions in the time of a test."""
    recipe, most = extremes(mode, depth, 6, 1, stages)
    for seed, adversary in enumerate(ADVERSARIES):
        alpha = 0.15 * most.stay_s
        longest = Duel(recipe, most, adversary, alpha, seed).run(1.5 * most.stay_s)
        allowed = alpha + most.stay_s + most.around_s
        assert longest <= allowed, f"{adversary.__name__}: a wait takes {longest / allowed:.0%} of what is allowed for"


def recomputes_in_turn(sent: int, first: int, draw: random.Random) -> tuple[int, int]:
    """Long prompts that starve together behind a flood, on a device that holds one of them."""
    return (1, 1) if sent >= 11 else (LONGEST - 2, 2)


def test_the_bound_is_not_absurdly_loose() -> None:
    """Beyond the threshold, which every request may have to wait, a good part of what remains can be reached."""
    cost = LinearCost(floor=1e-3, prefill_token=1e-3, decode=1e-3)
    most = replace(MOST, cost=cost, requests=12, max_seqs=1, device_blocks=16)
    bound = min_bound(most)
    alpha = starvation_within(bound, most)
    longest = Duel("fastserve-recompute", most, recomputes_in_turn, alpha).run(1.3 * bound)
    share = (longest - alpha) / (bound - alpha)
    assert 0.1 <= share <= 1, f"the worst wait takes {share:.0%} of what the bound allows beyond the threshold"


def test_without_promotion_a_flood_starves_the_long_one() -> None:
    recipe, most = extremes("recompute", 1, 4, 1)
    bound = min_bound(most)
    assert Duel(recipe, most, floods, 1e6).run(3 * bound) > 2 * bound


@pytest.mark.parametrize(("blocks", "long", "short"), [(20, (36, 28), (12, 7)), (17, (50, 14), (4, 4))])
def test_kv_on_the_host_comes_back_though_those_who_run_leave_no_room_beside_their_steps(
    blocks: int, long: tuple[int, int], short: tuple[int, int]
) -> None:
    """Short ones, each soon replaced, always hold a little, and their turns count as no later than the long one's."""
    cost = replace(COST, attention_pair=3e-5, block=5e-4)
    most = replace(MOST, cost=cost, requests=3, device_blocks=blocks, host_blocks=20, moves_overlapped=True)
    assert Duel("fastserve", most, lambda sent, *_: long if sent == 0 else short, 1.0).run(15.0) < 1.5


class UnequalDuel(Duel):
    """At first every other request is of better priority, and later none. The wait of a request counts only while no
    live one is better."""

    mixed_s = math.inf

    def _send(self) -> None:
        while len(self.core.requests) < self.most.requests:
            prompt, tokens = self.adversary(self._sent, self._in_first_queue(), self._draw)
            is_better = self._sent % 2 and self.now < self.mixed_s
            request = make(self._sent, prompt, tokens, arrival=self.now, priority=-1 if is_better else 0)
            self._sent += 1
            self._since[request] = self.now
            self.core.add(request, self.now)

    def _settle(self, handle: SimulatedHandle) -> None:
        super()._settle(handle)
        best = min(request.options.priority for request in self.core.requests.values())
        for request in self._since:
            if request.options.priority > best:
                self._since[request] = self.now


@pytest.mark.parametrize("mode", ["recompute", "reactive", "proactive"])
def test_the_bound_holds_for_the_best_priority_that_is_live(mode: str) -> None:
    recipe, most = extremes(mode, 1, 4, 2)
    bound = min_bound(most)
    for seed, adversary in enumerate(ADVERSARIES):
        duel = UnequalDuel(recipe, most, adversary, starvation_within(bound, most), seed)
        duel.mixed_s = 0.7 * bound
        longest = duel.run(2 * bound)
        assert longest <= bound, f"{adversary.__name__}: a wait takes {longest / bound:.0%} of the bound"
