"""Time whole model steps of this source and of another commit, in turns.

Each variant is a process with its own source and the model of run.py, and sleeps while the other one runs. A turn is
`steps` steps of a shape, which include packing and greedy sampling.

- `ms`: the tenth percentile and the median of all steps. Other load only adds time, so the former is steadier.
- `cpu_ms`: processor time of the process per step, median over turns.
- `ratio`: other commit over this one, median and quartiles of the turns' medians; `ratio_p10` that of their tenth
  percentiles.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
import harness
from random_model import add_shape
from skipjoin.model.loader import random_model

sys.path.insert(0, str(Path(__file__).parent))
import run

# Decodes, the context of each, and tokens of a prompt.
STEPS = ((1, 96, 0), (4, 96, 0), (16, 96, 0), (64, 96, 0), (16, 764, 0), (0, 0, 512))


@torch.inference_mode()
def serve(shape: str, dtype: str) -> None:
    """Answer each line of standard input, a step and a number of repeats, with the times of these steps."""
    model = random_model(run.SHAPES[shape], 0, dtype)
    for line in sys.stdin:
        *one, steps = json.loads(line)
        work = run.segments(*one)
        kv = run.written_kv(model, work)
        step = run.step_of(model, work, kv)
        step()
        cpu = time.process_time()
        times = [harness.seconds_of(step) * 1e3 for _ in range(steps)]
        print(json.dumps([times, (time.process_time() - cpu) * 1e3 / steps]), flush=True)


class Variant:
    def __init__(self, source: Path, shape: str, dtype: str) -> None:
        command = [sys.executable, __file__, "--serve", "--shape", shape, "--dtype", dtype]
        environment = os.environ | {"PYTHONPATH": str(source)}
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Variant:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def run(self, shape: tuple[int, int, int], steps: int) -> tuple[list[float], float]:
        """Return the milliseconds of the steps and the processor time per step."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([*shape, steps]), file=self._process.stdin, flush=True)
        times, cpu = json.loads(self._process.stdout.readline())
        return times, cpu


def tenth(times: list[float]) -> float:
    return statistics.quantiles(times, n=10)[0]


def measure(variants: dict[str, Variant], shape: tuple[int, int, int], repeats: int, steps: int) -> dict[str, Any]:
    turns: dict[str, list[tuple[list[float], float]]] = {name: [] for name in variants}
    for turn in range(repeats):
        for name in harness.in_turn(variants, turn):
            turns[name].append(variants[name].run(shape, steps))
    found: dict[str, Any] = dict(zip(("decodes", "context", "prefill"), shape, strict=True))
    for name, each in turns.items():
        every = [ms for times, _ in each for ms in times]
        ms = {"p10": round(tenth(every), 3), "median": round(statistics.median(every), 3)}
        found[name] = {"ms": ms, "cpu_ms": round(statistics.median(cpu for _, cpu in each), 3)}
    for label, figure in (("ratio", statistics.median), ("ratio_p10", tenth)):
        ours, others = ([figure(times) for times, _ in turns[name]] for name in ("this", "other"))
        found[label] = harness.quartiles([b / a for a, b in zip(ours, others, strict=True)])
    return found


def main() -> None:
    parser = harness.parser(__doc__, repeats=10, steps=20)
    parser.add_argument("--against", help="another commit of this repository")
    parser.add_argument("--dtype", default="bfloat16")
    add_shape(parser)
    parser.add_argument("--serve", action="store_true", help="be one of the two processes")
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.shape, arguments.dtype)
        return
    if not arguments.against:
        parser.error("--against is required")
    record = harness.new_record(against=arguments.against, dtype=arguments.dtype, shape=arguments.shape, results=[])
    with harness.scratch() as folder, ExitStack() as stack:
        sources = {"this": harness.ROOT / "src", "other": harness.source_at(arguments.against, "src", folder)}
        start = partial(Variant, shape=arguments.shape, dtype=arguments.dtype)
        variants = {name: stack.enter_context(start(source)) for name, source in sources.items()}
        for one in STEPS:
            steps = max(arguments.steps // 4, 3) if one[2] else arguments.steps
            record["results"].append(measure(variants, one, arguments.repeats, steps))
            harness.show(record["results"][-1])
    harness.write_record(record, arguments.out)


if __name__ == "__main__":
    main()
