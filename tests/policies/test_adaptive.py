from __future__ import annotations

import json
import random
import sys
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipjoin.core.forecast import LENGTH_EDGES, Forecast, length_bin
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.request import FinishReason, Request, Target
from skipjoin.core.step import Slice
from skipjoin.policies.adaptive import Adaptive
from skipjoin.policies.aging import INDEX_RANGE, Aging
from skipjoin.policies.cells import Cell, Entry, SortedCells, Standing
from skipjoin.policies.first_tokens import FirstTokenPace, PromptAdvances
from skipjoin.policies.gittins import NOT_BEGUN, GittinsIndex, Kind, kind_of
from skipjoin.policies.hazards import BIN_EDGES, BINS, Hazards, bin_of, hazards_of, merged
from skipjoin.policies.length_model import EXPERTS, LengthModel
from support.load import make
from support.policies import COST, told_by

OVERTAKING_S = 20.0
PATIENCE = 30.0
LAST = BINS - 1


def learned(lengths: Sequence[int], forecasts: Sequence[Forecast | None] | None = None) -> LengthModel:
    model = LengthModel()
    for number, length in enumerate(lengths):
        cls = model.expect(forecasts[number] if forecasts else None)
        for place in range(bin_of(length)):
            model.note(cls, place, ended=False)
        model.note(cls, bin_of(length), ended=True)
        if number % 16 == 0:
            model.refresh()
    model.refresh()
    return model


def index_on(model: LengthModel) -> GittinsIndex:
    index = GittinsIndex(COST, 4)
    index.model = model
    return index


def drawn(count: int, draw: Callable[[random.Random], float]) -> list[int]:
    chance = random.Random(7)
    return [max(1, round(draw(chance))) for _ in range(count)]


def heavy_tailed(chance: random.Random) -> float:
    return min(20_000, 10 * chance.paretovariate(1.0))


def test_bins_are_those_of_forecasts_with_the_first_ones_merged() -> None:
    assert BIN_EDGES[0] == 1
    assert set(BIN_EDGES) <= set(LENGTH_EDGES)
    assert all(one < other for one, other in pairwise(BIN_EDGES))
    for length in range(1, 3000):
        place = bin_of(length)
        assert BIN_EDGES[place] <= length < BIN_EDGES[place + 1]
    mass = [0.1] * 10
    assert sum(merged(mass)) == pytest.approx(1.0)
    assert merged(mass)[0] == pytest.approx(0.1 * length_bin(BIN_EDGES[1]))


def test_hazards_do_not_depend_on_which_requests_ran_first() -> None:
    """Long requests have not ended yet, but already count in the bins that they left."""
    short, long = bin_of(10), bin_of(1000)
    hazards = Hazards()
    for _ in range(200):
        for place in range(short):
            hazards.note(place, ended=False)
        hazards.note(short, ended=True)
        for place in range(long):  # as many long ones, which stay in the queue
            hazards.note(place, ended=False)
    found = hazards.estimate([0.0] * BINS, 1e-9)
    assert found[short] == pytest.approx(0.5, abs=0.01)
    assert sum(found) == found[short]


def test_good_forecasts_are_believed_and_worthless_ones_ignored() -> None:
    lengths = drawn(400, heavy_tailed)
    true = [Forecast(length, "test") for length in lengths]
    shuffled = random.Random(1).sample(true, len(true))
    kept, ignored = learned(lengths, true), learned(lengths, shuffled)
    assert kept.weights()[0] < 0.01
    assert ignored.weights()[0] > 0.9
    assert ignored.believed(bin_of(100)) == EXPERTS[0]
    short, long = bin_of(11), bin_of(700)
    assert kept.hazards(short)[short] > 0.8
    assert kept.hazards(long)[short] < 0.2
    assert ignored.hazards(short)[short] == pytest.approx(ignored.hazards(long)[short], abs=0.05)


def test_distributions_of_forecasts_are_used() -> None:
    """Two kinds of requests have one expected length, and only the distribution is right from the first request on."""
    lengths = [10, 400] * 8
    mass = [0.0] * (length_bin(400) + 1)
    mass[length_bin(10)] = mass[length_bin(400)] = 0.5
    with_mass = learned(lengths, [Forecast(205, "test", tuple(mass))] * len(lengths))
    without = learned(lengths, [Forecast(205, "test")] * len(lengths))
    place = bin_of(205)
    assert with_mass.believed(place) == "forecast distribution"
    assert with_mass.hazards(place)[bin_of(10)] == pytest.approx(0.5, abs=0.1)
    assert with_mass.hazards(place)[bin_of(100)] < 0.02 < without.hazards(place)[bin_of(100)]


