"""Properties of EconoServe in simulated runs.

KV is hosted physically, requests with short forecasts finish, groups begin and end together, prompts fill steps,
no KV is evicted without need, and the order by objectives meets more of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import fmean

import pytest

from skipjoin.core.events import Event, Finished, Planned, Preempted, Preemption, Reserved
from skipjoin.core.forecast import Forecast
from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.policy import Allocation, Deferral
from skipjoin.core.request import FinishReason, Request
from skipjoin.core.step import StepPlan
from skipjoin.observe.record import NO_SLO, Record, Slo
from skipjoin.policies.econo import Phase, phase_of
from skipjoin.policies.exact_reservations import PROMPTS, ExactReservations
from skipjoin.sim.experiments.cell import Cell, Extent
from skipjoin.sim.experiments.simulation import run
from skipjoin.sim.experiments.system import System
from skipjoin.workload.request import WorkloadRequest
from skipjoin.workload.workload import Workload, synthetic
from support.load import load, make
from support.recipes import SPELLED
from support.simulated import SYSTEM
from support.watch import Stepper, World
from support.worlds import exhaustive

VARIANTS = ("econoserve", "econoserve-sdo", "econoserve-sd", "econoserve-d")
# Half of the requests are long, with 64 + 960 tokens, and half of them short, with 16 + 100.
HALVES = synthetic("fixed:64,960", "poisson", ["name=short,lengths=fixed:16,100,share=0.5"])
# Twice the capacity of the machine.
OVERLOAD = Extent(5.0, 26.0, 1)
SHAREGPT = synthetic("sharegpt", "poisson")
BURSTS = "gamma:8"


@dataclass
class Seen:
    """Record and events of a run.

    Attributes:
        vacated: Requests that lost their KV while it was nested in another request's reservation.
        footprints: For each step, the blocks that its decoding requests need by their ends, as a share of the pool.
        decoding: First and last decode step, by request id.
    """

    jobs: list[WorkloadRequest]
    system: System
    record: Record = field(default_factory=dict)
    claims: list[Reserved] = field(default_factory=list)
    preempted: Counter[Preemption] = field(default_factory=Counter)
    vacated: set[int] = field(default_factory=set)
    finished: list[Finished] = field(default_factory=list)
    footprints: list[float] = field(default_factory=list)
    decoding: dict[int, tuple[int, int]] = field(default_factory=dict)
    _nested: set[int] = field(default_factory=set)

    def observe(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Reserved(request=request, parent=parent):
                    self.claims.append(event)
                    (self._nested.add if isinstance(parent, Request) else self._nested.discard)(request.id)
                case Preempted(request=request, how=how):
                    self.preempted[how] += 1
                    if how is not Preemption.PAUSE and request.id in self._nested:
                        self.vacated.add(request.id)
                        self._nested.discard(request.id)
                case Planned(plan=plan):
                    self._note(plan)
                case Finished():
                    self.finished.append(event)
                case _:
                    pass

    def _note(self, plan: StepPlan) -> None:
        generating = [piece.request.id for piece in plan.slices if piece.start >= len(piece.request.prompt)]
        self.footprints.append(sum(map(self._blocks, generating)) / self.system.kv_blocks)
        for number in generating:
            first, _ = self.decoding.get(number, (len(self.footprints), 0))
            self.decoding[number] = first, len(self.footprints)

    def _blocks(self, number: int) -> int:
        """Return the blocks that the request needs by its end; the KV of the last token is never computed."""
        job = self.jobs[number]
        return -(-(job.prompt_tokens + job.output_tokens - 1) // self.system.block_size)

    @property
    def hosted(self) -> float:
        """Return the share of requests that were nested in the reservation of another one."""
        return len({claim.request.id for claim in self.claims if isinstance(claim.parent, Request)}) / len(self.jobs)

    @property
    def groups(self) -> list[list[int]]:
        """Return the requests that reserved KV as a group, cut off where there was not enough for all."""
        found = defaultdict(list)
        for claim in self.claims:
            if claim.group is not None:
                found[claim.now, claim.group].append(claim.request.id)
        return list(found.values())

    def mean(self, name: str) -> float:
        return float(self.record[name]["mean"])

    def assert_served(self) -> None:
        """Assert that every request finished once, with its true number of tokens."""
        assert len(self.finished) == len(self.jobs)
        for event in self.finished:
            assert event.reason is FinishReason.STOP
            assert len(event.request.progress.output) == self.jobs[event.request.id].output_tokens


@cache
def seen(
    recipe: str,
    workload: Workload = HALVES,
    extent: Extent = OVERLOAD,
    *,
    kv_blocks: int = 1200,
    cpu_blocks: int = 0,
    predictor: str = "oracle",
    slo: Slo = NO_SLO,
    **params: float | str,
) -> Seen:
    """Run a recipe, without padding unless the parameters set it."""
    system = replace(
        SYSTEM,
        recipe=SPELLED[recipe],
        kv_blocks=kv_blocks,
        cpu_blocks=cpu_blocks,
        max_num_seqs=256,
        predictor=predictor,
        recipe_params={"padding": 0.0} | params,
    )
    cell = Cell(system, workload, extent, slo)
    found = Seen(cell.jobs(), system)
    found.record = run(cell, on_events=found.observe)
    found.assert_served()
    return found


def test_nesting_runs_requests_whose_kv_exceeds_the_pool_without_swapping() -> None:
    """The final footprints of concurrent requests exceed the pool, which reservations alone never allow."""
    nesting, alone = seen("econoserve"), seen("econoserve-sdo")
    assert max(alone.footprints) <= 1 < max(nesting.footprints)
    assert nesting.hosted >= 0.2
    assert alone.hosted == 0
    for observed in (nesting, alone):
        assert observed.record["kv"]["swapped_out_bytes"] == 0
        assert set(observed.preempted) == {Preemption.PAUSE}


@pytest.mark.parametrize(
    ("order", "share"),
    [
        pytest.param({}, 0.75, id="shortest"),
        pytest.param({"order": "longest"}, 0.3, id="longest", marks=pytest.mark.exhaustive),
    ],
)
def test_nesting_reduces_latency(order: dict[str, str], share: float) -> None:
    """The mean latency per token decreases.

    Short requests are hosted. The default order runs these first anyway, so nesting gains most with the longest first.
    """
    nesting, alone = (seen(recipe, **order).mean("normalized_latency_s") for recipe in VARIANTS[:2])
    assert nesting <= share * alone, f"{nesting / alone:.3f} of the latency without nesting"


@pytest.mark.exhaustive  # test_random_worlds_keep_all_invariants hosts, too
def test_hosted_requests_that_exceed_their_forecast_are_evicted_and_finish() -> None:
    """`seen` compares the lengths of all outputs with the true ones."""
    wrong = seen("econoserve", predictor="noise:.5", cpu_blocks=1200)
    assert len(wrong.vacated) >= 3
    assert wrong.hosted >= 0.2
    assert wrong.record["kv"]["swapped_in_bytes"] == wrong.record["kv"]["swapped_out_bytes"] > 0


@pytest.mark.exhaustive  # a result; test_recorded_plans.py has what gated admission decides
def test_gated_admission_forms_larger_groups() -> None:
    """Decodes then accumulate until a group completes, instead of being admitted one by one."""
    workload, extent = synthetic("uniform:4-16,8-128", "poisson"), Extent(200.0, None, 1, limit=240)
    sizes = {}
    for admission in ("continuous", "gated"):
        found = seen("econoserve-sd", workload, extent, kv_blocks=600, reserve=0.2, admission=admission)
        sizes[admission] = fmean(map(len, found.groups))
    assert sizes["gated"] > 1.3 * sizes["continuous"], sizes


@pytest.mark.parametrize("recipe", ["econoserve", *map(exhaustive, ("econoserve-sd", "econoserve-d"))])
def test_members_of_a_group_begin_and_end_together(recipe: str) -> None:
    """There are groups if lengths are equal, and hardly any if not; `econoserve-d` has none."""
    extent = Extent(24.0, None, 1, limit=72)
    equal = seen(recipe, synthetic("fixed:64,256", BURSTS), extent, kv_blocks=400)
    for group in equal.groups:
        assert len({equal.decoding[number] for number in group}) == 1
    different = seen(recipe, synthetic("uniform:16-112,16-496", BURSTS), extent, kv_blocks=400)
    if recipe == "econoserve-d":
        assert equal.groups == different.groups == []
        return
    assert fmean(map(len, equal.groups)) > 3
    assert fmean(map(len, different.groups)) < 1.2


@pytest.mark.parametrize("recipe", VARIANTS)
def test_prompts_fill_steps_while_the_reserve_has_room(recipe: str) -> None:
    """Steps reach 0.9 of the forward size that saturates the device; a prompt is cut to the remaining tokens."""
    target = 24
    params = (("reserve", 0.5), ("forward_tokens", target))
    stepper = Stepper(World(recipe, device_blocks=80, max_seqs=64, params=params).core())
    core, full = stepper.core, 0
    requests = load(2, 60, rate=1e6, prompts=(1, 60), outputs=(1, 20))
    for request in requests:
        request.progress.forecast = Forecast(max(1.0, request.max_tokens), "test")
    stepper.add(*requests)
    while core.requests:
        plan = stepper.start()
        room = core.kv.reservations.unused(PROMPTS) * core.kv.block_size
        waiting = [request for request in core.requests.values() if not request.progress.in_flight]
        if any(
            phase_of(candidate, candidate.progress.known) is Phase.PROMPT and candidate.progress.known <= room
            for candidate in waiting
        ):
            assert sum(piece.tokens for piece in plan.slices) >= 0.9 * target
            full += 1
        stepper.finish()
    core.assert_all_free()
    assert full > 10


@pytest.mark.parametrize("recipe", VARIANTS[:2])
def test_kv_is_neither_dropped_nor_swapped_with_true_forecasts(recipe: str) -> None:
    """All of the KV pool is allocated, while FCFS drops KV in the same load."""
    exact = seen(recipe)
    assert exact.preempted[Preemption.DROP] == exact.preempted[Preemption.SWAP] == 0
    assert exact.record["kv"]["recomputed_tokens"] == 0
    assert exact.record["kv"]["allocated_mean"] > 0.8
    assert seen("fcfs").preempted[Preemption.DROP] > 20


@pytest.mark.parametrize("recipe", VARIANTS)
def test_a_request_beyond_its_reservation_draws_on_the_reserve_then_pauses_then_is_swapped_out(recipe: str) -> None:
    """Four outputs, ten times as long as predicted, fill the pool.

    Each request first gets more blocks, then pauses with its KV on the device. Only when none runs is one swapped out.
    """
    params = (("padding", 0.0), ("reserve", 0.25))
    stepper = Stepper(World(recipe, device_blocks=60, max_seqs=12, params=params).core())
    stepper.add(*(make(number, 8, 80, forecast=Forecast(8, "test")) for number in range(4)))
    stepper.drain()
    kinds: dict[int, list[str]] = defaultdict(list)
    for event in stepper.events:
        if isinstance(event, Reserved) and event.drawn:
            kinds[event.request.id].append("reserve")
        elif isinstance(event, Preempted):
            kinds[event.request.id].append(event.how.name)
    assert all(sequence[0] == "reserve" for sequence in kinds.values())
    assert sum("PAUSE" in sequence for sequence in kinds.values()) == 3
    (moved,) = (sequence for sequence in kinds.values() if "SWAP" in sequence)
    assert moved.index("reserve") < moved.index("PAUSE") < moved.index("SWAP")
    assert not any("DROP" in sequence for sequence in kinds.values())
    assert [len(stepper.tokens[number]) for number in range(4)] == [80] * 4


@pytest.mark.exhaustive
def test_order_by_objectives_meets_more_of_them_and_reserves_most_of_the_kv() -> None:
    overload, slo = Extent(12.0, 30.0, 1), Slo(jct_scale=2.0)

    def attained(recipe: str, **params: str) -> Seen:
        return seen(recipe, SHAREGPT, overload, slo=slo, **params)

    by_arrival = attained("econoserve-sd")
    orders = {order: attained("econoserve-sdo", order=order) for order in ("shortest", "longest")}
    shares = {name: one.record["slo"]["jct_attained"] for name, one in {"-sd": by_arrival, **orders}.items()}
    assert shares["shortest"] > shares["-sd"] < shares["longest"], shares
    for name, one in {"-sd": by_arrival, **orders}.items():
        kv = one.record["kv"]
        assert kv["used_mean"] <= 0.65, (name, kv)
        assert kv["allocated_mean"] >= 0.88, (name, kv)


@pytest.mark.exhaustive  # a result; test_documented_bounds.py serves overdue requests
def test_overdue_requests_make_few_others_miss_their_objectives() -> None:
    overload, slo = Extent(12.0, 20.0, 1), Slo(jct_scale=2.0)
    runs = [seen("econoserve", SHAREGPT, overload, slo=slo, overdue_s=age_s) for age_s in (4.0, 1e8)]
    some, none = (run.record["slo"]["jct_attained"] for run in runs)
    assert 0.8 * none <= some, (some, none)


class Crowded:
    """EconoServe with always twelve short requests, for whose outputs the KV does not suffice."""

    def __init__(self, *, cpu_blocks: int = 60, **params: float) -> None:
        world = World("econoserve", device_blocks=60, cpu_blocks=cpu_blocks, max_seqs=12, params=tuple(params.items()))
        self.stepper = Stepper(world.core())
        self._ids = iter(range(10**6))
        for _ in range(5):
            self.step()

    def send(self, prompt: int, outputs: int) -> Request:
        arrival, forecast = self.stepper.now, Forecast(outputs, "test")
        request = make(next(self._ids), prompt, outputs, arrival=arrival, forecast=forecast)
        self.stepper.add(request)
        return request

    def step(self) -> None:
        for _ in range(12 - sum(len(request.prompt) == 4 for request in self.stepper.core.requests.values())):
            self.send(4, 40)
        self.stepper.step()


def test_blocks_are_collected_for_the_oldest_overdue_request() -> None:
    """A younger one with a shorter prompt, which ranks first, would otherwise take them."""
    crowd = Crowded(parking=False, overdue_s=0.05, overdue_share=1.0)
    old = crowd.send(140, 8)
    crowd.step()
    young = crowd.send(90, 8)
    for _ in range(400):
        if old.progress.planned or young.progress.planned:
            break
        crowd.step()
    assert old.progress.planned
    assert not young.progress.planned


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_prompts_beyond_the_reserve_get_their_share_of_the_kv(share: float) -> None:
    """They wait behind short requests without it, and have at most one reservation more."""
    crowd = Crowded(parking=False, prompt_share=share)
    long = [crowd.send(100, 8) for _ in range(12)]
    for _ in range(400):
        crowd.step()
    first: dict[Request, int] = {}  # blocks of the first reservations outside of others
    for event in crowd.stepper.events:
        if isinstance(event, Reserved) and event.parent is None:
            first.setdefault(event.request, event.blocks)
    of_long, of_short = (sum(first[request] for request in first if (request in long) is it) for it in (True, False))
    if share:
        assert share * of_short / 2 < of_long <= share * of_short + max(first.values()), (of_long, of_short)
    else:
        assert not of_long, (of_long, of_short)


@pytest.mark.parametrize("parking", [False, True])
def test_prompts_beyond_the_reserve_begin_if_waiting_outputs_are_swapped_out(parking: bool) -> None:
    crowd = Crowded(parking=parking)
    long = [crowd.send(100, 8) for _ in range(4)]
    for _ in range(100):
        crowd.step()
    assert sum(bool(request.progress.output) for request in long) == (4 if parking else 0)


@pytest.mark.parametrize("params", [{}, {"sharing": False}])
def test_outputs_that_wait_in_cpu_memory_are_found_by_their_needs(
    params: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step does not ask about each of them."""
    crowd = Crowded(cpu_blocks=2000, parking=True, **params)
    long = [crowd.send(100, 100) for _ in range(40)]
    asked = Counter[Request]()
    reserve = ExactReservations.reserve

    def counted(self: ExactReservations, request: Request, target: int, kv: KVAccounts) -> Allocation | Deferral:
        asked[request] += 1
        return reserve(self, request, target, kv)

    monkeypatch.setattr(ExactReservations, "reserve", counted)
    for _ in range(150):
        crowd.step()
    kv = crowd.stepper.core.scheduler.kv
    swapped_out = [request for request in long if (held := kv.blocks_of(request)) is not None and held.cpu]
    assert len(swapped_out) > 20
    asked.clear()
    for _ in range(20):
        crowd.step()
    assert sum(asked[request] for request in swapped_out) <= 20 * 3, asked


@pytest.mark.exhaustive
def test_a_larger_share_for_overdue_requests_serves_the_longest_prompts_earlier() -> None:
    overload = Extent(12.0, 20.0, 1)
    runs = [seen("econoserve", SHAREGPT, overload, overdue_s=4.0, overdue_share=share) for share in (0.02, 0.3)]
    few, more = (run.record["ttft_s"]["p95"] for run in runs)
    assert more < 0.9 * few, (few, more)
