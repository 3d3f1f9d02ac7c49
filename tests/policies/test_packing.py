from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipjoin.core.context import StepContext
from skipjoin.core.policy import CostModel
from skipjoin.core.refusals import Refusal, Scope
from skipjoin.core.request import Request, Target
from skipjoin.core.step import Slice, StepPlan, StepShape
from skipjoin.core.waits import WaitReason
from skipjoin.observe.metrics import EngineMetrics
from skipjoin.policies.best_effort import LimitedBestEffort, LimitedBuilder, Patience
from skipjoin.policies.cost import LinearCost, TrackedCost
from skipjoin.policies.deadlines import NextTokens
from skipjoin.policies.packing import Packing, Replacing
from support.load import make
from support.watch import Stepper, World

# A step takes 10 ms, plus 1 ms per prompt token or decode, plus 5 ms per block that is swapped in.
COST = LinearCost(floor=0.01, prefill_token=1e-3, decode=1e-3, block=5e-3)
DEFAULT = Target(ttft_s=0.4, tpot_s=0.2)


class Case:
    def __init__(
        self,
        max_seqs: int = 8,
        max_tokens: int = 1000,
        base: int = 4,
        *,
        replacing: Replacing = Replacing.DECODES,
        cost: CostModel = COST,
    ) -> None:
        self.tokens = NextTokens(DEFAULT)
        self.patience = Patience(cost)
        self.packing = Packing(max_seqs, max_tokens, cost, self.tokens, self.patience, base=base, replacing=replacing)
        self.urgent: list[Request] = []
        self.others: list[Request] = []
        self.swapped_out: dict[Request, int] = {}

    def real_time(self, left: float, tokens: int = 1) -> Request:
        """Add a request with `tokens` pending tokens whose next token is due in `left` seconds."""
        request = self._make(tokens, target=Target(ttft_s=left))
        self.tokens.begin(request, 0.0)
        self.urgent.append(request)
        return request

    def best_effort(self, tokens: int = 1, swapped_out: int = 0) -> Request:
        request = self._make(tokens, best_effort=True)
        self.others.append(request)
        self.swapped_out[request] = swapped_out
        return request

    def _make(self, tokens: int, **fields: object) -> Request:
        request = make(len(self.urgent) + len(self.others), 10 + tokens, 5, **fields)
        request.progress.planned = request.progress.computed = 10
        return request

    def ranked(self) -> list[tuple[Request, int]]:
        ranked = sorted(self.urgent, key=self.tokens.due) + self.others
        return [(request, request.progress.pending) for request in ranked]

    def context(self, in_flight: Sequence[StepPlan] = ()) -> StepContext:
        swapped_out = self.swapped_out
        return StepContext(
            candidates=iter(self.ranked()),
            blocks_swapped_out=lambda request: swapped_out.get(request, 0),
            in_flight=in_flight,
        )

    def pack(self, in_flight: Sequence[StepPlan] = ()) -> dict[Request, int]:
        candidates = self.ranked()
        builder = self.packing.open(self.context(in_flight))
        found = {}
        for request, pending in candidates:
            verdict = builder.offer(request, pending)
            assert builder.offer(request, pending) == verdict
            if isinstance(verdict, int):
                builder.take(request, verdict)
                found[request] = verdict
        return found

    def seconds(self, step: dict[Request, int]) -> float:
        shape = StepShape.of(
            [Slice(one, one.progress.planned, tokens, False, False, ()) for one, tokens in step.items()]
        )
        swapped_out = sum(self.swapped_out.get(request, 0) for request in step)
        return COST.step(shape) + (COST.transfer(swapped_out) if swapped_out else 0)


def test_real_time_requests_are_batched_as_long_as_the_step_is_in_time() -> None:
    case = Case(base=8)
    urgent = [case.real_time(0.02 + 0.001 * number) for number in range(8)]
    assert list(case.pack()) == urgent  # 18 ms
    tight = Case(base=8)
    urgent = [tight.real_time(0.075 + 0.001 * number, tokens=20) for number in range(8)]
    assert list(tight.pack()) == urgent[:3]  # 70 ms


def test_real_time_decodes_join_even_if_the_first_token_becomes_late() -> None:
    """Each step would otherwise serve one request where steps take about as long as an objective allows."""
    case = Case(max_seqs=9, base=9)
    urgent = [case.real_time(0.0135 + 0.001 * number) for number in range(8)]
    prompt = case.real_time(0.4, tokens=100)
    step = case.pack()
    assert list(step) == [*urgent, prompt]
    assert 16 <= step[prompt] < 100


def test_best_effort_requests_use_the_spare_time() -> None:
    case = Case()
    chat, batch = case.real_time(0.1), case.best_effort(500)
    step = case.pack()
    assert step[chat] == 1
    assert 60 <= step[batch] <= 89  # in units of 16 tokens
    assert case.seconds(step) <= 0.1


