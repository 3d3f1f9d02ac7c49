from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import cache

import pytest
from engines import (
    ALONE,
    BLOCK_SIZE,
    COMMON,
    CONFIGS,
    GRAMMARS,
    Restless,
    RestlessParts,
    SwapAll,
    engine,
    make_store,
    mixed_requests,
    run,
    tiny_model,
)

from skipjoin.core.decide.scheduler import Scheduler
from skipjoin.core.engine import EngineCore
from skipjoin.core.events import Admitted, Event, Moved, MoveFailed, Planned, Preempted, Preemption, Reserved
from skipjoin.core.forecast import Forecast
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.request import Request
from skipjoin.core.step import Direction, Move
from skipjoin.exec.local import LocalExecutor
from skipjoin.model.ops.build import load_library
from skipjoin.policies.cost import LinearCost
from skipjoin.policies.eviction import Recompute
from skipjoin.recipes import Settings
from support.policies import DropTails, LendAlongside, ShareAll, SpillAll
from support.recipes import build
from support.worlds import checkered, exhaustive, halved, one_in


class Fails:
    """Predicate that fails half of the moves in these directions, at random so that no workload is in phase with it."""

    def __init__(self, *directions: Direction) -> None:
        self._directions = directions
        self._draw = random.Random(0)

    def __call__(self, move: Move) -> bool:
        return move.direction in self._directions and self._draw.random() < 0.5


