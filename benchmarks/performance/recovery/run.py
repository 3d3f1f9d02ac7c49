"""The pause of streams when a rank is killed, and whether a token is lost, repeated or changed.

    python benchmarks/performance/recovery/run.py [--kills 20] [--out FILE]

Serves the built-in model with several ranks, runs eight streams, greedy and seeded ones alternately, and kills one of
the ranks (SIGKILL) at a random moment in the first half of their time. `gap_s` is the longest time in which no stream
gets a token, for each kill; `same` is whether all texts equal those of undisturbed streams.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))
from machine import describe_machine

STREAMS, TOKENS = 8, 400
SIZES = ((2, 1), (1, 2), (2, 2))
URL = "http://127.0.0.1:{port}/v1/completions"


class Server:
    """`skipjoin serve` with so many ranks."""

    def __init__(self, tp: int, pp: int, port: int) -> None:
        options = ["--profile", "off", "--kv-cache-gib", "0.1", "--threads", "1", "--dtype", "float32"]
        ranks = ["--tensor-parallel-size", str(tp), "--pipeline-parallel-size", str(pp), "--max-restarts", "1000"]
        command = [str(Path(sys.executable).with_name("skipjoin")), "serve", "--port", str(port), *options, *ranks]
        self.url = URL.format(port=port)
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._health = self.url.replace("/v1/completions", "/health")

    async def wait(self) -> None:
        async with aiohttp.ClientSession() as session:
            while True:
                try:
                    async with session.get(self._health) as answer:
                        if answer.status == 200:
                            return
                except aiohttp.ClientError:
                    pass
                if self._process.poll() is not None:
                    raise RuntimeError("the server did not start")
                await asyncio.sleep(0.1)

    def ranks(self) -> list[psutil.Process]:
        """Their processes, oldest first."""
        found = [one for one in psutil.Process(self._process.pid).children(recursive=True) if "RankActor" in one.name()]
        return sorted(found, key=lambda one: one.create_time())

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)


async def stream(session: aiohttp.ClientSession, url: str, number: int, times: list[float]) -> str:
    """One stream's text. times: of all streams' tokens."""
    body: dict[str, Any] = {"prompt": f"Count from {number + 3} to {number + 300}", "max_tokens": TOKENS}
    body |= {"stream": True, "ignore_eos": True}
    body |= {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0.0}
    text = ""
    async with session.post(url, json=body) as answer:
        async for line in answer.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    return f"{text} {event['error']}"
                text += event["choices"][0]["text"]
                times.append(time.monotonic())
    return text


async def streams(server: Server, kill_after: float | None, victim: int) -> tuple[list[str], list[float]]:
    """The texts of all streams, and when tokens came."""
    times: list[float] = []
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        running = asyncio.gather(*(stream(session, server.url, number, times) for number in range(STREAMS)))
        if kill_after is not None:
            await asyncio.sleep(kill_after)
            ranks = server.ranks()
            ranks[victim % len(ranks)].kill()
        return await running, sorted(times)


async def measure(tp: int, pp: int, kills: int, port: int) -> dict[str, Any]:
    draw = random.Random(1)
    server = Server(tp, pp, port)
    try:
        await server.wait()
        await streams(server, None, 0)
        begin = time.monotonic()
        expected, _ = await streams(server, None, 0)
        usual = time.monotonic() - begin
        gaps, same = [], []
        for _ in range(kills):
            texts, times = await streams(server, draw.uniform(0.1, 0.5) * usual, draw.randrange(tp * pp))
            gaps.append(max(later - earlier for earlier, later in itertools.pairwise(times)))
            same.append(texts == expected)
            print(f"TP {tp} x PP {pp}: {gaps[-1]:.2f} s, {'same' if same[-1] else 'OTHER'} texts", flush=True)
    finally:
        server.close()
    return {
        "tp": tp,
        "pp": pp,
        "kills": kills,
        "same": sum(same),
        "undisturbed_s": round(usual, 2),
        "gap_s": [round(gap, 2) for gap in gaps],
        "gap_median_s": round(statistics.median(gaps), 2),
        "gap_most_s": round(max(gaps), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--port", type=int, default=8917)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = {"machine": describe_machine(), "streams": STREAMS, "tokens": TOKENS}
    found["sizes"] = [asyncio.run(measure(tp, pp, args.kills, args.port)) for tp, pp in SIZES]
    text = json.dumps(found, indent=1)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
