"""Measure what consoles cost: output tokens per second with a thousand requests in the server, with and without them.

    python benchmarks/performance/console/run.py [--requests 1000] [--tokens 200] [--consoles 3] [--out FILE]

Each turn sends the requests at once to a new server of the built-in model and waits for all of them: without a console
and with `--consoles` readers of /debug/events in another process, in alternating order. `without_again` repeats the
first case in the same turn, so that its ratio shows the noise. The target is a median ratio of at least 0.99.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[2]))
import harness
from servers import Skipjoin

CASES = ("without", "with_consoles", "without_again")
TARGET = 0.99


def read_events(url: str) -> None:
    """Read the stream of one console until the process is ended."""
    with urllib.request.urlopen(f"{url}/debug/events") as stream:
        for line in stream:
            if line.startswith(b"data:"):
                json.loads(line.removeprefix(b"data:"))  # as a browser does


async def send_all(url: str, requests: int, tokens: int) -> float:
    """Send the requests at once, and return output tokens per second."""
    body = {"prompt": "Count from 3 to 12", "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def send() -> int:
            async with session.post(f"{url}/v1/completions", json=body) as response:
                return int((await response.json())["usage"]["completion_tokens"])

        begin = time.perf_counter()
        generated = await asyncio.gather(*(send() for _ in range(requests)))
    return sum(generated) / (time.perf_counter() - begin)


def measure(case: str, args: Any) -> float:
    options = ("--max-num-queued-reqs", args.requests + 16, "--max-num-queued-tokens", 1 << 20, "--threads", 1)
    options += ("--kv-cache-gib", 2)
    with Skipjoin("tally", *options) as server:
        asyncio.run(send_all(server.url, 16, 16))  # warm up
        consoles = [
            multiprocessing.Process(target=read_events, args=(server.url,), daemon=True)
            for _ in range(args.consoles if case == "with_consoles" else 0)
        ]
        for console in consoles:
            console.start()
        try:
            return asyncio.run(send_all(server.url, args.requests, args.tokens))
        finally:
            for console in consoles:
                console.terminate()


def main() -> None:
    args = harness.parser(__doc__, requests=1000, tokens=200, consoles=3, turns=5).parse_args()
    record = harness.new_record(requests=args.requests, tokens=args.tokens, consoles=args.consoles)
    runs: list[dict[str, float]] = []
    for turn in range(args.turns):
        runs.append({case: round(measure(case, args), 1) for case in harness.in_turn(CASES, turn)})
        harness.show(turn, runs[-1])
    baseline = [run["without"] for run in runs]
    ratio = harness.median_ratio((run["with_consoles"] for run in runs), baseline)
    record |= {
        "tokens_per_s": harness.spreads(runs),
        "with_consoles_to_without": ratio,
        "without_again_to_without": harness.median_ratio((run["without_again"] for run in runs), baseline),
        "met": ratio >= TARGET,
    }
    harness.report(record, args.out)


if __name__ == "__main__":
    main()
