"""Measure BROS on a real engine over HTTP: objectives of real-time requests beside best effort.

Real-time requests arrive at 0.8 of the capacity of `fcfs`, and eight best-effort requests are in flight. Objectives are
16 decode steps of a single request to the first token and 8 for each further one, as the paper's 0.4 and 0.2 s are on
OPT-13B. Class-blind clients send best-effort requests as real-time ones.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from papers.engine_runs import BLIND, PRIORITY, Alone, Comparison, Entry, compare
from skipjoin.core.request import Target
from skipjoin.workload.request import WorkloadRequest

DURATION_S = 20.0
TTFT_STEPS, TPOT_STEPS = 16, 8


def target(alone: Alone, job: WorkloadRequest) -> Target:
    return Target(ttft_s=round(TTFT_STEPS * alone.decode_s, 4), tpot_s=round(TPOT_STEPS * alone.decode_s, 4))


COMPARISON = Comparison(
    recipes={
        **{name: (name, ()) for name in ("fcfs", "sarathi", "fastserve", "bros", "bros-unshared")},
        "bros, ahead": ("bros", ("--set", "evicts=ahead")),
    },
    entries={
        "fcfs, class-blind": Entry("fcfs", BLIND),
        "fcfs": Entry("fcfs"),
        "sarathi": Entry("sarathi"),
        "fastserve": Entry("fastserve"),
        "bros": Entry("bros"),
        "bros, ahead": Entry("bros, ahead"),
        "bros-unshared": Entry("bros-unshared"),
        "vllm, class-blind": Entry("vllm", BLIND),
        "vllm, priorities": Entry("vllm-priority", PRIORITY),
    },
    load=0.8,
    in_flight=8,
    target=target,
    extra=("bros-unshared",),
)

if __name__ == "__main__":
    compare(__file__, __doc__, COMPARISON, duration_s=DURATION_S)