def test_swap_ins_count_as_step_time() -> None:
    case = Case()
    chat, near, far = case.real_time(0.03), case.best_effort(swapped_out=3), case.best_effort(swapped_out=4)
    assert list(case.pack()) == [chat, near]  # 12 ms and 15 ms
    case.swapped_out[near] = 4
    assert list(case.pack()) == [chat]
    assert far not in case.pack()


def test_the_batch_cap_grows_and_resets_when_time_is_short() -> None:
    case = Case(max_seqs=10, base=2)
    for _ in range(12):
        case.best_effort()
    assert [len(case.pack()) for _ in range(4)] == [4, 8, 10, 10]
    case.real_time(1.0)
    assert len(case.pack()) == 10
    for _ in range(3):
        case.real_time(0.06, tokens=20)
    assert len(case.pack()) == 2  # no time for a third one
    assert case.packing.cap == 2


def test_each_plan_reports_the_batch_cap() -> None:
    stepper = Stepper(World("bros", max_seqs=8, params=(("base_batch", 2),)).core())
    stepper.add(*(make(number, 4, 30, best_effort=True) for number in range(8)))
    metrics = EngineMetrics(device_blocks=40, block_size=4, block_bytes=8)
    caps = []
    for _ in range(3):
        stepper.step()
        metrics.observe(stepper.events)
        stepper.events.clear()
        caps += metrics.snapshot().row("batch_cap")
    assert caps == [4, 8, 8]


def test_a_best_effort_request_takes_a_slot_from_a_request_with_slack() -> None:
    case = Case(max_seqs=2, base=2, replacing=Replacing.ALL)
    soon, late, batch = case.real_time(0.03), case.real_time(0.3), case.best_effort()
    assert list(case.pack()) == [soon, batch]
    assert late not in case.pack()
    tight = Case(max_seqs=2, base=2, replacing=Replacing.ALL)
    urgent = [tight.real_time(0.02), tight.real_time(0.02)]
    tight.best_effort()
    assert list(tight.pack()) == urgent  # in the next step either would be late


@pytest.mark.parametrize(
    ("replacing", "before", "after"),
    [(Replacing.ALL, True, True), (Replacing.DECODES, False, True), (Replacing.NONE, False, False)],
)
def test_replacing_selects_the_requests_that_may_be_postponed(replacing: Replacing, before: bool, after: bool) -> None:
    case = Case(max_seqs=2, base=2, replacing=replacing)
    _, late, batch = case.real_time(0.03), case.real_time(0.3), case.best_effort()
    assert (batch in case.pack()) == before
    late.progress.output.append(1)
    assert (batch in case.pack()) == after


def test_a_prompt_is_postponed_only_if_a_step_of_its_own_is_in_time() -> None:
    """A step of 16 or 160 tokens before the deadline takes 26 or 170 ms, and the present one 12."""
    postponed = []
    for tokens in (16, 160):
        case = Case(max_seqs=2, base=2, replacing=Replacing.ALL)
        case.real_time(0.1), case.real_time(0.15, tokens=tokens)
        postponed.append(case.best_effort() in case.pack())
    assert postponed == [True, False]


def test_plans_in_flight_count_before_a_request_is_postponed() -> None:
    case = Case(max_seqs=2, base=2, replacing=Replacing.ALL)
    case.real_time(0.02), case.real_time(0.029)
    batch = case.best_effort()
    assert batch in case.pack()
    assert batch not in case.pack(in_flight=(StepPlan(0, ()),))


def test_steps_end_earlier_by_the_margin_of_the_cost_model() -> None:
    cost = TrackedCost(COST)
    for _ in range(400):  # steps take half as long again
        cost.learn(StepShape(decodes=10), 0.03)
    case, exact = Case(cost=cost), Case()
    for filled in (case, exact):
        filled.real_time(0.1)
        filled.best_effort(500)
    assert 1.45 < cost.margin < 1.55
    assert case.seconds(case.pack()) <= 0.1 / cost.margin < exact.seconds(exact.pack())


def test_a_target_that_cannot_be_met_limits_no_step() -> None:
    """One request cannot have its token in time even alone; the other is already late."""
    case = Case()
    infeasible, late, batch = case.real_time(0.001), case.real_time(-1.0), case.best_effort(50)
    step = case.pack()
    assert set(step) == {infeasible, late, batch}
    assert step[batch] == 50


def test_the_first_real_time_request_always_runs() -> None:
    case = Case()
    chat = case.real_time(0.92, tokens=900)
    case.real_time(0.95, tokens=900)
    assert case.pack() == {chat: 900}


def test_a_plan_in_flight_reduces_the_time_of_the_next() -> None:
    case = Case()
    case.real_time(0.1)
    batch = case.best_effort(500)
    alone = case.pack()[batch]
    behind = case.pack(in_flight=(StepPlan(0, ()),))[batch]
    assert behind < alone