def test_the_learned_state_survives_as_json() -> None:
    lengths = drawn(200, heavy_tailed)
    model = learned(lengths, [Forecast(length, "test", (0.5, 0.5)) for length in lengths])
    text = json.dumps(model.state())
    assert len(text) < 100_000
    again = LengthModel()
    again.restore(json.loads(text))
    assert again.state() == model.state()
    for cls in (None, bin_of(30), bin_of(300)):
        assert again.hazards(cls) == model.hazards(cls)


@pytest.mark.parametrize(
    "change",
    [
        {"edges": [1, 2, 3]},
        {"skill": [0.0]},
        {"skill": [float("nan")] * len(EXPERTS)},
        {"all": [[0.0] * BINS, [1.0] * BINS]},
        {"all": [[-1.0] * BINS, [-1.0] * BINS]},
        {"classes": {str(BINS): [[0.0] * BINS] * 2}},
        {"mass": {"0": "text"}},
        {"ratios": None},
    ],
)
def test_an_invalid_state_is_refused_and_changes_nothing(change: dict[str, object]) -> None:
    model = learned([5, 50, 500])
    before = model.state()
    with pytest.raises(ValueError, match=r"."):
        model.restore(before | change)
    assert model.state() == before


def test_equal_lengths_raise_the_index_and_heavy_tails_lower_it() -> None:
    """So nothing is preempted with equal lengths, and short work goes first otherwise."""
    kind = Kind(None, 7, LAST, None, 14)
    equal, heavy = index_on(learned([256] * 300)), index_on(learned(drawn(2000, heavy_tailed)))
    rising = [equal.log_index(kind, place) for place in range(NOT_BEGUN, bin_of(256))]
    assert all(one < other for one, other in pairwise(rising))
    # From the shortest length on; no request ends before.
    falling = [heavy.log_index(kind, place) for place in range(bin_of(16), bin_of(1000))]
    assert all(one > other for one, other in pairwise(falling))


def test_good_forecasts_rank_by_remaining_length() -> None:
    lengths = drawn(1000, heavy_tailed)
    index = index_on(learned(lengths, [Forecast(length, "test") for length in lengths]))
    by_class = [index.log_index(Kind(bin_of(length), 7, LAST, None), NOT_BEGUN) for length in (12, 50, 200, 800)]
    assert all(one > other for one, other in pairwise(by_class))
    kind = Kind(bin_of(200), 7, LAST, None)
    assert index.log_index(kind, bin_of(170)) > index.log_index(kind, 0)


def test_requests_near_their_max_tokens_rank_high() -> None:
    """However long other requests are: with heavy tails, the index falls otherwise."""
    index = index_on(learned(drawn(2000, heavy_tailed)))
    cap = bin_of(256)
    bounded, unbounded = Kind(None, 7, cap, None), Kind(None, 7, LAST, None)
    assert index.log_index(bounded, NOT_BEGUN) >= index.log_index(unbounded, NOT_BEGUN)
    assert index.log_index(bounded, cap) > index.log_index(unbounded, cap) + 1


def test_what_kinds_share_does_not_mix_them_up() -> None:
    lengths = drawn(300, heavy_tailed)
    model = learned(lengths, [Forecast(length, "test") for length in lengths])
    shared, chance = index_on(model), random.Random(1)
    kinds = [
        Kind(chance.choice((None, 5, 9)), chance.choice((5, 9)), chance.choice((8, LAST)), chance.choice((None, 4)), 12)
        for _ in range(60)
    ]
    for kind in kinds:
        place, alone = chance.choice((NOT_BEGUN, 0, 4, 8)), index_on(model)
        assert shared.log_index(kind, place) == alone.log_index(kind, place)
        assert shared.spread({kind: 1.0}) == alone.spread({kind: 1.0})


def test_a_looser_completion_objective_lowers_the_index() -> None:
    index = index_on(learned([100] * 100))
    tight, loose = (index.log_index(Kind(None, 7, LAST, steps), 0) for steps in (5, 9))
    assert tight > loose


