"""Measure how punctually the load client sends on one core, with a server that costs almost nothing.

    python benchmarks/performance/load_client/run.py [--repeats 3] [--duration 15] [--out FILE]

The server (stub.py) runs on another core and sends 32 tokens to each request, 20 ms apart. The client sends Poisson
arrivals with prompts of 161 tokens. Figures are medians over the repeats.

- `lag`: time from a request's due time until the client starts to send it, measured by the client.
- `arrived`: time from the due time of the k-th request until the k-th request has arrived, measured by the server.
- `cv`: coefficient of variation of the gaps between requests, as planned, sent and received.
- `gap`: Kolmogorov-Smirnov distance of the sent and received gaps from the planned ones.
- `cpu_share`: share of its core that the client used.
- `queued_share`: share of the time in which the client was runnable while its core ran other work.
- `tpot`: the client's median, which is 20 ms at the server.

On a shared machine other processes decide the tail. `nice -n -10` before the command gives client and server
precedence; the record notes it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from rich.progress import track

import harness
from skipjoin.loadtest.client import ClientProgress, Exchange
from skipjoin.loadtest.plan import LoadPlan
from skipjoin.loadtest.runs import measure
from skipjoin.loadtest.targets import Target
from skipjoin.observe.record import Record, percentile
from skipjoin.workload.workload import synthetic

RATES = (50.0, 100.0, 200.0, 400.0)
LENGTHS = "fixed:161,32"  # the mean prompt of ShareGPT
CLIENT_CORE, SERVER_CORE = 0, 1


class Keeper:
    """Sweep watcher that keeps the record and the exchanges of a run."""

    def begun(self, number: int, rate: float | None, seed: int) -> None:
        self.cpu_s, self.wall_s, self.queued_s = time.process_time(), time.monotonic(), queued()

    def progress(self, progress: ClientProgress) -> None:
        pass

    def done(self, record: Record, exchanges: Sequence[Exchange]) -> None:
        self.cpu_s, self.wall_s = time.process_time() - self.cpu_s, time.monotonic() - self.wall_s
        self.queued_s = queued() - self.queued_s
        self.record, self.exchanges = record, exchanges


def queued() -> float:
    """Return the seconds in which this process was runnable while its core ran something else."""
    return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9


def measure_once(rate: float, duration_s: float, seed: int) -> dict[str, float]:
    """Run the client against a new server."""
    stub = str(Path(__file__).with_name("stub.py"))
    with subprocess.Popen(
        [sys.executable, stub, str(SERVER_CORE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        target = Target(base_url=f"http://127.0.0.1:{server.stdout.readline().strip()}")
        plan = LoadPlan(
            workload=synthetic(LENGTHS, "poisson"), rates=(rate,), seeds=(seed,), duration_s=duration_s, warmup=4
        )
        keeper = Keeper()
        early = measure(target, plan, keeper)
        seen = json.loads(server.communicate()[0])[plan.warmup :]
    counts = keeper.record["requests"]
    if early or counts["finished"] != len(keeper.exchanges) or len(seen) != len(keeper.exchanges):
        raise SystemExit(f"the run failed: {early} {counts} {keeper.record['client']}")
    return figures(keeper, seen)


def figures(keeper: Keeper, seen: Sequence[float]) -> dict[str, float]:
    """Return the figures of a run; `seen` has the arrivals at the server on the monotonic clock."""
    due = [one.job.at for one in keeper.exchanges]
    sent = [one.sent for one in keeper.exchanges if one.sent is not None]
    lags = sorted(late - at for late, at in zip(sent, due, strict=True))
    # Both clocks have the same rate. The start of the run is chosen so that no arrival precedes its sending.
    start = min(arrival - late for arrival, late in zip(seen, sorted(sent), strict=True))
    arrived = sorted(arrival - start - at for arrival, at in zip(seen, due, strict=True))
    planned, left, got = (
        [later - earlier for earlier, later in pairwise(times)] for times in (due, sorted(sent), seen)
    )
    return {
        "achieved_rps": (len(seen) - 1) / (seen[-1] - seen[0]),
        "planned_rps": (len(due) - 1) / (due[-1] - due[0]),
        "lag_mean_ms": statistics.fmean(lags) * 1e3,
        "lag_p50_ms": percentile(lags, 50) * 1e3,
        "lag_p99_ms": percentile(lags, 99) * 1e3,
        "lag_max_ms": lags[-1] * 1e3,
        "arrived_p50_ms": percentile(arrived, 50) * 1e3,
        "arrived_p99_ms": percentile(arrived, 99) * 1e3,
        "cv_planned": statistics.stdev(planned) / statistics.fmean(planned),
        "cv_sent": statistics.stdev(left) / statistics.fmean(left),
        "cv_arrived": statistics.stdev(got) / statistics.fmean(got),
        "gap_sent": distance(planned, left),
        "gap_arrived": distance(planned, got),
        "cpu_share": keeper.cpu_s / keeper.wall_s,
        "queued_share": keeper.queued_s / keeper.wall_s,
        "tpot_p50_ms": keeper.record["tpot_s"]["p50"] * 1e3,
    }


def distance(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the largest difference between two empirical distribution functions."""
    one, two = sorted(first), sorted(second)
    return max(abs(bisect_right(one, at) / len(one) - bisect_right(two, at) / len(two)) for at in (*one, *two))


def main() -> None:
    parser = harness.parser(__doc__, repeats=3)
    parser.add_argument("--duration", type=float, default=15.0, help="seconds of arrivals in a run")
    args = parser.parse_args()
    conditions = {"nice": os.nice(0), "duration_s": args.duration, "repeats": args.repeats, "lengths": LENGTHS}
    record = harness.new_record(**conditions, rows=[])
    os.sched_setaffinity(0, {CLIENT_CORE})
    runs: dict[float, list[dict[str, float]]] = {rate: [] for rate in RATES}
    for seed in track(range(args.repeats), transient=True):
        for rate in RATES:
            runs[rate].append(measure_once(rate, args.duration, seed))
    for rate, found in runs.items():
        row: dict[str, object] = {"rate_rps": rate}
        row |= {name: float(f"{statistics.median(run[name] for run in found):.4g}") for name in found[0]}
        row["lag_p99_ms_by_run"] = [round(run["lag_p99_ms"], 3) for run in found]
        record["rows"].append(row)
        harness.show(row)
    harness.write_record(record, args.out)


if __name__ == "__main__":
    main()
