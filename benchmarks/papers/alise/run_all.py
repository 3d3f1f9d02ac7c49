"""Run all simulated figures and tables of ALISE's evaluation one after the other.

python benchmarks/papers/alise/run_all.py [--quick] [--only figure06,table3] [--jobs 2] [--out FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from papers.figures.run_all import run_all

HOME = Path(__file__).resolve().parent

# Figures and tables of the paper, then further ones.
NAMES = (
    "figure02",
    "figure05",
    "figure06",
    "figure07",
    "figure08",
    "figure09",
    "table3",
    "texts",
    "int8",
    "aging",
    "correlation",
    "checks",
)

if __name__ == "__main__":
    run_all(HOME, __doc__, NAMES)