def test_long_prompts_cost_more_only_while_slots_are_free() -> None:
    """Preempted requests fill the pool where slots are short, too."""
    kv = KVLedger(100, 0, 4)
    kv.grow(make(0, 400, 10), 400)
    ratios = {}
    for running in (1, 4):
        index = index_on(learned([100] * 100))
        for _ in range(500):
            index.observe(kv, running)
        index.model.notes += 100
        index.refresh()
        ratios[running] = index.log_index(Kind(None, 5, LAST, None), 5) - index.log_index(Kind(None, 10, LAST, None), 5)
    assert ratios[1] > 1.0
    assert ratios[4] < 0.1


@given(
    logs=st.lists(st.floats(-60, 60), min_size=1, max_size=8),
    waiting=st.lists(st.integers(0, 100), min_size=8, max_size=8),
    ages=st.lists(st.floats(0, 1e6), min_size=8, max_size=8),
)
def test_bases_are_bounded_and_age_always_counts(logs: list[float], waiting: list[int], ages: list[float]) -> None:
    aging = Aging(0.02)
    for _ in range(30):
        aging.derive(logs, waiting[: len(logs)], ages[: len(logs)])
        bases = [aging.base(log_index) for log_index in [*logs, -1e9, 1e9]]
        assert all(0 <= base <= INDEX_RANGE for base in bases)
        assert 0 < aging.per_s <= 1.0 + 1e-9


def test_age_decides_where_indices_are_alike() -> None:
    alike, apart = Aging(0.02), Aging(0.02)
    for _ in range(30):
        alike.derive([0.0, 0.05], [50, 50], [30.0, 30.0])
        apart.derive([0.0, -4.0], [50, 50], [30.0, 30.0])
    assert alike.per_s * 30 > 10 * 0.05  # of typical age, against the difference of indices
    assert apart.per_s * 30 < 0.5 * 4.0


def test_new_requests_overtake_a_queue_of_long_ones() -> None:
    """What waits is alike because shorter requests were served, and not because age should decide."""
    aging = Aging(0.02)
    for _ in range(30):
        aging.derive([0.0], [50], [30.0], [(4.0, 0.9), (0.0, 0.1)])
    assert aging.per_s * 30 < 0.5 * 4.0


@pytest.mark.parametrize(("reason", "ends"), [(FinishReason.STOP, 1.0), (FinishReason.LENGTH, 0.0)])
def test_only_outputs_that_ended_by_themselves_count_as_ends(reason: FinishReason, ends: float) -> None:
    ordering = Adaptive(
        index := GittinsIndex(COST, 4), overtaking_s=OVERTAKING_S, first_share=0.5, prompt_patience=PATIENCE
    )
    request = make(0, 10, 40)
    ordering.on_arrived(request, 0.0)
    ordering.on_scheduled([Slice(request, 0, 10, True, False, ())], 0.0)
    request.progress.output.extend([0] * 40)
    request.progress.finish_reason = reason
    ordering.on_finished(request, 1.0)
    assert sum(index.model.state()["all"][1]) == ends


def run_steps(ordering: Adaptive, live: list[Request], chance: random.Random, now: float) -> None:
    """Compute a step of the three best requests, and end some of them."""
    batch = [request for request, _ in zip(ordering.ranked(now), range(3), strict=False)]
    slices = [
        Slice(request, request.progress.computed, request.progress.known - request.progress.computed, True, False, ())
        for request in batch
    ]
    ordering.on_scheduled(slices, now)
    for request in batch:
        request.progress.computed = request.progress.planned = request.progress.known
        request.progress.output.append(0)
        request.progress.known += 1
        if chance.random() < 0.05 or request.progress.known >= request.max_total_tokens:
            request.progress.finish_reason = FinishReason.STOP
            live.remove(request)
            ordering.on_finished(request, now)


@given(seed=st.integers(0, 10**6), rate=st.floats(0.2, 5))
def test_no_request_overtakes_one_that_arrived_much_earlier(seed: int, rate: float) -> None:
    """The bound holds for everything except first tokens, whatever was learned."""
    chance, now = random.Random(seed), 0.0
    ordering = Adaptive(GittinsIndex(COST, 4), overtaking_s=OVERTAKING_S, first_share=0.5, prompt_patience=PATIENCE)
    live: list[Request] = []
    for number in range(60):
        now += chance.expovariate(rate)
        forecast = Forecast(chance.choice([1, 30, 1e4]), "test") if chance.random() < 0.5 else None
        live.append(make(number, chance.randint(1, 300), 2000, arrival=now, forecast=forecast))
        ordering.on_arrived(live[-1], now)
        run_steps(ordering, live, chance, now)
        begun = [request for request in ordering.ranked(now) if request.progress.output]
        for place, later in enumerate(begun):
            assert all(later.arrival <= earlier.arrival + OVERTAKING_S + 1e-6 for earlier in begun[place + 1 :])


