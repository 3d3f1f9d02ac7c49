"""Command that runs all figures of an evaluation one after the other."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path


def run_all(home: Path, text: str | None, names: Sequence[str]) -> None:
    """Parse the command line and run `run.py` in the chosen folders below `home`, in the order of `names`."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"some of {', '.join(names)}")
    parser.add_argument("--quick", action="store_true", help="measure one seed and every other rate")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes")
    parser.add_argument("--out", type=Path, help="folder for results (default: each figure's own folder)")
    args = parser.parse_args()
    chosen = names if args.only is None else [name.strip() for name in args.only.split(",")]
    if unknown := [name for name in chosen if name not in names]:
        parser.error(f"--only must be of {', '.join(names)}, got {unknown[0]!r}")
    start = time.monotonic()
    for name in chosen:
        command = [sys.executable, str(home / name / "run.py"), "--jobs", str(args.jobs)]
        command += ["--quick"] if args.quick else []
        command += ["--out", str(args.out / name)] if args.out else []
        subprocess.run(command, check=True)
        print(f"{name} finished after {time.monotonic() - start:.0f} s in total", file=sys.stderr, flush=True)
