"""The command that runs all figures of an evaluation, one after the other."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path


def run_all(home: Path, text: str | None, names: Sequence[str]) -> None:
    """Read the command line and run `run.py` of the folders of these names.

    home: the evaluation's folder. text: its description. names: in the order in which the folders run.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"some of {', '.join(names)}")
    parser.add_argument("--quick", action="store_true", help="one seed and fewer rates, for a first look")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--out", type=Path, help="folder for results (default: each figure's own)")
    args = parser.parse_args()
    chosen = names if args.only is None else [name.strip() for name in args.only.split(",")]
    if unknown := [name for name in chosen if name not in names]:
        parser.error(f"only: there is no {unknown[0]!r}; choose from {', '.join(names)}")
    start = time.monotonic()
    for name in chosen:
        command = [sys.executable, str(home / name / "run.py"), "--jobs", str(args.jobs)]
        command += ["--quick"] if args.quick else []
        command += ["--out", str(args.out / name)] if args.out else []
        subprocess.run(command, check=True)
        print(f"{name} is done, {time.monotonic() - start:.0f} s in all", file=sys.stderr, flush=True)