@given(seed=st.integers(0, 10**6))
def test_requests_of_cells_are_sorted_however_far_they_are_read(seed: int) -> None:
    chance, per_s = random.Random(seed), 0.5
    cells = [Cell(Standing(), Kind(None, place, LAST, None), place, chance.uniform(0, 9), per_s) for place in range(3)]
    order = SortedCells()
    order.reset(cells)
    kept: list[tuple[Cell, Entry]] = []
    for number in range(chance.randint(1, 150)):
        cell = chance.choice(cells)
        request = make(number, 1, 1, arrival=chance.choice([1.0, chance.uniform(0, 30)]))
        kept.append((cell, (request.arrival, number, request)))
        order.add(*kept[-1])
        if chance.random() < 0.3:
            cell, entry = kept.pop(chance.randrange(len(kept)))
            order.remove(cell, entry)
        if chance.random() < 0.1:
            order.reset(cells)
        if chance.random() < 0.3:
            expected = [entry[2] for _, entry in sorted(kept, key=lambda pair: pair[0].key(pair[1]))]
            count = chance.choice([5, 40, len(expected)])
            assert list(islice(order, count)) == expected[:count]


def test_first_tokens_get_their_share_of_the_time() -> None:
    pace, now, spent = FirstTokenPace(0.25, 0.025), 0.0, 0.0
    while now < 100.0:
        if pace.is_open(now):
            pace.spend(0.1, now + 0.1)
            spent += 0.1
        now += 0.1
    assert 0.25 * 100 <= spent <= 0.25 * 100 + 2.0


@given(
    prompts=st.lists(st.floats(0.01, 3.0), min_size=1, max_size=60),
    share=st.floats(0.02, 0.5),
    continued=st.sampled_from([0, 2, 5]),
)
def test_prompts_computed_ahead_of_waiting_requests_cost_a_share_of_the_time(
    prompts: list[float], share: float, continued: int
) -> None:
    """Those of requests that continue are free. Once enough have continued, the next prompts are computed at once."""
    advances, now, waiting_s = PromptAdvances(share, 0.025), 0.0, 0.0
    ahead: deque[Request] = deque()
    for number, seconds in enumerate(prompts):
        while not advances.is_open(now):
            now += 0.5
        advances.advance(request := make(number), seconds, now)
        ahead.append(request)
        waiting_s += seconds
        assert waiting_s <= share * now + 1.0 + 2 * max(prompts)
        if continued and number % continued == 0:
            waiting_s -= advances.waiting[ahead[0]]
            advances.forget(ahead.popleft(), continues=True)
    for request in ahead:
        advances.forget(request, continues=True)
    assert advances.is_open(now)
    advances.advance(lost := make(999), 100.0, now)
    advances.forget(lost, continues=False)
    assert not advances.is_open(now), "its prompt must be computed again"


def test_a_spread_of_costs_is_learned_from_lengths_and_prompts() -> None:
    """Equal requests have none, whatever they cost, and a mixture of short and long prompts has one as lengths have.

    Where KV is short, the cost grows with the square of the length, and long ones that no request had would decide.
    """
    full = KVLedger(100, 0, 4)
    full.grow(make(0, 400, 10), 400)

    def spread(lengths: list[int], *prompts: int, is_kv_short: bool = False) -> float:
        index = index_on(learned(lengths))
        for _ in range(500 * is_kv_short):
            index.observe(full, 1)
        index.refresh()
        kinds = {kind_of(make(0, prompt, 4000), None, index.time, prompt): 1.0 for prompt in prompts}
        return index.spread(kinds)

    assert spread([200] * 500, 64) < 0.1
    assert spread([200] * 500, 4096) < 0.1
    assert spread([20] * 60, 64) < 0.1
    assert spread([64] * 60, 64, is_kv_short=True) < 0.1
    near = spread(drawn(500, lambda chance: chance.uniform(200, 400)), 64)
    heavy = spread(drawn(500, heavy_tailed), 64)
    assert near < 0.2
    assert heavy > 1
    assert spread([20] * 500, 64, 8192) > 0.3


