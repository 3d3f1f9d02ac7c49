"""Cells of the arena: lengths, system, load, forecasts, seed. Half of the seeds and three length sets are held out."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice, product
from pathlib import Path
from typing import Any

from skipjoin.sim.experiments.machines import Machine
from skipjoin.sim.experiments.system import System
from skipjoin.workload.arrivals import parse_arrivals
from skipjoin.workload.traces import read_trace
from skipjoin.workload.workload import Replay, Synthetic, Workload, synthetic

# Lengths of the main stream and of further ones.
LENGTHS: dict[str, tuple[str, tuple[str, ...]]] = {
    "sharegpt": ("sharegpt", ()),
    "lmsys": ("lmsys", ()),
    "equal": ("fixed:128,256", ()),
    "near": ("uniform:32-512,200-400", ()),
    "two-kinds": ("uniform:64-192,16-48", ("name=long,lengths=uniform:64-192,600-1000,share=0.25",)),
    "alpaca": ("alpaca", ()),
    "bookcorpus": ("bookcorpus", ()),
    "heavy-tail": (
        "uniform:32-512,8-64",
        (
            "name=middle,lengths=uniform:32-512,100-400,share=0.12",
            "name=long,lengths=uniform:32-512,900-1500,share=0.03",
        ),
    ),
}  # fmt: skip
HELD_OUT = ("alpaca", "bookcorpus", "heavy-tail")
TUNED = tuple(name for name in LENGTHS if name not in HELD_OUT)
TUNING_SEEDS, FINAL_SEEDS = (0, 1, 2), (3, 4, 5)
LOADS = (1.3, 0.9, 2.0, 1.15, 1.6, 0.7)
PREDICTORS = ("prior", "regress:.3", "regress:.6", "regress:.8", "oracle")
# Arguments of `Machine`, and the number of slots.
SYSTEMS: dict[str, tuple[dict[str, object], int]] = {
    "13b, 11 GiB, 256 slots": ({"model": "opt-13b", "hardware": "a100-40gb", "kv_gib": 11.0}, 256),
    "13b, 11 GiB, 16 slots": ({"model": "opt-13b", "hardware": "a100-40gb", "kv_gib": 11.0}, 16),
    "13b, 45 GiB, 64 slots": ({"model": "opt-13b", "hardware": "a100-80gb", "kv_gib": 45.0}, 64),
    "66b, 40 GiB, 256 slots": ({"model": "opt-66b", "hardware": "a100-40gb:tp8", "kv_gib": 40.0}, 256),
    "8b, 4 GiB, 128 slots": ({"model": "llama-3-8b", "hardware": "a100-40gb", "kv_gib": 4.0}, 128),
}
FIRST = "13b, 11 GiB, 256 slots"
FEW_SLOTS = "13b, 11 GiB, 16 slots"
# How requests come: differences from Poisson arrivals of one class without objectives.
TRAFFIC: dict[str, dict[str, Any]] = {
    "steady": {},
    "bursts": {"arrivals": "burst:5,0.1,20"},
    "classes": {"best_effort": 0.3},
    "objectives": {"slo_scale": 5.0},
}
# Number of final cells: about five of each system, and three of each set of lengths.
FINAL_CELLS = 24
# Seconds of arrivals. Shorter runs hide what aging does.
DURATION_S, QUICK_S = 400.0, 60.0
# Texts with measured lengths, for learned forecasts.
TEXTS = ("alpaca_vicuna7b_lengths", "sharegpt_text")
# Environment variable that names the folder of the texts, which are not in the repository.
TRACES = "SKIPJOIN_TRACES"
# Environment variable that names a file of `skipjoin profile`, and the system with its costs.
PROFILE = "SKIPJOIN_ARENA_PROFILE"
PROFILED = "profile, 0.25 GiB, 32 slots"
if PROFILE in os.environ:
    SYSTEMS[PROFILED] = ({"hardware": os.environ[PROFILE], "kv_gib": 0.25}, 32)


@dataclass(frozen=True, slots=True)
class ArenaCell:
    """A cell. Its rate is `load` times the capacity of `fcfs` with these lengths on this system."""

    lengths: str
    system: str
    load: float
    seed: int
    predictor: str = "prior"
    arrivals: str = "poisson"
    best_effort: float = 0.0
    slo_scale: float | None = None
    duration_s: float = DURATION_S

    @property
    def name(self) -> str:
        parts = [self.lengths, self.system, f"load {self.load:g}", self.predictor, f"seed {self.seed}"]
        parts += [self.arrivals] * (self.arrivals != "poisson")
        parts += [f"best effort {self.best_effort:g}"] * (self.best_effort > 0)
        parts += [] if self.slo_scale is None else [f"objectives {self.slo_scale:g}"]
        return ", ".join([*parts, f"{self.duration_s:g} s"])

    @property
    def is_final(self) -> bool:
        return self.lengths in HELD_OUT or self.seed in FINAL_SEEDS

    @property
    def max_tps(self) -> float:
        """Tokens per second that the system does not exceed."""
        return 20_000.0

    def workload(self) -> Workload:
        if self.lengths in TEXTS:
            trace = read_trace(Path(os.environ[TRACES]) / f"{self.lengths}.jsonl.gz")
            return Replay(trace, arrivals=parse_arrivals(self.arrivals))
        main, streams = LENGTHS[self.lengths]
        made: Synthetic = synthetic(main, self.arrivals, streams)
        return replace(made, best_effort=self.best_effort) if self.best_effort else made

    def system_of(self, recipe: str) -> System:
        machine, slots = SYSTEMS[self.system]
        (found,) = Machine(**machine).systems(  # type: ignore[arg-type]
            recipe, predictor=self.predictor, max_num_seqs=slots
        )
        return found

    def saturated(self) -> ArenaCell:
        """Return the cell whose capacity scales the load of this one: with its lengths, on its system."""
        return ArenaCell(self.lengths, self.system, load=0.0, seed=0, duration_s=0.0)


def full(*, final: bool) -> Iterator[ArenaCell]:
    """Yield the cells for tuning or those held out for the final run, those that tell most first.

    The tuning half begins with plain cells: all its lengths, with many and with few slots, above and below capacity.
    Further cells cover each pair of levels of two factors. The final half covers what `FINAL_CELLS` can.
    """
    lengths = (*HELD_OUT, *TUNED) if final else TUNED
    seeds = FINAL_SEEDS if final else TUNING_SEEDS
    plain = [*product((1.3, 0.9), (FIRST, FEW_SLOTS), lengths), (2.0, FIRST, "sharegpt"), (2.0, FIRST, "lmsys")]
    begun = [] if final else [(name, system, load, "prior", "steady", seeds[0]) for load, system, name in plain]
    systems = tuple(name for name in SYSTEMS if name != PROFILED)
    factors = (lengths, systems, LOADS, PREDICTORS, tuple(TRAFFIC), seeds)
    for name, system, load, predictor, traffic, seed in islice(
        covering(factors, begun), FINAL_CELLS if final else None
    ):
        yield ArenaCell(name, system, load, seed, predictor, **TRAFFIC[traffic])
    if TRACES in os.environ:
        for name, predictor in product(TEXTS, ("prior", "learned")):
            yield ArenaCell(name, FIRST, 1.15, seeds[0], predictor)
    if PROFILED in SYSTEMS:
        for load, name in product((0.9, 1.3), lengths[:2]):
            yield ArenaCell(name, PROFILED, load, seeds[0])


def covering(factors: Sequence[Sequence[Any]], begun: Iterable[Sequence[Any]] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield rows with a level of each factor, until each pair of levels of two factors is in a row.

    Each row begins with the pair of the rarest levels that no row has yet. Further levels are those that add most new
    pairs, and among equals the rarest.

    Args:
        begun: First rows.
    """
    missing = dict.fromkeys(
        ((one, level), (other, beside))
        for (one, levels), (other, others) in combinations(enumerate(factors), 2)
        for level, beside in product(levels, others)
    )
    used: Counter[tuple[int, Any]] = Counter()

    def note(row: Sequence[Any]) -> tuple[Any, ...]:
        used.update(enumerate(row))
        for pair in combinations(enumerate(row), 2):
            missing.pop(pair, None)
        return tuple(row)

    yield from map(note, begun)
    while missing:
        row = dict(min(missing, key=lambda pair: sum(used[one] for one in pair)))
        for factor, levels in sorted(enumerate(factors), key=lambda one: -len(one[1])):
            if factor in row:
                continue

            def gain(level: Any, factor: int = factor, row: dict[int, Any] = row) -> tuple[int, int]:
                added = sum(tuple(sorted([(factor, level), other])) in missing for other in row.items())
                return added, -used[factor, level]

            row[factor] = max(levels, key=gain)
        yield note([row[factor] for factor in range(len(factors))])


def quick() -> Iterator[ArenaCell]:
    """Yield six cells that show each regime in about three minutes on a busy core."""
    for name, system, load in (
        ("equal", FIRST, 1.3),
        ("sharegpt", FIRST, 1.6),
        ("two-kinds", FIRST, 1.3),
        ("near", FEW_SLOTS, 1.3),
        ("sharegpt", FEW_SLOTS, 1.3),
    ):
        yield ArenaCell(name, system, load, 0, duration_s=QUICK_S)
    yield ArenaCell("sharegpt", FIRST, 1.6, 0, "regress:.6", duration_s=QUICK_S)
