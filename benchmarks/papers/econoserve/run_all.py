"""All figures of EconoServe's evaluation in the simulator, one after the other.

python benchmarks/papers/econoserve/run_all.py [--quick] [--only figure09,saturated] [--jobs 2] [--out FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from papers.figures.run_all import run_all

HOME = Path(__file__).resolve().parent

# Those of the paper, then those that it does not have. Figures 10 and 11 read what figure 9 wrote, and come after it.
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
    "checks",
)

if __name__ == "__main__":
    run_all(HOME, __doc__, NAMES)
