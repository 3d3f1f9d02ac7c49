"""Measure the throughput of replicas, and the pauses of streams when one is killed.

- `rates` (simulator): the largest arrival rate at which the mean normalized latency stays within 0.3 s per token, for
  one replica and for two with each dispatch rule. ShareGPT lengths, OPT-13B on A100s with 11 GiB of KV, three seeds.
  Target: two replicas reach at least 1.8 times the rate of one.
- `latencies` (simulator): four replicas at 0.9 of four times the `fcfs` rate of one, five seeds, the same arrivals for
  each rule. Target: least work beats round robin, although it learns lengths from finished requests.
- `kills`: two engines of the built-in model on this machine with `fcfs` and eight streams, greedy and seeded ones
  alternately. One engine is killed (SIGKILL) at a random moment in the first half of their time. `still_s` is the
  longest time that any stream went without a token, `undisturbed_still_s` the same without a kill, and `whole_again_s`
  the time until two engines run again. `same` counts the kills after which all texts equal those of undisturbed
  streams.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[2]))
import harness
from servers import Skipjoin
from skipjoin.observe.record import Record
from skipjoin.policies.dispatch import DISPATCH_RULES
from skipjoin.report.bound import maximum_rate, parse_bound
from skipjoin.sim.experiments.cell import Cell, Extent
from skipjoin.sim.experiments.machines import Machine
from skipjoin.sim.experiments.sweep import Grid, RateSearch, sweep
from skipjoin.sim.experiments.system import System
from skipjoin.workload.workload import synthetic
from token_streams import Streamed, longest_gap, pauses

PARTS = ("rates", "latencies", "kills")
BOUND = parse_bound("normalized_latency_s.mean<=0.3")
RECIPES = "fcfs,fastserve"
DURATION_S = 100.0
START_RPS = 3.0  # where the search of one replica begins
WORKLOAD = synthetic("sharegpt", "poisson")


class Records:
    """The records of a sweep by (recipe, replicas, rule)."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, int, str | None], list[Record]] = {}

    def begun(self, number: int, cell: Cell) -> None:
        pass

    def share(self, number: int, share: float) -> None:
        pass

    def done(self, number: int, record: Record) -> None:
        settings = record["settings"]
        key = (record["recipe"], settings["replicas"], settings["dispatch"])
        self.found.setdefault(key, []).append(record)
        print(*key, record["workload"]["rate_rps"], BOUND.value(record), file=sys.stderr, flush=True)


def systems() -> list[System]:
    return Machine(hardware="a100-40gb", model="opt-13b", kv_gib=11).systems(RECIPES)


def cells(system: System, rate: float, seeds: int) -> list[Cell]:
    return [Cell(system, WORKLOAD, Extent(rate, DURATION_S, seed)) for seed in range(seeds)]


def measure_rates() -> list[dict[str, Any]]:
    records, plans = Records(), []
    for system in systems():
        plans.append(RateSearch(cells(system, START_RPS, 3), BOUND))
        for rule in DISPATCH_RULES:
            plans.append(RateSearch(cells(replace(system, replicas=2, dispatch=rule), 2 * START_RPS, 3), BOUND))
    sweep(plans, os.cpu_count() or 1, records)
    best: dict[tuple[str, int, str | None], float] = {}
    for key, found in records.found.items():
        by_rate: dict[float, list[Record]] = {}
        for record in found:
            by_rate.setdefault(record["workload"]["rate_rps"], []).append(record)
        maximum = maximum_rate(by_rate, BOUND)
        assert maximum is not None
        best[key] = maximum.rate_rps
    results = []
    for (recipe, replicas, rule), rate in sorted(best.items(), key=lambda item: (item[0][:2], item[0][2] or "")):
        times = rate / best[recipe, 1, None]
        results.append(
            {
                "recipe": recipe,
                "replicas": replicas,
                "dispatch": rule,
                "rate_rps": round(rate, 3),
                "times": round(times, 3),
            }
        )
        harness.show(results[-1])
    return results


def measure_latencies(rates: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Measure four replicas near the limit of `fcfs`; `rates` is the result of `measure_rates`."""
    (alone,) = [entry["rate_rps"] for entry in rates if entry["replicas"] == 1 and entry["recipe"] == "fcfs"]
    rate = round(0.9 * 4 * alone, 3)
    records, plans = Records(), []
    for system in systems():
        for rule in DISPATCH_RULES:
            plans.append(Grid(cells(replace(system, replicas=4, dispatch=rule), rate, 5)))
    sweep(plans, os.cpu_count() or 1, records)
    results = []
    for (recipe, _, rule), found in sorted(records.found.items()):
        by_seed = sorted(found, key=lambda record: record["workload"]["seed"])
        result: dict[str, Any] = {"recipe": recipe, "dispatch": rule, "rate_rps": by_seed[0]["workload"]["rate_rps"]}
        for name in ("normalized_latency_s", "ttft_s"):
            for figure in ("mean", "p95"):
                result[f"{name}.{figure}"] = [round(record[name][figure], 4) for record in by_seed]
        results.append(result)
        harness.show(result)
    return results


# Under `fcfs` no request is preempted for another, so every pause is due to the kill.
OPTIONS = ("--profile", "off", "--kv-cache-gib", 0.1, "--threads", 1, "--dtype", "float32", "--recipe", "fcfs")


async def alive(session: aiohttp.ClientSession, server: Skipjoin) -> int:
    """Return the number of replicas that take requests."""
    async with session.get(f"{server.url}/health") as answer:
        return int((await answer.json())["replicas_alive"])


async def until(server: Skipjoin, count: int, pause_s: float) -> None:
    """Wait until `count` replicas take requests."""
    async with aiohttp.ClientSession() as session:
        while await alive(session, server) != count:
            await asyncio.sleep(pause_s)


async def measure_kills(server: Skipjoin, kills: int) -> dict[str, Any]:
    """Measure the pauses of streams when one of two engines is killed."""
    await until(server, 2, 0.02)
    again: list[float] = []

    async def kill(draw: random.Random) -> None:
        server.engines()[draw.randrange(2)].kill()
        begin = time.monotonic()
        await until(server, 1, 0.001)
        await until(server, 2, 0.02)
        again.append(time.monotonic() - begin)

    return await pauses(server.url, kills, kill, pause_of) | {"whole_again_s": harness.spread(again, 1)}


def pause_of(found: list[Streamed]) -> float:
    """Return the longest time that any stream went without a token."""
    return max(longest_gap(times) for _, times in found)


def main() -> None:
    parser = harness.parser(__doc__, kills=12)
    parser.add_argument(
        "--parts", type=harness.some_of("parts", PARTS), default=PARTS, help="the file keeps its other parts"
    )
    arguments = parser.parse_args()
    record = {"bound": str(BOUND), "duration_s": DURATION_S} | harness.read_record(arguments.out)
    if "kills" in arguments.parts:  # the simulator's figures do not depend on the machine
        record |= harness.new_record()
    if "rates" in arguments.parts:
        record["rates"] = measure_rates()
    if "latencies" in arguments.parts:
        record["latencies"] = measure_latencies(record["rates"])
    if "kills" in arguments.parts:
        with Skipjoin("tally", "--replicas", 2, *OPTIONS) as server:
            record["kills"] = asyncio.run(measure_kills(server, arguments.kills))
    harness.report(record, arguments.out)


if __name__ == "__main__":
    main()
