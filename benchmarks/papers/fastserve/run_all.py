"""Run all figures of FastServe's evaluation one after the other.

python benchmarks/papers/fastserve/run_all.py [--quick] [--only figure11,figure12] [--jobs 2] [--out FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from papers.figures.run_all import run_all

HOME = Path(__file__).resolve().parent

if __name__ == "__main__":
    # Figure 12 reads the result of figure 11.
    run_all(
        HOME,
        __doc__,
        [*sorted(path.parent.name for path in HOME.glob("figure*/run.py")), "regions", "choices", "depth"],
    )
