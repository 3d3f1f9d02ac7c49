from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from skipjoin.config import ConfigError
from skipjoin.sim.experiments.cell import Cell, Extent
from skipjoin.sim.experiments.simulation import run
from skipjoin.workload.prefixes import PromptParts
from skipjoin.workload.streams import parse_closed
from skipjoin.workload.traces import Trace, TraceRow, read_trace
from skipjoin.workload.workload import Replay, synthetic, with_closed
from support.simulated import CELL, SYSTEM, repeatable

LARGE = replace(SYSTEM, recipe="fcfs", kv_blocks=100_000, max_num_batched_tokens=4096)
# Conversations in which each turn has the previous one as its prefix, and requests without common prefixes.
SHARED = synthetic("uniform:8-200,4-64", "poisson", ["name=alone,lengths=fixed:64,16,share=0.3"], "128:3")


def replay(prompts: Sequence[tuple[int, tuple[int, ...]]], part: int = 32, every_s: float = 5.0) -> Replay:
    """Return a trace of prompts, each with its tokens and the names of its parts.

    Arrivals are so far apart that each request finishes before the next one arrives.
    """
    rows = (
        TraceRow(every_s * number, *one, parts=PromptParts(names, part))
        for number, (*one, names) in enumerate((tokens, 5, names) for tokens, names in prompts)
    )
    return Replay(Trace("named", tuple(rows)))


def test_prefix_hits_are_full_blocks_before_the_last_token() -> None:
    workload = replay([(70, (1, 2)), (70, (1, 2)), (64, (1, 2)), (70, (1, 3)), (70, (4, 5)), (200, (1, 2, 6, 7, 8, 9))])
    record = run(Cell(LARGE, workload, Extent(None, None, 0)))
    # The last block of the third prompt is computed, because at least one token must be.
    hits = 64 + 48 + 32 + 64
    assert record["prefix"] == {
        "queried_tokens": 544,
        "hit_tokens": hits,
        "hit_rate": pytest.approx(hits / 544, rel=1e-5),
        "hit_on_cpu_tokens": 0,
        "regained_tokens": 0,
        "saved_bytes": 0,
    }
    cold = run(Cell(replace(LARGE, enable_prefix_caching=False), workload, Extent(None, None, 0)))
    assert "prefix" not in cold
    assert record["forward"]["mean"] * record["steps"] == pytest.approx(
        cold["forward"]["mean"] * cold["steps"] - hits, rel=1e-4
    )
    assert cold["settings"]["enable_prefix_caching"] is False
    assert record["ttft_s"]["mean"] < cold["ttft_s"]["mean"]


def test_a_workload_without_prefixes_has_no_prefix_record() -> None:
    assert "prefix" not in run(CELL)


@pytest.mark.parametrize("recipe", ["bros", "econoserve", "fastserve[eviction=recompute]", "sarathi"])
def test_prefix_caching_is_deterministic_and_has_hits(recipe: str) -> None:
    system = replace(SYSTEM, recipe=recipe, kv_blocks=120, cpu_blocks=60)
    workload = with_closed(
        SHARED, [parse_closed("name=be,lengths=fixed:30,40,size=4,mode=refill,class=best-effort,prefix=64:2")]
    )
    cell = Cell(system, workload, Extent(8.0, 5.0, 0))
    record = run(cell)
    assert repeatable(record) == repeatable(run(cell))
    counts = record["requests"]
    assert counts["finished"] == counts["submitted"] - counts["rejected"]
    assert 0.2 < record["prefix"]["hit_rate"] < 0.9
    assert sum(record["breakdown_s"].values()) == pytest.approx(record["jct_s"]["mean"], rel=1e-4)


@pytest.mark.parametrize("recipe", ["fcfs", "econoserve", "fastserve"])
def test_only_prefill_replicas_use_prefixes(recipe: str) -> None:
    split = replace(SYSTEM, recipe=recipe, replicas=2, prefill_replicas=1, cpu_blocks=300)
    cell = Cell(split, SHARED, Extent(8.0, 8.0, 0))
    record = run(cell)
    queried = sum(job.prompt_tokens for job in cell.jobs() if job.parts is not None)
    prefix, roles = record["prefix"], record["roles"]
    assert record["requests"]["finished"] == len(cell.jobs())
    assert prefix["queried_tokens"] == queried
    computed = sum(job.prompt_tokens for job in cell.jobs()) - prefix["hit_tokens"]
    assert (roles["prefill"]["prompt_tokens"], roles["decode"]["prompt_tokens"]) == (computed, 0)


def test_parts_must_be_multiples_of_the_block_size() -> None:
    cell = Cell(LARGE, replay([(90, (1, 2))], part=40), Extent(None, None, 0))
    with pytest.raises(ConfigError, match="hash_tokens must be a multiple of the block size, 16, got 40"):
        cell.check()
    assert run(replace(cell, system=replace(LARGE, block_size=8)))["prefix"]["queried_tokens"] == 90
    assert run(replace(cell, system=replace(LARGE, enable_prefix_caching=False)))["requests"]["finished"] == 1


def test_conversations_go_to_replicas_that_hold_their_prefixes(tmp_path: Path) -> None:
    """The trace has `hash_ids`: three conversations of three turns in a different order each time."""
    lines = [
        {
            "timestamp": 5000 * number,
            "input_length": 70 + 64 * turn,
            "output_length": 5,
            "hash_ids": [*ids, 100 + number],
        }
        for number, (turn, ids) in enumerate((turn, [own, *range(10, 10 + turn)]) for turn, own in _TURNS)
    ]
    path = tmp_path / "mooncake.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    replicas = replace(LARGE, replicas=3)
    workload = Replay(read_trace(path, hash_tokens=64))
    records = {
        name: run(Cell(replace(replicas, dispatch=name), workload, Extent(None, None, 0)))
        for name in ("round-robin", "prefix-aware")
    }
    assert records["prefix-aware"]["prefix"]["hit_tokens"] == 3 * (64 + 128)
    assert records["round-robin"]["prefix"]["hit_tokens"] == 0
    cold = replace(replicas, enable_prefix_caching=False)
    aware, plain = (
        repeatable(run(Cell(replace(cold, dispatch=name), workload, Extent(None, None, 0))))
        for name in ("prefix-aware", "least-work")
    )
    assert aware.pop("settings") | {"dispatch": "least-work"} == plain.pop("settings")
    assert aware == plain


_TURNS = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (1, 1), (2, 3), (2, 1), (2, 2))
