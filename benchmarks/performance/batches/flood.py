"""Objectives that nothing can keep, and a flood of flex requests beside chat.

    python benchmarks/performance/batches/flood.py [--recipes fastserve,bros] [--parts impatient,flooded] [--pairs 4]
        [--seconds 20] [--out FILE]

Serves the built-in model. For each recipe the same requests are sent without and with the header `x-slo-ttft-ms: 1`, so
many at once, in turn: all have to finish, and a step may not get longer. Then chat at a steady rate is measured
without and with another client that keeps so many requests of `service_tier: flex` in flight, in turn.

Wanted: steps of at most 1.1 times; a TTFT P99 of at most 1.5 times that without the flood. `step_cpu_ms` is the
processor's time of the engine for a step, which other work on the machine changes less than `step_ms`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from pairs import arguments, compared, ratio_of_rates, report
from served import PROGRAM, RECIPES, Figures, Server, bodies, chat, over_http, serving

HEADER = {"x-slo-ttft-ms": "1"}
REQUESTS, LANES, PROMPTS, TOKENS = 800, 32, (100, 300), 30
RATE, SEATS, FLOOD_LENGTHS = 4.0, 128, "uniform:50-150,80-120"
MOST_STEP, MOST_P99 = 1.1, 1.5
SETTLE_S, FLOOD_S = 2.0, 600.0


def impatient(recipe: str, pairs: int) -> Figures:
    """The seconds of a step without and with the header, in turn. `over_http` checks that all finish."""
    requests = bodies(REQUESTS, PROMPTS, TOKENS)
    found = []
    with serving("--recipe", recipe, *RECIPES[recipe]) as server:
        for number in range(pairs):
            kinds: dict[str, dict[str, str]] = {"without": {}, "with": HEADER}
            names = sorted(kinds, reverse=bool(number % 2))
            found.append({name: _steps(server, requests, kinds[name]) for name in names})
            print(recipe, number, found[-1], flush=True)
    return {
        name: ratio_of_rates([{kind: one[kind][name] for kind in one} for one in found], "with", "without")
        for name in found[0]["with"]
    }


def _steps(server: Server, requests: Sequence[Figures], headers: Mapping[str, str]) -> dict[str, float]:
    """The mean step of these requests: milliseconds, and those of the engine's processor."""
    engine = server.engine()
    begin, busy = server.metric("engine_steps_total"), sum(engine.cpu_times()[:2])
    seconds = over_http(server, requests, LANES, headers)
    time.sleep(0.5)  # metrics are a quarter of a second old at most
    steps = server.metric("engine_steps_total") - begin
    return {"step_ms": 1e3 * seconds / steps, "step_cpu_ms": 1e3 * (sum(engine.cpu_times()[:2]) - busy) / steps}


def flooded(recipe: str, pairs: int, seconds: float) -> Figures:
    """Chat without and with a flood, in turn."""
    found = []
    with serving("--recipe", recipe, *RECIPES[recipe]) as server:
        for number in range(pairs):
            idle = chat(server, RATE, seconds, number)
            with _flood(server, number):
                time.sleep(SETTLE_S)
                found.append({"idle": idle, "flood": chat(server, RATE, seconds, number)})
            time.sleep(SETTLE_S)
            print(recipe, number, {name: one["cpu"] for name, one in found[-1].items()}, flush=True)
    return compared(found, "idle", "flood")


@contextmanager
def _flood(server: Server, seed: int) -> Iterator[None]:
    """Flex requests of another client, which goes on until it is ended."""
    stream = f"name=flood,lengths={FLOOD_LENGTHS},size={SEATS},class=best-effort,mode=refill"
    command = [PROGRAM, "bench", "--base-url", server.url, "--lengths", FLOOD_LENGTHS, "--closed", stream]
    command += ["--rates", "0.001", "--duration", str(FLOOD_S), "--warmup", "0", "--seeds", str(1000 + seed)]
    client = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while server.metric('num_requests_running{class="best-effort"}') < 1:
            time.sleep(0.1)
        yield
        if client.poll() is not None:
            raise RuntimeError("the flood ended before chat did")
    finally:
        client.kill()
        client.wait()


def main() -> int:
    """1 if a criterion does not hold."""
    args = arguments(__doc__ or "", pairs=4, seconds=20.0, recipes=RECIPES, parts=("impatient", "flooded"))
    found: Figures = {}
    for recipe in args.recipes:
        one: Figures = {}
        holds = one["holds"] = {}
        if "impatient" in args.parts:
            one["impatient"] = impatient(recipe, args.pairs)
            ratio = one["impatient"]["step_ms"]["ratio"]["median"]
            holds[f"steps at most {MOST_STEP} times"] = ratio <= MOST_STEP
        if "flooded" in args.parts:
            one["flooded"] = flooded(recipe, args.pairs, args.seconds)
            holds[f"TTFT P99 at most {MOST_P99} times"] = one["flooded"]["pooled"]["ratio"]["p99"] <= MOST_P99
        found[recipe] = one
    return report({"rate": RATE, "seats": SEATS, "objectives": RECIPES, "recipes": found}, args.out)


if __name__ == "__main__":
    sys.exit(main())
