"""Measure steps under objectives that no request can meet, and chat during a flood of flex requests.

The script serves the built-in model. `impatient` sends the same requests in turn without and with the header
`x-slo-ttft-ms: 1`: all must finish, and a step may take at most 1.1 times as long. `flooded` measures chat at a steady
rate, in turn without and with another client that keeps 128 requests of `service_tier: flex` in flight: the P99 of the
times to the first token may be at most 1.5 times as long. `step_cpu_ms` is the engine's processor time per step, which
other work on the machine changes less than `step_ms`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from pairs import arguments, compared, ratio_of_rates, report
from served import RECIPES, Figures, bodies, chat, over_http, serving

import harness
from servers import Skipjoin

HEADER = {"x-slo-ttft-ms": "1"}
REQUESTS, LANES, PROMPTS, TOKENS = 800, 32, (100, 300), 30
RATE, FLOOD, FLOOD_LENGTHS = 4.0, 128, "uniform:50-150,80-120"
MAX_STEP, MAX_P99 = 1.1, 1.5
SETTLE_S, FLOOD_S = 2.0, 600.0


def impatient(recipe: str, pairs: int) -> Figures:
    """Measure a step without and with the header in turn; `over_http` checks that all requests finish."""
    requests = bodies(REQUESTS, PROMPTS, TOKENS)
    found = []
    with serving("--recipe", recipe, *RECIPES[recipe]) as server:
        for number in range(pairs):
            kinds: dict[str, dict[str, str]] = {"without": {}, "with": HEADER}
            found.append({name: _steps(server, requests, kinds[name]) for name in harness.in_turn(kinds, number)})
            harness.show(recipe, number, found[-1])
    return {
        name: ratio_of_rates([{kind: one[kind][name] for kind in one} for one in found], "with", "without")
        for name in found[0]["with"]
    }


def _steps(server: Skipjoin, requests: Sequence[Figures], headers: Mapping[str, str]) -> dict[str, float]:
    """Return the mean milliseconds and engine processor milliseconds of a step."""
    (engine,) = server.engines()
    begin, busy = server.metric("engine_steps_total"), sum(engine.cpu_times()[:2])
    seconds = over_http(server, requests, LANES, headers)
    time.sleep(0.5)  # metrics are at most a quarter of a second old
    steps = server.metric("engine_steps_total") - begin
    return {"step_ms": 1e3 * seconds / steps, "step_cpu_ms": 1e3 * (sum(engine.cpu_times()[:2]) - busy) / steps}


def flooded(recipe: str, pairs: int, seconds: float) -> Figures:
    found = []
    with serving("--recipe", recipe, *RECIPES[recipe]) as server:
        for number in range(pairs):
            idle = chat(server, RATE, seconds, number)
            with _flood(server, number):
                time.sleep(SETTLE_S)
                found.append({"idle": idle, "flood": chat(server, RATE, seconds, number)})
            time.sleep(SETTLE_S)
            harness.show(recipe, number, {name: one["cpu"] for name, one in found[-1].items()})
    return compared(found, "idle", "flood")


@contextmanager
def _flood(server: Skipjoin, seed: int) -> Iterator[None]:
    """Run another client that keeps flex requests in flight."""
    stream = f"name=flood,lengths={FLOOD_LENGTHS},size={FLOOD},class=best-effort,mode=refill"
    command = [str(harness.SKIPJOIN), "bench", "--base-url", server.url, "--lengths", FLOOD_LENGTHS, "--closed", stream]
    command += ["--rates", "0.001", "--duration", str(FLOOD_S), "--warmup", "0", "--seeds", str(1000 + seed)]
    client = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while server.metric("num_requests_running", **{"class": "best-effort"}) < 1:
            time.sleep(0.1)
        yield
        if client.poll() is not None:
            raise RuntimeError("the flood ended before the chat: raise FLOOD_S")
    finally:
        client.kill()
        client.wait()


def main() -> int:
    args = arguments(__doc__ or "", pairs=4, seconds=20.0, recipes=RECIPES, parts=("impatient", "flooded"))
    record = harness.new_record(rate=RATE, flood=FLOOD, objectives=RECIPES, recipes={})
    for recipe in args.recipes:
        one: Figures = {}
        holds = one["holds"] = {}
        if "impatient" in args.parts:
            one["impatient"] = impatient(recipe, args.pairs)
            ratio = one["impatient"]["step_ms"]["ratio"]["median"]
            holds[f"steps at most {MAX_STEP} times"] = ratio <= MAX_STEP
        if "flooded" in args.parts:
            one["flooded"] = flooded(recipe, args.pairs, args.seconds)
            holds[f"TTFT P99 at most {MAX_P99} times"] = one["flooded"]["pooled"]["ratio"]["p99"] <= MAX_P99
        record["recipes"][recipe] = one
    return report(record, args.out)


if __name__ == "__main__":
    sys.exit(main())
