"""Run all figures of EconoServe's evaluation one after the other.

python benchmarks/papers/econoserve/run_all.py [--quick] [--only figure09,saturated] [--jobs 2] [--out FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from papers.figures.run_all import run_all

HOME = Path(__file__).resolve().parent

# Figures of the paper, then further ones. Figures 10 and 11 read the result of figure 9.
NAMES = (
    "figure01",
    "figure02",
    "figure04",
    "figure05",
    "figure06",
    "figure09",
    "figure10",
    "figure11",
    "figure12",
    "figure13",
    "figure14",
    "figure15",
    "saturated",
    "headline",
    "checks",
)

if __name__ == "__main__":
    run_all(HOME, __doc__, NAMES)
