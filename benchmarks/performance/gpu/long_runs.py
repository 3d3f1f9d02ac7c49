"""Simulate runs that are longer than those on the card, with the profile that `experiment` measured.

    python benchmarks/performance/gpu/long_runs.py [FILE] [--duration 300]

A run of half a minute ends before the queue of an overloaded system has grown, so its largest rate exceeds the
sustainable one, and more so for recipes that start many requests. This script adds the simulator's largest rates for
the duration to the record of `experiment` in FILE (default: result.json here), with all requests finished. It needs no
card.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import tempfile
from pathlib import Path

from common import HERE
from experiment import Bench, Setting, predictions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=HERE / "result.json")
    parser.add_argument("--duration", type=float, default=300.0, help="seconds of arrivals")
    args = parser.parse_args()
    result = json.loads(args.file.read_text())
    figures = result["parts"]["experiment"]["figures"]
    setting = dataclasses.replace(Setting(**figures["settings"]), duration_s=args.duration, until_s=math.inf)
    with tempfile.TemporaryDirectory(prefix="skipjoin-bench-") as scratch:
        profile = Path(scratch) / "profile.json"
        profile.write_text(json.dumps(figures["profile"]))
        bench = Bench(None, None, setting, profile)
        bench.bound_s = figures["bound_s"]
        rates = {recipe: None if rate is None else str(rate) for recipe, rate in predictions(bench).items()}
    figures["predicted_long"] = {"duration_s": args.duration, "largest_rate_rps": rates}
    args.file.write_text(json.dumps(result, indent=1) + "\n")
    for recipe, rate in rates.items():
        print(f"{recipe:20} {rate} requests/s")


if __name__ == "__main__":
    main()