def test_first_tokens_precede_until_their_share_is_used_or_their_objective_missed() -> None:
    ordering = Adaptive(GittinsIndex(COST, 4), overtaking_s=OVERTAKING_S, first_share=0.5, prompt_patience=PATIENCE)
    old, new = make(0, 8, 90, arrival=0.0), make(1, 20_000, 90, arrival=1.0)
    hasty = make(2, 8, 90, arrival=1.0, target=Target(ttft_s=1.0))
    for request in (old, new, hasty):
        ordering.on_arrived(request, request.arrival)
    ordering.on_scheduled([Slice(old, 0, 8, True, False, ())], 1.0)
    assert list(ordering.ranked(1.5)) == [hasty, new, old]
    assert ordering.outranks(new, old)
    assert next(ordering.ranked(2.5)) is new
    assert not ordering.outranks(hasty, old), "the objective is missed"
    ordering.on_scheduled([Slice(new, 0, 10_000, False, False, ())], 3.0)  # takes 15 s
    assert next(ordering.ranked(3.1)) is old, "the share is used"
    assert next(ordering.ranked(99.0)) is new


def test_recomputation_uses_the_share_of_first_tokens() -> None:
    """Otherwise, first tokens and recomputing what they displaced could take all of the time together."""
    ordering = Adaptive(GittinsIndex(COST, 4), overtaking_s=OVERTAKING_S, first_share=0.5, prompt_patience=PATIENCE)
    old, new = make(0, 8, 90, arrival=0.0), make(1, 8, 90, arrival=1.0)
    for request in (old, new):
        ordering.on_arrived(request, request.arrival)
    ordering.on_scheduled([Slice(old, 0, 8, True, False, ())], 1.0)
    old.progress.output.append(0)
    old.progress.known += 1
    ordering.on_preempted(old, 1.0)
    assert next(ordering.ranked(1.5)) is new
    ordering.on_scheduled([Slice(old, 0, 10_000, False, False, ())], 3.0)  # takes 15 s
    assert next(ordering.ranked(3.1)) is old
    assert next(ordering.ranked(99.0)) is new


def run_all(ordering: Adaptive, requests: Sequence[Request]) -> None:
    slices = [
        Slice(request, request.progress.computed, request.progress.known - request.progress.computed, True, False, ())
        for request in requests
    ]
    ordering.on_scheduled(slices, 0.0)
    for request in requests:
        request.progress.computed = request.progress.planned = request.progress.known
        request.progress.output.append(0)
        request.progress.known += 1


def has_claim(ordering: Adaptive, request: Request) -> bool:
    return told_by(ordering, request)["first token first"] == "yes"


def test_claims_to_early_first_tokens_are_kept_and_granted_one_by_one() -> None:
    """With equal costs, prompts for requests that then wait get little time. Where there is room, none waits."""
    index, full, empty = GittinsIndex(COST, 4), KVLedger(10, 0, 4), KVLedger(40_000, 0, 4)
    ordering = Adaptive(index, overtaking_s=OVERTAKING_S, first_share=1.0, prompt_patience=PATIENCE)
    full.grow(make(9), 40)
    prompts = (100, 10_000, 100, *[40_000] * 5)
    old, first, second, *others = [
        make(number, prompt, 90, arrival=0.1 * number) for number, prompt in enumerate(prompts)
    ]
    for request in (old, first, second):
        ordering.on_arrived(request, request.arrival)
    run_all(ordering, [old])
    ordering._claims.ahead.share = 0.03
    run_all(ordering, [first])  # for 15 s, while the old one waits
    for request in others:
        ordering.on_arrived(request, 1.0)
    list(ordering.ranked(100.0))
    assert has_claim(ordering, second), "it arrived in time, and keeps it"
    ordering.on_begin(100.0, full)
    assert not any(has_claim(ordering, request) for request in others)
    ordering.on_begin(1000.0, full)
    assert [has_claim(ordering, request) for request in others] == [True, *[False] * 4]
    ordering.on_begin(1000.0, empty)
    assert sum(has_claim(ordering, request) for request in others) == 1, "the old one waits"
    run_all(ordering, [old, first])
    ordering.on_begin(1000.0, empty)
    assert [has_claim(ordering, request) for request in others] == [*[True] * 3, False, False], "four run at a time"


def test_requests_that_end_without_a_claim_are_not_kept() -> None:
    """The first of the queue may wait for long, and those behind it run as their index allows."""
    ordering = Adaptive(GittinsIndex(COST, 4), overtaking_s=OVERTAKING_S, first_share=1.0, prompt_patience=PATIENCE)
    ordering._claims.ahead.spend(1e9, 0.0)
    ordering.on_arrived(make(0, 8, 90), 0.0)
    for number in range(1, 2000):
        ordering.on_arrived(request := make(number, 8, 90, arrival=0.1), 0.1)
        run_all(ordering, [request])
        request.progress.finish(FinishReason.STOP)
        ordering.on_finished(request, 0.1)
    assert ordering._claims
    assert len(ordering._claims._queue._entries) < 300