def test_behind_a_plan_in_flight_the_token_after_its_token_is_due() -> None:
    """Otherwise no request would seem in time with two plans in flight."""
    case = Case()
    chat = case.real_time(0.1)
    case.best_effort(5000)
    chat.progress.begin(chat.progress.planned + 1, samples=True, plan_id=0)
    plan = StepPlan(0, ())
    start_s = case.packing.start_of(StepContext(in_flight=(plan,)))
    assert case.tokens.due(chat) == pytest.approx(0.1 + DEFAULT.tpot_s)
    seconds = case.seconds(case.pack(in_flight=(plan,)))
    assert 0.8 * (0.1 + DEFAULT.tpot_s - start_s) < seconds <= 0.1 + DEFAULT.tpot_s - start_s


def test_the_cap_doubles_while_real_time_requests_are_in_time() -> None:
    case = Case(base=2, max_seqs=32)
    case.real_time(0.5)
    for cap in (4, 8, 16, 32, 32):
        case.pack()
        assert case.packing.cap == cap
    late = Case(base=2, max_seqs=32)
    late.packing.cap = 32
    for _ in range(2):
        late.real_time(0.1, tokens=900)
    late.pack()
    assert late.packing.cap == 2


def test_only_real_time_requests_may_preempt_unless_the_step_is_empty() -> None:
    """The requests offered outside the candidates need blocks of others."""
    case = Case()
    chosen, unseen, batch = case.real_time(0.1), make(7, 20), make(8, 20, best_effort=True)
    case.tokens.begin(unseen, 0.0)
    builder = case.packing.open(StepContext(candidates=[(chosen, 1)]))
    assert builder.offer(unseen, 20) == 20
    assert builder.offer(batch, 20) == Refusal(Scope.REQUEST, WaitReason.NO_KV)
    builder.take(chosen, 1)
    assert builder.offer(unseen, 20) == Refusal(Scope.ALL, WaitReason.NO_KV)
    assert case.packing.open(StepContext()).offer(batch, 20) == 20


@given(seed=st.integers(0, 10**6))
def test_a_step_ends_before_the_most_urgent_deadline(seed: int) -> None:
    draw = random.Random(seed)
    case = Case(max_seqs=draw.randint(1, 12), max_tokens=draw.randint(1, 400), base=draw.randint(1, 12))
    for _ in range(draw.randint(0, 8)):
        case.real_time(draw.uniform(-0.1, 0.4), draw.choice((1, 1, 1, draw.randint(1, 300))))
    for _ in range(draw.randint(0, 12)):
        case.best_effort(draw.choice((1, draw.randint(1, 300))), draw.choice((0, 0, 3)))
    cap = 2 * case.packing.cap
    step = case.pack()
    assert len(step) <= (max(cap, len(case.urgent)) if set(case.others) & set(step) else case.packing.max_seqs)
    assert sum(step.values()) <= case.packing.max_tokens
    assert step or not (case.urgent or case.others)
    alone = [
        case.tokens.due(request)
        for request in case.urgent
        if case.seconds({request: request.progress.pending}) <= case.tokens.due(request)
    ]
    limit = min(alone) if alone else DEFAULT.tpot_s if case.urgent else float("inf")
    assert case.seconds(step) <= limit + 1e-9 or len(step) == 1


@given(seed=st.integers(0, 10**6), replacing=st.sampled_from(Replacing))
def test_the_limit_of_best_effort_requests_refuses_none_that_packing_has_chosen(
    seed: int, replacing: Replacing
) -> None:
    """A real-time request would otherwise be postponed, or a slot left empty, without effect."""
    draw = random.Random(seed)
    case = Case(max_seqs=draw.randint(1, 12), max_tokens=draw.randint(40, 400), replacing=replacing)
    for _ in range(draw.randint(0, 8)):
        case.real_time(draw.uniform(0.02, 0.4), draw.choice((1, 1, 1, draw.randint(1, 300))))
    for _ in range(draw.randint(1, 12)):
        case.best_effort(draw.choice((1, draw.randint(1, 300))), draw.choice((0, 0, 3)))
    for request in (*case.urgent, *case.others):
        case.patience.begin(request, 0.0)
    builder = LimitedBestEffort(case.packing, case.patience, lambda request: request.is_best_effort).open(
        case.context()
    )
    # Opened once, because each step changes the cap and the mean step time of the next.
    pack = builder._inner if isinstance(builder, LimitedBuilder) else builder
    chosen = dict(pack.chosen)
    found = {}
    for request, pending in case.ranked():
        if isinstance(verdict := builder.offer(request, pending), int):
            builder.take(request, verdict)
            found[request] = verdict
    assert found == chosen or not chosen
