"""What forecasts cost a server: the time to the first token, and the output per second.

    python benchmarks/papers/alise/server/latency.py [--pairs 5] [--recipe alise] [--out FILE]

Two servers of the built-in model run, one with `--forecaster none`, one with the learnt forecaster and an index that is
full: 10,000 past prompts. `skipjoin bench` measures them in turn, in pairs whose order alternates: lightly loaded for
the time to the first token, and with all requests at once for the output per second. Prompts are random token ids; they
have 64 tokens and the outputs 32, or all 128 requests at once 64 and 64. `cost_ms` are differences within pairs,
`throughput_ratio` ratios.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).parents[level]) for level in (1, 3))
from served import Served

from machine import describe_machine
from skipjoin.config import ForecastConfig
from skipjoin.forecast import make_forecaster

ENTRIES = 10_000
LIGHT = ("--lengths", "fixed:64,32", "--rates", "6", "--duration", "15")
HEAVY = ("--lengths", "fixed:64,64", "--rates", "1000", "--requests", "128")
Record = dict[str, Any]


def fill(folder: Path) -> None:
    """Let the index of the built-in model be full."""
    draw = random.Random(1)
    forecaster = make_forecaster(ForecastConfig(forecaster="learnt", forecast_entries=ENTRIES), "tally")
    for _ in range(ENTRIES):
        prompt = draw.choices(range(100, 500), k=64)
        predicted = forecaster.forecast(prompt, 512)
        forecaster.learn(predicted, draw.randint(4, 500), exact=True)
    if not forecaster.save(folder):
        raise SystemExit("the index cannot be saved")


def bench(server: Served, load: tuple[str, ...], seed: int) -> Record:
    """One run's record."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        program = str(Path(sys.executable).with_name("skipjoin"))
        command = [program, "bench", "--base-url", server.url, *load, "--seeds", str(seed), "--out", str(out)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        (record,) = json.loads(out.read_text())
    return record


def pair(servers: dict[str, Served], number: int) -> dict[str, Record]:
    """The same runs at both servers."""
    names = sorted(servers, reverse=bool(number % 2))
    found: dict[str, Record] = {name: {} for name in names}
    for name in names:
        light = bench(servers[name], LIGHT, number)["ttft_s"]
        found[name] |= {"ttft_p50_ms": 1e3 * light["p50"], "ttft_p95_ms": 1e3 * light["p95"]}
    for name in names:
        found[name]["tokens_per_s"] = bench(servers[name], HEAVY, number)["throughput_tps"]
    print(found, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--recipe", default="alise")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    common = ("--recipe", args.recipe)
    with tempfile.TemporaryDirectory(prefix="forecasts-") as folder:
        fill(Path(folder))
        kept = ("--forecaster", "learnt", "--forecast-dir", folder, "--forecast-entries", str(ENTRIES))
        with Served(*common, "--forecaster", "none") as without, Served(*common, *kept) as learnt:
            pairs = [pair({"none": without, "learnt": learnt}, number) for number in range(args.pairs)]
            numbers = learnt.numbers()
    costs = {
        f"cost_ms_{name}": [one["learnt"][f"ttft_{name}_ms"] - one["none"][f"ttft_{name}_ms"] for one in pairs]
        for name in ("p50", "p95")
    }
    ratios = [one["learnt"]["tokens_per_s"] / one["none"]["tokens_per_s"] for one in pairs]
    found: Record = {
        "machine": describe_machine(),
        "recipe": args.recipe,
        "entries": int(numbers["forecast_index_entries"]),
        **{name: round(statistics.median(values), 3) for name, values in costs.items()},
        "throughput_ratio": round(statistics.median(ratios), 3),
        "mean_forecast_ms": round(1e3 * numbers["forecast_seconds_sum"] / numbers["forecast_seconds_count"], 3),
        "late_share": round(numbers["forecasts_late_total"] / numbers["forecast_seconds_count"], 3),
        "cost_ms_p50_by_pair": [round(value, 3) for value in costs["cost_ms_p50"]],
        "throughput_ratio_by_pair": [round(value, 3) for value in ratios],
        "pairs": pairs,
    }
    print(json.dumps({name: value for name, value in found.items() if name not in ("pairs", "machine")}, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
