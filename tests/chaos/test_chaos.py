from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from chaos import invariants
from chaos.catalog import COMPLETIONS, SIZE, entry
from chaos.clients import Outcome, take_event
from chaos.driver import possible_worlds, run_rounds
from chaos.faults import FAULTS
from chaos.plan import WORLDS, Ask, Round, plan
from chaos.soak import MAX_GROWTH_MIB, Memory, growth, slope, verdict

SEED = 20
# In this order the server restarts only after each kill and for the small disk.
CUT = (("plain", "kill engine"), ("plain", "kill api"), ("plain", "pause engine"), ("small disk", "full disk"))
STREAM = {"stream": True}


def cut(pairs: Sequence[tuple[str, str]]) -> list[Round]:
    possible = {world.name: world for world in possible_worlds() if not world.needs_ray}
    return [
        replace(this, block=block, world=possible[world], fault=fault, asks=this.asks[:8], late_s=0.8)
        for number, (world, fault) in enumerate(pairs)
        if world in possible
        for this, block in [(plan(SEED, number), world == "small disk")]
    ]


# Otherwise test_replica_links.py kills and pauses engines, test_server_processes.py and test_batches_killed.py kill
# servers, and test_batch_disk.py fills the disk of one.
@pytest.mark.exhaustive
def test_short_chaos_run_finds_nothing() -> None:
    found = asyncio.run(run_rounds(cut(CUT)))
    assert not found, "\n".join(found)


def test_rounds_are_deterministic() -> None:
    assert [plan(3, number) for number in range(50)] == [plan(3, number) for number in range(50)]
    rounds = [plan(3, number) for number in range(10 * len(WORLDS))]
    assert {this.world for this in rounds} == set(WORLDS)
    for world in WORLDS:
        assert {this.fault for this in rounds if this.world == world} == set(world.faults)
    assert len({str(this.asks) for this in rounds}) == len(rounds)
    assert {entry(number).path for number in range(0, SIZE, 2)} != {entry(number).path for number in range(1, SIZE, 2)}


NUMBER = next(number for number in range(SIZE) if entry(number).path == COMPLETIONS and entry(number).choices == 1)
REFERENCES = {NUMBER: {0: ("one two", "length")}}


def event(text: str, reason: str | None = None, index: int = 0) -> str:
    return json.dumps({"choices": [{"index": index, "text": text, "finish_reason": reason}]})


ERROR = json.dumps({"error": {"code": "engine_dead"}})
VALID = [event("one "), event("two", "length"), "[DONE]"]


def failures_of(events: list[str], fault: str = "none", **fields: Any) -> list[str]:
    outcome = Outcome(Ask(NUMBER, STREAM, "read", 0, 0.0), 200)
    for event in events:
        take_event(outcome, event)
    return list(invariants.answers([replace(outcome, **fields)], REFERENCES, FAULTS[fault]))


def test_valid_streams_pass() -> None:
    assert not failures_of(VALID)
    assert not failures_of([event("one "), ERROR], "kill engine")
    assert not failures_of([event("one ")], "kill api", cut="reset")
    assert not failures_of([event("one ")], has_left=True)


@pytest.mark.parametrize(
    ("events", "fault"),
    [
        ([event("one "), event("three", "length"), "[DONE]"], "none"),  # wrong tokens
        ([event("one "), event("two", "stop"), "[DONE]"], "none"),  # wrong finish reason
        ([event("one "), "[DONE]"], "none"),  # a choice without finish reason
        ([event("one "), event("two", "length"), event("", index=1), "[DONE]"], "none"),  # an extra choice
        ([*VALID, "[DONE]"], "none"),
        ([*VALID, ERROR], "kill engine"),
        ([event("one "), ERROR, ERROR], "kill engine"),
        ([event("one "), ERROR], "kill rank"),  # the fault does not explain the error
        ([event("two "), ERROR], "kill engine"),  # no prefix of the reference
        ([event("one ")], "kill engine"),  # cut off
        ([event("one two", "length"), event("!"), "[DONE]"], "none"),  # continues after the finish reason
    ],
)
def test_invalid_streams_are_detected(events: list[str], fault: str) -> None:
    assert failures_of(events, fault)


def test_mismatched_counts_are_detected() -> None:
    outcome = Outcome(Ask(NUMBER, STREAM, "read", 0, 0.0), 200, tokens=7)
    for event in VALID:
        take_event(outcome, event)
    counts = {"request_success_total/real-time/length": 1.0, "generation_tokens_total/real-time": 7.0}

    def count(**changed: float) -> list[str]:
        after = {name: value + changed.get(name.partition("/")[0], 0) for name, value in counts.items()}
        return list(invariants.metrics({}, after, [outcome], [], FAULTS["none"]))

    assert not count()
    max_hidden = 0 if "stop" not in entry(NUMBER).body else 1000
    assert count(generation_tokens_total=-1)
    assert count(generation_tokens_total=1 + max_hidden)
    assert count(request_success_total=1)
    assert count(request_success_total=-1)


def test_slope_is_median_of_pairwise_slopes() -> None:
    assert slope([(0, 1), (1, 3), (2, 5), (3, 100), (4, 9)]) == 2


def test_leaks_are_reported_and_cache_warmup_is_not() -> None:
    def measured(leak_mib: float) -> list[Memory]:
        """Return an hour of measurements in which caches fill for 12 minutes and the leak begins after 15."""
        held = [min(minute, 12) + leak_mib * max(0, minute - 15) / 45 + minute % 2 for minute in range(61)]
        return [Memory(60 * at, 20 * at, 100 + one, 130 + one) for at, one in enumerate(held)]

    assert growth(measured(0))[1] == 900
    assert abs(growth(measured(0))[0]) < 0.1
    assert abs(growth(measured(9))[0] - 9) < 0.2
    assert verdict({"api": measured(0), "engine 0": measured(MAX_GROWTH_MIB - 1)}) == 0
    assert verdict({"api": measured(0), "engine 0": measured(MAX_GROWTH_MIB + 1)}) == 1
