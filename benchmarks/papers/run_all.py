"""Run all simulated figures and tables of a paper's evaluation one after the other.

Figures of BROS read traces in the folder SKIPJOIN_TRACES, if it is set.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

HOME = Path(__file__).resolve().parent


def figures(*numbers: int) -> list[str]:
    return [f"figure{number:02}" for number in numbers]


# Figures and tables of each paper in order, then further ones. Some read the result of an earlier one.
NAMES = {
    "alise": [*figures(2, 5, 6, 7, 8, 9), "table3", "texts", "int8", "aging", "correlation"],
    "bros": [*figures(3, 10, 11, 12, 13, 14), "batch_size", "checks", "replacing", "limits"],
    "econoserve": [*figures(1, 2, 4, 5, 6, 9, 10, 11, 12, 13, 14, 15), "saturated", "headline", "checks", "parking"],
    "fastserve": [*figures(1, 5, 7, 8, 11, 12, 13, 14, 15), "headline", "regions", "choices"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paper", choices=NAMES)
    parser.add_argument("--only", help="some of its figures, separated by commas")
    parser.add_argument("--quick", action="store_true", help="measure one seed and every other rate")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes")
    parser.add_argument("--out", type=Path, help="folder for results (default: each figure's own folder)")
    args = parser.parse_args()
    names = NAMES[args.paper]
    chosen = names if args.only is None else [name.strip() for name in args.only.split(",")]
    if unknown := [name for name in chosen if name not in names]:
        parser.error(f"--only must be of {', '.join(names)}, got {unknown[0]!r}")
    start = time.monotonic()
    for name in chosen:
        command = [sys.executable, str(HOME / args.paper / name / "run.py"), "--jobs", str(args.jobs)]
        command += ["--quick"] if args.quick else []
        command += ["--out", str(args.out / name)] if args.out else []
        subprocess.run(command, check=True)
        print(f"{name} finished after {time.monotonic() - start:.0f} s in total", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
