"""Run all figures of BROS's evaluation one after the other.

SKIPJOIN_TRACES=FOLDER python benchmarks/papers/bros/run_all.py [--quick] [--only figure10,checks] [--jobs 2]
    [--out FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from papers.figures.run_all import run_all

HOME = Path(__file__).resolve().parent

# Figures of the paper, then further ones. Figure 11 reads the result of figure 10.
NAMES = (
    "figure03",
    "figure10",
    "figure11",
    "figure12",
    "figure13",
    "figure14",
    "batch_size",
    "checks",
    "replacing",
    "limits",
)

if __name__ == "__main__":
    run_all(HOME, __doc__, NAMES)