@pytest.mark.parametrize("is_dropped", [False, True])
@pytest.mark.parametrize("is_for_growth", [False, True])
def test_kv_that_left_bounds_what_first_tokens_take_from_others(is_dropped: bool, is_for_growth: bool) -> None:
    """They still precede others, but take no KV from them for 50 times as long as it takes to compute again."""
    index = GittinsIndex(COST, 4)
    ordering = Adaptive(index, overtaking_s=OVERTAKING_S, first_share=1.0, prompt_patience=PATIENCE)
    old, new, newer = (make(number, 10_000, 90, arrival=0.5 * number) for number in range(3))
    for request in (old, new, newer):
        ordering.on_arrived(request, request.arrival)
    run_all(ordering, [old])
    assert next(ordering.ranked(2.0)) is new
    assert ordering.outranks(newer, old)
    if is_dropped:
        old.progress.computed = 0
    ordering.on_preempted(old, 2.0)
    run_all(ordering, [] if is_for_growth else [new])
    lost_s = index.time.prefill(10_000)
    for times, may_take in ((10, False), (49, False), (51, True)):
        list(ordering.ranked(2.0 + times * lost_s))
        assert ordering.outranks(newer, old) == (may_take or is_for_growth)
        assert not ordering.outranks(old, newer)


def test_pauses_do_not_change_the_lengths_at_which_a_request_changes_its_rank() -> None:
    def edges(pauses: Callable[[], int]) -> list[float | str]:
        ordering = Adaptive(GittinsIndex(COST, 4), overtaking_s=OVERTAKING_S, first_share=0.5, prompt_patience=PATIENCE)
        request, other = make(0, 8, 200), make(1, 8, 9000)
        for arrived in (request, other):
            ordering.on_arrived(arrived, 0.0)
        found = []
        for _ in range(150):
            run_all(ordering, [request])
            found.append(told_by(ordering, request)["next length"])
            for _ in range(pauses()):
                run_all(ordering, [other])
        return found

    chance = random.Random(1)
    assert edges(lambda: chance.choice([0, 0, 1, 40])) == edges(lambda: 0)
    assert len(set(edges(lambda: 0))) > 4


def test_a_step_does_not_examine_paused_requests() -> None:
    def calls(paused: int) -> int:
        ordering = Adaptive(GittinsIndex(COST, 4), overtaking_s=OVERTAKING_S, first_share=0.5, prompt_patience=PATIENCE)
        requests = [make(number, 8, 90) for number in range(paused)]
        for request in requests:
            ordering.on_arrived(request, 0.0)
        run_all(ordering, requests)
        for _ in range(8):
            run_all(ordering, requests[:1])
        seen: list[str] = []
        sys.setprofile(lambda frame, event, _: seen.append(event))
        run_all(ordering, requests[:1])
        sys.setprofile(None)
        return seen.count("call")

    assert calls(1000) == calls(10)


def test_a_rank_is_explained() -> None:
    index = index_on(learned([100] * 100))
    ordering = Adaptive(index, overtaking_s=OVERTAKING_S, first_share=0.5, prompt_patience=PATIENCE)
    request = make(0, 8, 900, arrival=1.0, forecast=Forecast(100, "test"))
    ordering.on_arrived(request, 1.0)
    ordering.on_begin(1.0, KVLedger(100, 0, 4))
    list(ordering.ranked(1.0))
    told = told_by(ordering, request, 3.0)
    assert told["forecast from"] == BIN_EDGES[bin_of(100)]
    assert told["lengths by"] in EXPERTS
    assert told["next length"] == BIN_EDGES[1]
    assert told["chance to end"] == pytest.approx(index.model.hazards(bin_of(100))[0])
    assert told["age credit"] == pytest.approx(2 * ordering._aging.per_s)
    assert told["first token first"] == "yes"
    ordering.on_arrived(short := make(1, 8, 2, arrival=1.0), 1.0)
    told = told_by(ordering, short, 3.0)
    assert (told["next length"], told["chance to end"]) == (3, 1.0)


def test_hazards_of_a_distribution_end_with_certainty() -> None:
    assert hazards_of([0.25, 0.25, 0.5]) == pytest.approx([0.25, 1 / 3, 1.0])
    assert hazards_of([1.0, 0.0]) == [1.0, 1.0]