OUT, IN = Direction.OUT, Direction.IN
SLOTS = {OUT: "saved slots", Direction.WITHIN: "moved slots", IN: "restored slots"}
# No moves are needed here; the policy makes them anyway.
_RESTLESS = dict(eviction=lambda: Restless(5), device_blocks=40, cpu_blocks=40, slots=2, chunk=5)
_SWAPPED = dict(eviction=SwapAll, device_blocks=8, cpu_blocks=60, slots=1)
_SPILLED = _SWAPPED | dict(eviction=SpillAll)
_SHARED = _SWAPPED | dict(eviction=ShareAll, slots=3, chunk=5)
_ALONGSIDE = _SHARED | dict(eviction=LendAlongside, device_blocks=12, late=3)
_PARTS = _RESTLESS | dict(eviction=lambda: RestlessParts(5), device_blocks=10, chunk=4, late=3)
# The largest request has 26 tokens: 7 blocks of 4.
FORCED = {
    "paused at every step": dict(eviction=Recompute, device_blocks=60, slots=1),
    "prompts in chunks of 3": dict(eviction=Recompute, device_blocks=60, slots=2, chunk=3),
    "dropped at every step": dict(eviction=Recompute, device_blocks=8, slots=1),
    "swapped at every step": _SWAPPED,
    "swapped at every step of a prompt": _SWAPPED | dict(chunk=3),
    "swapped, host too small": dict(eviction=SwapAll, device_blocks=8, cpu_blocks=6, slots=2),
    "swapped, copies out fail": _SWAPPED | dict(fails=lambda: Fails(OUT)),
    "swapped, copies in fail": _SWAPPED | dict(fails=lambda: Fails(IN)),
    "spilled at every step": _SPILLED,
    "spilled at every step of a prompt": _SPILLED | dict(chunk=3),
    "spilled, host too small": _SPILLED | dict(cpu_blocks=3, slots=2),
    "spilled, copies out fail": _SPILLED | dict(fails=lambda: Fails(OUT)),
    "spilled, copies in fail": _SPILLED | dict(fails=lambda: Fails(IN)),
    "shared at every step": _SHARED,
    "shared, host too small": _SHARED | dict(cpu_blocks=3),
    "shared, copies out fail": _SHARED | dict(fails=lambda: Fails(OUT)),
    "shared, copies in fail": _SHARED | dict(fails=lambda: Fails(IN)),
    "tails dropped at every step": dict(eviction=DropTails, device_blocks=8, slots=1),
    "parts moved concurrently": _PARTS,
    "parts moved concurrently, late copies fail": _PARTS | dict(fails=lambda: Fails(OUT, IN)),
    "moved concurrently every step": _RESTLESS,
    "moved concurrently, completing at once": _RESTLESS | dict(late=1),
    "moved concurrently, completing late": _RESTLESS | dict(late=5),
    "moved concurrently, slowly": _RESTLESS | dict(delay_s=2e-3),
    "moved concurrently, full device": _RESTLESS | dict(device_blocks=10, late=3),
    "moved concurrently, copies out fail": _RESTLESS | dict(fails=lambda: Fails(OUT)),
    "moved concurrently, copies in fail": _RESTLESS | dict(fails=lambda: Fails(IN)),
    "moved concurrently, late copies fail": _RESTLESS | dict(late=4, fails=lambda: Fails(OUT, IN)),
    "overlapped": dict(eviction=Recompute, device_blocks=60, slots=3, depth=2),
    "overlapped, dropped": dict(eviction=Recompute, device_blocks=12, slots=2, depth=2),
    "overlapped, swapped, chunks": dict(eviction=SwapAll, device_blocks=14, cpu_blocks=60, slots=2, depth=2, chunk=7),
    "overlapped, swapped, copies fail": _SWAPPED
    | dict(device_blocks=14, depth=2, chunk=7, fails=lambda: Fails(OUT, IN)),
    "overlapped, spilled, copies fail": _SPILLED
    | dict(device_blocks=14, slots=2, depth=2, chunk=7, fails=lambda: Fails(OUT, IN)),
    "overlapped, shared": _SHARED | dict(depth=2, chunk=None),
    "overlapped, shared, copies fail": _SHARED | dict(depth=2, chunk=None, fails=lambda: Fails(OUT, IN)),
    "overlapped, moved concurrently": _RESTLESS | dict(depth=2),
    "overlapped, completing late": _RESTLESS | dict(depth=2, late=5),
    "overlapped, late copies fail": _RESTLESS | dict(depth=2, late=3, fails=lambda: Fails(OUT, IN)),
    "shared, returned alongside": _ALONGSIDE,
    "shared, returned alongside, copies in fail": _ALONGSIDE | dict(fails=lambda: Fails(IN)),
    "overlapped, shared, returned alongside": _ALONGSIDE | dict(depth=2, chunk=None),
}
BLOCKING = {"moved out blocking", "moved in blocking"}
OVERLAPPED = {"moved out overlapped", "moved in overlapped"}
# What must have happened for the case to be meaningful.
EXPECTED = {
    "paused at every step": {Preemption.PAUSE},
    "dropped at every step": {Preemption.DROP},
    "swapped at every step": {Preemption.SWAP} | BLOCKING,
    "swapped at every step of a prompt": {"moved out in mid-prompt"} | BLOCKING,
    "swapped, copies out fail": {"failed out blocking", Preemption.DROP},
    "swapped, copies in fail": {"failed in blocking", Preemption.DROP},
    "spilled at every step": {Preemption.SPILL} | BLOCKING,
    "spilled at every step of a prompt": {Preemption.SPILL, "moved out in mid-prompt"} | BLOCKING,
    "spilled, host too small": {Preemption.SPILL, "a tail was dropped"} | BLOCKING,
    "spilled, copies out fail": {Preemption.SPILL, "failed out blocking", "a tail was dropped"},
    "spilled, copies in fail": {Preemption.SPILL, "failed in blocking", "a tail was dropped"},
    "shared at every step": {"saved slots", "restored slots"},
    "shared, host too small": {"saved slots"},
    "shared, copies out fail": {"saved slots", "failed out blocking", Preemption.DROP},
    "shared, copies in fail": {"saved slots", "failed in blocking", Preemption.DROP},
    "tails dropped at every step": {"a tail was dropped"},
    "parts moved concurrently": {Preemption.SPILL} | BLOCKING | OVERLAPPED,
    "parts moved concurrently, late copies fail": {Preemption.SPILL, "failed out overlapped", "failed in overlapped"},
    "moved concurrently every step": {Preemption.SWAP, "moved out in mid-prompt"} | OVERLAPPED,
    "moved concurrently, completing at once": OVERLAPPED,
    "moved concurrently, completing late": {"ran during a move"} | OVERLAPPED,
    "moved concurrently, slowly": OVERLAPPED,
    "moved concurrently, full device": BLOCKING | OVERLAPPED,
    "moved concurrently, copies out fail": {"failed out overlapped"},
    "moved concurrently, copies in fail": {"failed in overlapped", Preemption.DROP},
    "moved concurrently, late copies fail": {"failed out overlapped", "failed in overlapped", Preemption.DROP},
    "overlapped, dropped": {Preemption.DROP},
    "overlapped, swapped, chunks": {Preemption.SWAP} | BLOCKING,
    "overlapped, swapped, copies fail": {"failed out blocking", "failed in blocking", Preemption.DROP},
    "overlapped, spilled, copies fail": {Preemption.SPILL, "failed out blocking", "failed in blocking"},
    "overlapped, shared": {"saved slots", "restored slots"},
    "overlapped, shared, copies fail": {"saved slots", "failed out blocking", Preemption.DROP},
    "overlapped, moved concurrently": {Preemption.SWAP} | OVERLAPPED,
    "overlapped, completing late": {"ran during a move"} | OVERLAPPED,
    "overlapped, late copies fail": {"failed out overlapped", "failed in overlapped", Preemption.DROP},
    "shared, returned alongside": {"saved slots", "moved in overlapped"},
    "shared, returned alongside, copies in fail": {"failed in overlapped"},
    "overlapped, shared, returned alongside": {"saved slots", "moved in overlapped"},
}
# Minimum number of each.
MIN_COUNT = 3


