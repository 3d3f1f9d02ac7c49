"""Measure what observers cost: output tokens per second and CPU time with consoles, with traces, and without either.

Each turn sends the requests at once to new servers of the built-in model, one per case in alternating order, and waits
for all of them. `with_consoles` has `--consoles` readers of /debug/events, and `with_traces` a collector of OTLP spans,
both in processes of their own. `without_again` repeats the first case, so that its ratio shows the noise. The target is
a median ratio of throughput of at least 0.99. CPU time is that of the server's processes per request, which noise of
the machine changes less.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import aiohttp
import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))
import harness
from servers import Skipjoin

CASES = ("without", "with_consoles", "with_traces", "without_again")
TARGET = 0.99


class Collector(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def collect(port: Any) -> None:
    """Run a collector until the process is ended, and set `port` to where it listens."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    port.value = server.server_port
    server.serve_forever()


def read_events(url: str) -> None:
    """Read the stream of one console until the process is ended."""
    with urllib.request.urlopen(f"{url}/debug/events") as stream:
        for line in stream:
            if line.startswith(b"data:"):
                json.loads(line.removeprefix(b"data:"))  # as a browser does


@contextmanager
def beside(count: int, target: Callable[[Any], None], argument: Any) -> Iterator[None]:
    processes = [multiprocessing.Process(target=target, args=(argument,), daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.terminate()


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


def cpu_s(server: Skipjoin) -> float:
    root = psutil.Process(server.process.pid)
    times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def measure(case: str, args: Any) -> tuple[float, float]:
    """Return output tokens per second, and milliseconds of CPU time per request."""
    options = ("--max-num-queued-reqs", args.requests + 16, "--max-num-queued-tokens", 1 << 20, "--threads", 1)
    options += ("--kv-cache-gib", 2)
    port = multiprocessing.Value("i", 0)
    with beside(case == "with_traces", collect, port):
        if case == "with_traces":
            while not port.value:
                time.sleep(0.01)
            options += ("--otlp-traces-endpoint", f"http://127.0.0.1:{port.value}/v1/traces")
        with Skipjoin("tally", *options) as server:
            asyncio.run(send_all(server.url, 16, 16))  # warm up
            with beside(args.consoles if case == "with_consoles" else 0, read_events, server.url):
                before = cpu_s(server)
                rate = asyncio.run(send_all(server.url, args.requests, args.tokens))
                return rate, 1000 * (cpu_s(server) - before) / args.requests


def main() -> None:
    args = harness.parser(__doc__, requests=1000, tokens=200, consoles=3, turns=5).parse_args()
    record = harness.new_record(requests=args.requests, tokens=args.tokens, consoles=args.consoles)
    runs: list[dict[str, float]] = []
    costs: list[dict[str, float]] = []
    for turn in range(args.turns):
        found = {case: measure(case, args) for case in harness.in_turn(CASES, turn)}
        runs.append({case: round(rate, 1) for case, (rate, _) in found.items()})
        costs.append({case: round(cost, 3) for case, (_, cost) in found.items()})
        harness.show(turn, runs[-1], costs[-1])
    baseline = [run["without"] for run in runs]
    ratios = {case: harness.median_ratio((run[case] for run in runs), baseline) for case in CASES[1:]}
    more = {case: [cost[case] - cost["without"] for cost in costs] for case in CASES[1:]}
    record |= {
        "tokens_per_s": harness.spreads(runs),
        "to_without": ratios,
        "cpu_ms_per_request": harness.spreads(costs),
        "cpu_ms_more": {case: round(statistics.median(found), 3) for case, found in more.items()},
        "met": min(ratios["with_consoles"], ratios["with_traces"]) >= TARGET,
    }
    harness.report(record, args.out)


if __name__ == "__main__":
    main()
