"""Measure EconoServe on a real engine over HTTP: completion times in overload, with trained forecasts.

Real-time requests arrive at 1.2 times the capacity of `fcfs`, and four best-effort requests are in flight. A request
should complete in three times the time that it takes alone, where the paper has twice: a full batch's decode step takes
2.5 times that of a single request here. `econoserve` starts with forecasts that `skipjoin predict train` has learned
from other requests; half the words of a prompt hint at the length of its output.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from papers.econoserve.setting import SHAREGPT
from papers.engine_runs import BLIND, Alone, Comparison, Entry, compare
from skipjoin.core.request import Target
from skipjoin.workload.request import WorkloadRequest

DURATION_S, JCT_SCALE = 20.0, 3.0
PAPER = tuple(part for name, value in SHAREGPT.params.items() for part in ("--set", f"{name}={value}"))


def target(alone: Alone, job: WorkloadRequest) -> Target:
    return Target(jct_s=round(JCT_SCALE * alone.jct_s(job), 4))


COMPARISON = Comparison(
    recipes={
        **{name: (name, ()) for name in ("fcfs", "sarathi", "fastserve", "econoserve")},
        "econoserve, paper": ("econoserve", PAPER),
        "econoserve, gated": ("econoserve", ("--set", "admission=gated")),
    },
    entries={
        "fcfs, class-blind": Entry("fcfs", BLIND),
        "fcfs": Entry("fcfs"),
        "sarathi": Entry("sarathi"),
        "fastserve": Entry("fastserve"),
        "econoserve": Entry("econoserve"),
        "econoserve, paper": Entry("econoserve, paper"),
        "econoserve, gated": Entry("econoserve, gated"),
        "vllm, class-blind": Entry("vllm", BLIND),
    },
    load=1.2,
    in_flight=4,
    target=target,
    extra=("econoserve, gated",),
    learns=("econoserve", "econoserve, paper", "econoserve, gated"),
)

if __name__ == "__main__":
    compare(__file__, __doc__, COMPARISON, duration_s=DURATION_S)
