"""Compare `adaptive` with the best of the other recipes in hindsight where prompts are the load, in the simulator.

    python benchmarks/arena/prompts.py --jobs 2            # the tuning half; continues where it stopped
    python benchmarks/arena/prompts.py --final --jobs 2    # the held-out half

Qwen3-8B on an H100, 256 slots, 120 s of arrivals:

- `two-prompts`: 85 % of 256 and 15 % of 16,384 tokens, 128 tokens of output, as in SGLang's issue 32911.
- `four-prompts`: 128, 512, 2,048 and 8,192 tokens, 128 of output.
- `agents`: 128 to 384 tokens after one of 32 common prefixes of 4,864, 95 % of the prompt; 32 to 256 of output.
- `retrieval`: 4,096 to 12,288 tokens, 16 to 64 of output.
- `mooncake`, `servegen`: lengths of traces in the folder `SKIPJOIN_TRACES`, prompts of Mooncake at a quarter of their
  length. Without the folder, these cells are skipped.

The load is relative to the capacity of `fcfs`. The other recipes are those of the papers and the rivals `hrrn` and
`shortest-prefill`, which order by uncached tokens.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import harness
from arena.figures import OURS, PAPERS, PROMPT_GOALS, SHORTEST_PREFILL, cell_line, summary, table
from arena.grid import TRACES, ArenaCell
from arena.run import HOME, Arena
from skipjoin.sim.experiments.machines import Machine
from skipjoin.sim.experiments.system import System
from skipjoin.workload.workload import Workload, synthetic

# Lengths of the main stream, further streams, and the prefix of the main one.
LENGTHS: dict[str, tuple[str, tuple[str, ...], str | None]] = {
    "two-prompts": ("fixed:256,128", ("name=long,lengths=fixed:16384,128,share=0.15",), None),
    "four-prompts": (
        "fixed:128,128",
        tuple(f"name=p{tokens},lengths=fixed:{tokens},128,share=0.25" for tokens in (512, 2048, 8192)),
        None,
    ),
    "agents": ("uniform:128-384,32-256", (), "4864:32"),
    "retrieval": ("uniform:4096-12288,16-64", (), None),
}
# Trace and scale of its prompts and outputs.
TRACED = {"mooncake": ("mooncake_conversation.csv", "*0.25,1"), "servegen": ("servegen_m_large_1h.csv.gz", "")}
TUNED_LOADS, FINAL_LOADS = (0.9, 1.3), (0.8, 1.1, 1.6)
OTHERS = (*PAPERS, "hrrn", SHORTEST_PREFILL)
DURATION_S = 120.0


class PromptCell(ArenaCell):
    def workload(self) -> Workload:
        if self.lengths in TRACED:
            name, scale = TRACED[self.lengths]
            return synthetic(f"trace:{Path(os.environ[TRACES]) / name}{scale}", self.arrivals)
        lengths, streams, prefix = LENGTHS[self.lengths]
        return synthetic(lengths, self.arrivals, streams, prefix)

    def system_of(self, recipe: str) -> System:
        machine = Machine(model="qwen3-8b", hardware="h100-80gb")
        (found,) = machine.systems(recipe, predictor=self.predictor, max_num_seqs=256)
        return found

    @property
    def max_tps(self) -> float:
        return 12_000.0 if self.lengths in TRACED else 5_000.0

    def saturated(self) -> ArenaCell:
        return replace(self, load=0.0, seed=0, duration_s=0.0)


def cells(*, final: bool) -> Iterator[PromptCell]:
    """Yield a cell for each set of lengths and load; the held-out half has other seeds, and two of its three loads."""
    names = [*LENGTHS, *(TRACED if TRACES in os.environ else ())]
    for number, name in enumerate(names):
        for at in range(2):
            load = FINAL_LOADS[(number + at) % 3] if final else TUNED_LOADS[at]
            yield PromptCell(name, "qwen3-8b, h100", load, 3 + at if final else 0, duration_s=DURATION_S)


class PromptArena(Arena):
    def write(self) -> None:
        record = harness.new_record(summary=self.summary(), capacities=self.capacities, cells=self.cells)
        harness.write_record(record, self._out)

    def summary(self) -> Mapping[str, Mapping[str, Any]]:
        return summary(self.cells, (*PAPERS, "hrrn"), metrics=PROMPT_GOALS)


def main() -> None:
    parser = harness.parser(__doc__, jobs=2)
    parser.add_argument("--final", action="store_true", help="run the held-out cells")
    parser.add_argument("--match", default="", help="run only cells whose name contains this text")
    parser.add_argument("--recipes", type=harness.some_of("recipes", (*OTHERS, OURS)), default=(*OTHERS, OURS))
    args = parser.parse_args()
    arena = PromptArena(args.out or HOME / ("prompts_final.json" if args.final else "prompts.json"), args.jobs)
    arena.run([cell for cell in cells(final=args.final) if args.match in cell.name], args.recipes)
    harness.show(*(f"{cell_line(name, one['recipes'])}\n" for name, one in arena.cells.items()))
    harness.show(*(f"{line}\n" for line in table(arena.summary(), PROMPT_GOALS)))


if __name__ == "__main__":
    main()
