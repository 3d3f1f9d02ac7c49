"""Measure what a server learns of output lengths from its own traffic, and whether it keeps that.

The script serves the built-in model without a forecast index and sends chats of two kinds in random order, four at a
time: "Count from 1 to 5" and "Count from 1 to 200". For each block of 50 requests it reads from `/metrics`:

- `error_tokens`: mean absolute error of the forecasts.
- `error_octaves`: mean absolute error of their base-2 logarithms (1 is a factor of two).
- `coverage`: share of lengths in the 80 % intervals of the forecasts.

Then the server is stopped in order, and the next one gets 50 more requests.

In `varied` few prompts occur twice: a chat counts five numbers from a random start below 20, or all from there to 200,
so the prompts of both kinds resemble each other.
"""

from __future__ import annotations

import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

sys.path.extend(str(Path(__file__).parents[level]) for level in (1, 3))
from served import serve

import harness
from servers import Skipjoin

BLOCK, CLIENTS = 50, 4
Record = dict[str, Any]


def tasks(count: int, seed: int, *, varied: bool = False) -> list[str]:
    """Return prompts of the two kinds, half of each, in random order."""
    draw = random.Random(seed)
    found = []
    for number in range(count):
        first = draw.randint(1, 20) if varied else 1
        found.append(f"Count from {first} to {200 if number % 2 else first + 4}")
    draw.shuffle(found)
    return found


def send(server: Skipjoin, prompts: list[str]) -> Record:
    """Send chats, wait until the server has learned from all of them, and return the figures of their forecasts."""
    before = server.metrics()

    def ask(prompt: str) -> None:
        body = {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 900}
        httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).raise_for_status()

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(ask, prompts))
    end = time.monotonic() + 10
    while (since := server.metrics() - before)["forecasts_learned_total exact"] < len(prompts):
        if time.monotonic() > end:
            raise RuntimeError(f"the server has not learned all of {len(prompts)} outputs: {since}")
        time.sleep(0.05)
    judged = since["forecast_error_octaves_count"]
    return {
        "requests": len(prompts),
        "error_tokens": round(since["forecast_error_tokens_sum"] / judged, 2),
        "error_octaves": round(since["forecast_error_octaves_sum"] / judged, 3),
        "coverage": round(since["forecast_interval_total inside"] / judged, 3),
        "late": int(since["forecasts_late_total"]),
        "mean_forecast_ms": round(1000 * since["forecast_seconds_sum"] / since["forecast_seconds_count"], 3),
    }


def measure(requests: int, options: list[str], folder: Path) -> Record:
    """Measure the blocks of a new server, and its forecasts after a restart."""
    found: Record = {}
    with serve(*options, "--forecast-dir", folder) as server:
        found["blocks"] = learn(server, tasks(requests, seed=0))
    with serve(*options, "--forecast-dir", folder) as server:
        found["after_restart"] = send(server, tasks(BLOCK, seed=1))
    return found


def learn(server: Skipjoin, prompts: list[str]) -> list[Record]:
    blocks = []
    for first in range(0, len(prompts), BLOCK):
        blocks.append(send(server, prompts[first : first + BLOCK]))
        show("learning", blocks[-1])
    return blocks


def show(what: str, record: Record) -> None:
    error = f"{record['error_tokens']:6.1f} tokens, {record['error_octaves']:.2f} octaves"
    harness.show(f"{what:>22}: mean error {error}, {record['coverage']:.0%} covered")


def main() -> None:
    parser = harness.parser(__doc__, requests=300)
    parser.add_argument("--recipe", default="alise")
    parser.add_argument("--forecaster", default="learned")
    args = parser.parse_args()
    options = ["--recipe", args.recipe, "--forecaster", args.forecaster]
    record = harness.new_record(options=options)
    with harness.scratch() as folder:
        found = measure(args.requests, options, folder)
    for what, one in found.items():
        if what != "blocks":
            show(what, one)
    with serve(*options, "--forecast-dir", "none") as server:
        found["varied"] = learn(server, tasks(args.requests, seed=0, varied=True))
    for what in ("blocks", "varied"):
        first, last = found[what][0]["error_tokens"], found[what][-1]["error_tokens"]
        found[f"{what}_last_over_first"] = round(last / first, 3)
        harness.show(f"{what}: the error of the last {BLOCK} is {last / first:.2f} times that of the first")
    harness.write_record(record | found, args.out)


if __name__ == "__main__":
    main()
