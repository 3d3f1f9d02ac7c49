"""Run one part of the GPU benchmark in this process; `run.py` starts it.

    python benchmarks/performance/gpu/part.py NAME TASK.json FILE

TASK.json has the fields of `Task`. The figures are written to FILE, including those before a failure.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from common import Figures, Task

# Module and function of each part.
PARTS = {
    "machine": ("card", "measure"),
    "decode": ("steps", "measure_decode"),
    "prefill": ("prompts", "measure_prefill"),
    "sampled": ("steps", "measure_sampled"),
    "small": ("steps", "measure_small"),
    "fp8": ("steps", "measure_fp8"),
    "mixed": ("prompts", "measure_mixed"),
    "attention": ("attention", "measure"),
    "copies": ("copies", "measure"),
    "pressure": ("serving", "measure_pressure"),
    "peers": ("peers", "measure"),
    "ranks": ("ranks", "measure"),
}


def main() -> None:
    name, task_file, into = sys.argv[1:]
    task = Task(**json.loads(Path(task_file).read_text()), into=Path(into), began=time.monotonic())
    # The log of a part that is stopped says what it did.
    faulthandler.dump_traceback_later(task.seconds)
    module, function = PARTS[name]
    measure: Callable[[Task], Figures] = getattr(importlib.import_module(module), function)
    task.keep(measure(task))


if __name__ == "__main__":
    main()
