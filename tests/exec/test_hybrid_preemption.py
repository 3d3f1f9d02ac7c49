"""Preemption of models whose layers have a recurrent state: as in test_invisible_preemption, with few slots for it."""

from __future__ import annotations

from functools import cache

import pytest
from engines import COMMON, STATES, engine, mixed_requests, run
from test_invisible_preemption import EXPECTED, FORCED, happened, outputs

from skipjoin.core.events import Planned, Preemption
from skipjoin.model.causal_lm import CausalLM
from skipjoin.model.loader import random_model
from skipjoin.model.ops.build import load_library
from skipjoin.policies.eviction import Recompute
from support.hybrid_models import FURTHER, HYBRIDS
from support.worlds import exhaustive, one_in

pytestmark = pytest.mark.skipif(load_library() is None, reason="no compiler")
# What cannot happen, since a part of KV is of no use, or happens rarely where others do.
RARE = {"a tail was dropped", Preemption.SPILL, "moved out in mid-prompt", "restored slots", "ran during a move"}


@cache
def model(name: str, kv_cache_dtype: str = "auto") -> CausalLM:
    return random_model((HYBRIDS | FURTHER)[name], seed=3, kv_cache_dtype=kv_cache_dtype)


@cache
def alone(name: str, kv_cache_dtype: str) -> list[list[int]]:
    found = []
    for request in mixed_requests(common=COMMON):
        run(*engine(model(name, kv_cache_dtype), Recompute(), device_blocks=60), [request])
        found.append(request.progress.output)
    return found


# A whole request does not fit into the CPU tier.
NO_ROOM = {"spilled, host too small", "shared, host too small"}
CASES = list(FORCED)
# A request that lost its state after each chunk of a prompt would never finish it.
CHANGES = {"prompts in chunks of 3": {"states": STATES._replace(device=7)}, "shared, host too small": {"chunk": None}}


@pytest.mark.parametrize("case", one_in(4, CASES))
def test_preemption_changes_no_tokens_of_models_with_states(case: str) -> None:
    number = CASES.index(case)
    check(case, list(HYBRIDS)[number // 3 % len(HYBRIDS)], ("auto", "int8")[number % 5 == 0])


SOME = ["dropped at every step", "overlapped, swapped, chunks", "overlapped, shared, copies fail"]


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (case, name) if (case, name) in ((SOME[1], "zamba2"), (SOME[2], "kimi_linear")) else exhaustive(case, name)
        for case in SOME
        for name in FURTHER
    ],
)
def test_preemption_changes_no_tokens_of_further_models_with_states(case: str, name: str) -> None:
    check(case, name, "auto")


def check(case: str, name: str, kv_cache_dtype: str) -> None:
    requests = mixed_requests(common=COMMON, adopts=True)
    options = FORCED[case] | CHANGES.get(case, {})
    fails = options.pop("fails", lambda: lambda move: False)
    core, executor = engine(model(name, kv_cache_dtype), options.pop("eviction")(), fails=fails(), **options)
    events = run(core, executor, requests, leads=True)
    assert outputs(requests) == alone(name, kv_cache_dtype)
    found = happened(events)
    assert all(
        found[what] for what in (EXPECTED.get(case, set()) if case not in NO_ROOM else {Preemption.DROP}) - RARE
    ), found
    plans = [event.plan for event in events if isinstance(event, Planned)]
    assert any(plan.states.restored for plan in plans) == (found["adopted"] > 0)
    assert core.kv.states.free == core.kv.states.total