def forced(case: str, family: str, attention: str = "auto", **int8: str) -> tuple[EngineCore, LocalExecutor]:
    options = dict(FORCED[case])
    fails = options.pop("fails", lambda: lambda move: False)
    return engine(tiny_model(family, attention, **int8), options.pop("eviction")(), fails=fails(), **options)


def happened(events: list[Event]) -> Counter[object]:
    """Count events by kind. A move counts as `ran during` if at least three steps ran while it was in flight."""
    found: Counter[object] = Counter()
    kinds: dict[int, str] = {}
    begun: dict[int, int] = {}
    steps = 0
    for event in events:
        if isinstance(event, Preempted):
            found[event.how] += 1
            found["a tail was dropped"] += event.how is Preemption.DROP and event.kept > 0
        elif isinstance(event, Admitted):
            found["adopted"] += event.cached > 0
        elif isinstance(event, Planned):
            steps += bool(event.plan.slices)
            for kind, moves in (("blocking", event.plan.blocking), ("overlapped", event.plan.overlapped)):
                for move in moves:
                    kinds[id(move)], begun[id(move)] = kind, steps
        elif isinstance(event, Moved | MoveFailed):
            move = event.move
            if move.request is None:
                found["copied for the cache"] += 1
                continue
            what = "moved" if isinstance(event, Moved) else "failed"
            found[f"{what} {move.direction.name.lower()} {kinds[id(move)]}"] += 1
            found[SLOTS[move.direction]] += bool(move.spans)
            found["ran during a move"] += steps - begun[id(move)] >= 3
            is_part = len(move.source) * BLOCK_SIZE < len(move.request.prompt)
            found["moved out in mid-prompt"] += is_part and move.direction is OUT
    return found


@cache
def outputs_alone(
    family: str,
    eos: int | None = None,
    common: Sequence[int] = (),
    attention: str = "auto",
    **int8: str,
) -> list[list[int]]:
    """Return each request's output in an engine of its own."""
    outputs = []
    for request in mixed_requests(eos, common):
        run(*engine(tiny_model(family, attention, **int8), Recompute(), device_blocks=60), [request])
        outputs.append(request.progress.output)
    return outputs


def outputs(requests: list[Request]) -> list[list[int]]:
    return [request.progress.output for request in requests]


@pytest.mark.parametrize("turn", [0, exhaustive(3)])
@pytest.mark.parametrize("case", halved(FORCED, 1))  # the others have a prefix cache below
def test_preemption_changes_no_tokens(turn: int, case: str) -> None:
    # The families alternate: what is forced is the same for all, and each has a third of the cases.
    family = list(CONFIGS)[(list(FORCED).index(case) + turn) % len(CONFIGS)]
    requests = mixed_requests()
    events = run(*forced(case, family), requests)
    assert outputs(requests) == outputs_alone(family)
    found = happened(events)
    assert all(found[what] >= MIN_COUNT for what in EXPECTED.get(case, ())), found


@pytest.mark.skipif(load_library() is None, reason="no compiler")
@pytest.mark.parametrize(
    ("case", "int8"),
    checkered(
        ["dropped at every step", "parts moved concurrently", "overlapped, swapped, chunks"],
        ["quantization", "kv_cache_dtype"],
    ),
)
def test_preemption_changes_no_tokens_with_int8(case: str, int8: str) -> None:
    requests = mixed_requests()
    core, executor = forced(case, "llama", **{int8: "int8"})
    found = happened(run(core, executor, requests))
    assert outputs(requests) == outputs_alone("llama", **{int8: "int8"})
    assert all(found[what] >= MIN_COUNT for what in EXPECTED[case]), found
    if int8 == "quantization":
        assert outputs(requests) != outputs_alone("llama")  # the weights are not those of the other tests
    else:
        assert executor.store.device.format.is_rounded  # too close for other tokens


@pytest.mark.parametrize(
    ("case", "attention"), checkered(["shared at every step", "parts moved concurrently"], ["auto", "torch"])
)
def test_int8_kv_of_shared_blocks_and_prefixes_is_never_rounded_again(case: str, attention: str) -> None:
    requests = mixed_requests(common=COMMON, adopts=True)
    found = happened(run(*forced(case, "qwen3", attention, kv_cache_dtype="int8"), requests, leads=True))
    assert outputs(requests) == outputs_alone("qwen3", common=COMMON, attention=attention, kv_cache_dtype="int8")
    assert found["adopted"] >= MIN_COUNT


