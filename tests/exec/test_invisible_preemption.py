"""Preemption is invisible: whatever is forced at step boundaries, every request's tokens are those it gets alone."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
from engines import CONFIGS, Restless, engine, mixed_requests, run, tiny_model

from skipjoin.core.events import Moved, Preempted, Preemption
from skipjoin.core.request import Request
from skipjoin.policies.pressure import Recompute, Swap

# The largest request has 26 tokens: 7 blocks of 4.
FORCED = {
    "paused at every step": dict(pressure=Recompute, device_blocks=60, seats=1),
    "prompts in chunks of 3": dict(pressure=Recompute, device_blocks=60, seats=2, chunk=3),
    "dropped at every step": dict(pressure=Recompute, device_blocks=8, seats=1),
    "swapped at every step": dict(pressure=Swap, device_blocks=8, host_blocks=60, seats=1),
    "swapped, host too small": dict(pressure=Swap, device_blocks=8, host_blocks=6, seats=2),
    "moved beside every step": dict(pressure=lambda: Restless(5), device_blocks=40, host_blocks=40, seats=2, chunk=5),
    "overlapped": dict(pressure=Recompute, device_blocks=60, seats=3, depth=2),
    "overlapped, dropped": dict(pressure=Recompute, device_blocks=12, seats=2, depth=2),
    "overlapped, swapped, chunks": dict(pressure=Swap, device_blocks=14, host_blocks=60, seats=2, depth=2, chunk=7),
    "overlapped, moved beside": dict(
        pressure=lambda: Restless(6), device_blocks=40, host_blocks=40, seats=2, chunk=5, depth=2
    ),
}
# What must have happened for the case to show anything.
EXPECTED = {
    "paused at every step": Preemption.PAUSE,
    "dropped at every step": Preemption.DROP,
    "swapped at every step": Preemption.SWAP,
    "moved beside every step": Preemption.SWAP,
    "overlapped, dropped": Preemption.DROP,
    "overlapped, swapped, chunks": Preemption.SWAP,
    "overlapped, moved beside": Preemption.SWAP,
}


@cache
def outputs_alone(family: str, eos: int | None = None) -> list[list[int]]:
    """Each request's output when it has an engine of its own."""
    outputs = []
    for request in mixed_requests(eos):
        run(*engine(tiny_model(family), Recompute(), device_blocks=60), [request])
        outputs.append(request.output)
    return outputs


def outputs(requests: list[Request]) -> list[list[int]]:
    return [request.output for request in requests]


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("case", FORCED)
def test_tokens_are_those_of_a_request_alone(family: str, case: str) -> None:
    options = dict(FORCED[case])
    pressure = options.pop("pressure")()
    requests = mixed_requests()
    events = run(*engine(tiny_model(family), pressure, **options), requests)
    assert outputs(requests) == outputs_alone(family)
    happened = Counter(event.how for event in events if isinstance(event, Preempted))
    if case in EXPECTED:
        assert happened[EXPECTED[case]] > 5, happened
    if EXPECTED.get(case) is Preemption.SWAP:
        assert any(isinstance(event, Moved) for event in events)


@pytest.mark.parametrize("case", FORCED)
def test_outputs_that_end_by_a_stop_token_are_the_same(case: str) -> None:
    # A token that occurs in the middle of outputs: with overlap it is found one step late.
    alone = outputs_alone("llama")
    eos = Counter(token for output in alone for token in output[1:-1]).most_common(1)[0][0]
    expected = outputs_alone("llama", eos)
    assert any(len(short) < len(full) for short, full in zip(expected, alone, strict=True))
    options = dict(FORCED[case])
    pressure = options.pop("pressure")()
    requests = mixed_requests(eos)
    run(*engine(tiny_model("llama"), pressure, **options), requests)
    assert outputs(requests) == expected


@pytest.mark.parametrize("case", FORCED)
def test_aborts_disturb_nobody(case: str) -> None:
    alone = outputs_alone("opt")
    for abort_at in (1, 4, 9):
        options = dict(FORCED[case])
        pressure = options.pop("pressure")()
        core, executor = engine(tiny_model("opt"), pressure, **options)
        requests = mixed_requests()
        plans = 0
        start_step = core.start_step

        def start_and_abort(now: float, start_step=start_step, core=core, abort_at=abort_at):
            nonlocal plans
            plan = start_step(now)
            plans += 1
            if plans == abort_at:
                for victim in (1, 3, 6):
                    core.abort(victim, now)
            return plan

        core.start_step = start_and_abort
        run(core, executor, requests)
        for number, request in enumerate(requests):
            if number not in (1, 3, 6):
                assert request.output == alone[number]
