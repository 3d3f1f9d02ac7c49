"""Measure what forecasts cost a server: time to the first token and output tokens per second.

Two servers of the built-in model run at the same time: one with `--forecaster none`, and one with
`--forecaster learned` and a full index of 10,000 past prompts. `skipjoin bench` measures them in pairs whose order
alternates: under a light load (64 + 32 tokens) for the time to the first token, and with 128 requests at once (64 + 64
tokens) for the throughput. Prompts are random token ids. `cost_ms` has differences within pairs and `throughput_ratio`
ratios.
"""

from __future__ import annotations

import random
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).parents[level]) for level in (1, 3))
from served import serve

import harness
from servers import Skipjoin, bench
from skipjoin.config import ForecastConfig
from skipjoin.forecast import make_forecaster

ENTRIES = 10_000
LIGHT = ("--lengths", "fixed:64,32", "--rates", "6", "--duration", "15")
HEAVY = ("--lengths", "fixed:64,64", "--rates", "1000", "--requests", "128")
Record = dict[str, Any]


def fill(folder: Path) -> None:
    draw = random.Random(1)
    forecaster = make_forecaster(ForecastConfig(forecaster="learned", forecast_entries=ENTRIES), "tally")
    for _ in range(ENTRIES):
        prompt = draw.choices(range(100, 500), k=64)
        predicted = forecaster.forecast(prompt, 512)
        forecaster.learn(predicted, draw.randint(4, 500), exact=True)
    if not forecaster.save(folder):
        raise SystemExit(f"the index cannot be saved in {folder}")


def pair(servers: dict[str, Skipjoin], number: int) -> dict[str, Record]:
    names = harness.in_turn(servers, number)
    found: dict[str, Record] = {name: {} for name in names}
    for name in names:
        light = bench(servers[name], *LIGHT, "--seeds", number)["ttft_s"]
        found[name] |= {"ttft_p50_ms": 1e3 * light["p50"], "ttft_p95_ms": 1e3 * light["p95"]}
    for name in names:
        found[name]["tokens_per_s"] = bench(servers[name], *HEAVY, "--seeds", number)["throughput_tps"]
    harness.show(found)
    return found


def main() -> None:
    parser = harness.parser(__doc__, pairs=5)
    parser.add_argument("--recipe", default="alise")
    args = parser.parse_args()
    record = harness.new_record(recipe=args.recipe)
    common = ("--recipe", args.recipe)
    with harness.scratch() as folder:
        fill(folder)
        kept = ("--forecaster", "learned", "--forecast-dir", folder, "--forecast-entries", ENTRIES)
        with serve(*common, "--forecaster", "none") as without, serve(*common, *kept) as learned:
            pairs = [pair({"none": without, "learned": learned}, number) for number in range(args.pairs)]
            numbers = learned.metrics()
    costs = {
        f"cost_ms_{name}": [one["learned"][f"ttft_{name}_ms"] - one["none"][f"ttft_{name}_ms"] for one in pairs]
        for name in ("p50", "p95")
    }
    ratios = [one["learned"]["tokens_per_s"] / one["none"]["tokens_per_s"] for one in pairs]
    record |= {
        "entries": int(numbers["forecast_index_entries"]),
        **{name: round(statistics.median(values), 3) for name, values in costs.items()},
        "throughput_ratio": round(statistics.median(ratios), 3),
        "mean_forecast_ms": round(1e3 * numbers["forecast_seconds_sum"] / numbers["forecast_seconds_count"], 3),
        "late_share": round(numbers["forecasts_late_total"] / numbers["forecast_seconds_count"], 3),
        "cost_ms_p50_by_pair": [round(value, 3) for value in costs["cost_ms_p50"]],
        "throughput_ratio_by_pair": [round(value, 3) for value in ratios],
        "pairs": pairs,
    }
    harness.report(record, args.out)


if __name__ == "__main__":
    main()