@pytest.mark.parametrize("case", halved(FORCED))
def test_preemption_changes_no_tokens_with_prefix_caching(case: str) -> None:
    number = list(FORCED).index(case)
    family, attention = list(CONFIGS)[number % len(CONFIGS)], ("auto", "torch")[number // len(CONFIGS) % 2]
    requests = mixed_requests(common=COMMON, adopts=True)
    found = happened(run(*forced(case, family, attention), requests, leads=True))
    assert outputs(requests) == outputs_alone(family, common=COMMON, attention=attention)
    assert found["adopted"] >= MIN_COUNT
    # Prompts that begin with adopted KV have few steps left.
    rare = {"moved out in mid-prompt", "restored slots"}
    assert all(found[what] for what in EXPECTED.get(case, set()) - rare), found


@pytest.mark.parametrize("case", one_in(6, FORCED, 2))
@pytest.mark.parametrize("family", ALONE)
def test_preemption_changes_no_tokens_of_layers_with_other_kv(case: str, family: str) -> None:
    int8 = {"kv_cache_dtype": "int8"} if list(FORCED).index(case) // 6 % 2 else {}
    requests = mixed_requests(common=COMMON, adopts=True)
    found = happened(run(*forced(case, family, **int8), requests, leads=True))
    assert outputs(requests) == outputs_alone(family, common=COMMON, **int8)
    assert found["adopted"] >= MIN_COUNT


# A sixth of the cases stop at EOS, and another one is aborted.
@pytest.mark.parametrize("case", one_in(6, FORCED))
def test_preemption_changes_no_outputs_that_stop_at_eos(case: str) -> None:
    # A token that occurs in the middle of outputs; with overlap it is found one step late.
    alone = outputs_alone("llama")
    eos = Counter(token for output in alone for token in output[1:-1]).most_common(1)[0][0]
    expected = outputs_alone("llama", eos)
    assert any(len(short) < len(full) for short, full in zip(expected, alone, strict=True))
    requests = mixed_requests(eos)
    run(*forced(case, "llama"), requests)
    assert outputs(requests) == expected


@pytest.mark.parametrize("case", one_in(6, FORCED, 3))
def test_aborts_change_no_tokens_of_other_requests(case: str) -> None:
    alone = outputs_alone("opt")
    victims = {1: (1, 3), 4: (6,), 9: (4,)}  # by the number of plans made before the abort
    core, executor = forced(case, "opt")
    requests = mixed_requests()
    plans = 0
    start_step = core.start_step

    def start_and_abort(now: float):
        nonlocal plans
        plan = start_step(now)
        plans += 1
        for victim in victims.get(plans, ()):
            core.abort(victim, now)
        return plan

    core.start_step = start_and_abort  # type: ignore[method-assign]
    run(core, executor, requests)
    for number, request in enumerate(requests):
        if all(number not in some for some in victims.values()):
            assert request.progress.output == alone[number]


@pytest.mark.parametrize("cpu_blocks", [0, 60])
@pytest.mark.parametrize("depth", [1, 2])
def test_preemption_changes_no_tokens_under_exact_allocation(depth: int, cpu_blocks: int) -> None:
    """Requests are nested, vacated and stopped at the end of reservations that were forecast too small."""
    model, params = tiny_model("llama"), {"padding": 0.0, "reserve": 0.1, "buffer": 0.0}
    policies = build("econoserve", Settings(LinearCost(floor=1.0, prefill_token=1.0), 8, 64), params)
    ledger = KVLedger(9, cpu_blocks, BLOCK_SIZE)
    core = EngineCore(Scheduler(policies, ledger, depth=depth, overlap=depth > 1))
    requests = mixed_requests(has_classes=False)
    for request in requests:
        request.progress.expect(Forecast((2, request.max_tokens)[request.id % 2], "test"))
    events = run(core, LocalExecutor(model, make_store(model, 9, cpu_blocks), grammars=GRAMMARS), requests)
    assert outputs(requests) == outputs_alone("llama")
    assert any(isinstance(event, Reserved) and isinstance(event.parent, Request) for event in events)
    found, moved = happened(events), Preemption.SWAP if cpu_blocks else Preemption.DROP
    # Where there is a CPU tier, requests that wait for a reservation are also swapped out for prompts.
    assert min(found[Preemption.PAUSE], found[moved]) > 0
    assert found[Preemption.PAUSE] + found[moved] > MIN_COUNT
