"""`skipjoin serve` of the built-in model with batches, chat for it, and what either says of itself."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import openai
import psutil
from openai.types import Batch

PROGRAM = str(Path(sys.executable).with_name("skipjoin"))
COMPLETIONS = "/v1/completions"
START_S, BATCH_S = 120, 600
# The model gets one core: the other one is for the server's other process and for the client.
# The same prompts are sent in turn without and with a batch: what is cached of the first time would flatter the second.
OPTIONS = ("--threads", "1", "--kv-cache-gib", "0.5", "--no-enable-prefix-caching")
# Objectives that this size of a machine can keep, for the recipe that plans by them.
OBJECTIVES = ("--slo-ttft-ms", "100", "--slo-tpot-ms", "50")
RECIPES = {"fastserve": (), "bros": OBJECTIVES}
# The chat that is to notice nothing.
CHAT_LENGTHS = "uniform:100-300,20-40"
QUANTILES = (50, 95, 99)
Figures = dict[str, Any]


class Server:
    """The server, from the time that it is ready. Its batches are in a folder that may have some already."""

    def __init__(self, folder: Path, *options: str) -> None:
        command = [PROGRAM, "serve", "--port", "0", "--batch-dir", str(folder), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        found = re.search(r" at (\S+) ", self.process.stdout.readline())
        if found is None:
            raise RuntimeError("the server did not start")
        self.url = found[1]
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def engine(self) -> psutil.Process:
        """The engine's process."""
        (engine,) = [
            child for child in psutil.Process(self.process.pid).children() if "engine" in " ".join(child.cmdline())
        ]
        return engine

    def kill(self, victim: str) -> None:
        """End one of its processes at once, and wait for the other."""
        engine = self.engine()
        if victim == "api":
            self.process.kill()
        else:
            engine.kill()
            self.process.terminate()  # it would tell so for a while
        self.process.wait(START_S)
        psutil.wait_procs([engine], START_S)

    def metric(self, name: str) -> float:
        """A sample of `/metrics`. name: with its labels, if it has some, as spelled there."""
        text = httpx.get(f"{self.url}/metrics").text
        return float(re.search(rf"^skipjoin:{re.escape(name)} (\S+)", text, re.MULTILINE)[1])  # type: ignore[index]

    def stop(self) -> None:
        """End it in order."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(START_S)


@contextmanager
def serving(*options: str) -> Iterator[Server]:
    """A server with a folder of its own, which is warm."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), *OPTIONS, *options)
        try:
            warm = {"prompt": [100] * 100, "max_tokens": 8, "service_tier": "flex"}
            httpx.post(server.url + COMPLETIONS, json=warm, timeout=START_S).raise_for_status()
            yield server
        finally:
            server.stop()


def bodies(count: int, prompts: tuple[int, int], tokens: int) -> list[dict[str, Any]]:
    """Greedy requests of known lengths. prompts: least and most tokens."""
    draw = random.Random(17)
    return [
        {
            "prompt": draw.choices(range(100, 500), k=draw.randint(*prompts)),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        for _ in range(count)
    ]


def submit(client: openai.OpenAI, requests: Sequence[dict[str, Any]]) -> Batch:
    """A batch of these requests; its custom_ids are their numbers, from 0."""
    rows = [
        {"custom_id": str(number), "method": "POST", "url": COMPLETIONS, "body": body}
        for number, body in enumerate(requests)
    ]
    data = "\n".join(map(json.dumps, rows)).encode()
    file = client.files.create(file=("lines.jsonl", data), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")


def wait(client: openai.OpenAI, batch: Batch, status: str) -> Batch:
    """The batch in this state."""
    end = time.monotonic() + BATCH_S
    while (batch := client.batches.retrieve(batch.id)).status != status:
        if time.monotonic() > end:
            raise RuntimeError(f"the batch is still {batch}")
        time.sleep(0.2)  # a question takes some milliseconds of the server
    return batch


def over_http(
    server: Server, requests: Sequence[dict[str, Any]], lanes: int, headers: Mapping[str, str] | None = None
) -> float:
    """Seconds until all are answered in full, of which so many are in flight."""
    return asyncio.run(_over_http(server.url, list(requests), lanes, headers or {}))


async def _over_http(url: str, waiting: list[dict[str, Any]], lanes: int, headers: Mapping[str, str]) -> float:
    async def lane(client: aiohttp.ClientSession) -> None:
        while waiting:
            asked = waiting.pop()
            async with client.post(url + COMPLETIONS, json=asked) as answer:
                found = await answer.json()
                if answer.status != 200 or found["usage"]["completion_tokens"] != asked["max_tokens"]:
                    raise RuntimeError(f"a request has failed: {found}")

    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout()
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as client:
        begin = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for _ in range(lanes):
                group.create_task(lane(client))
        return time.monotonic() - begin


def chat(server: Server, rate: float, seconds: float, seed: int, *options: str) -> Figures:
    """Chat at a steady rate beside whatever else the server does: times to the first token of its real-time requests
    (`ttft_s`), the seconds of a step, best-effort tokens per second, and the shares of a core that the server's
    processes took. options: further ones of `skipjoin bench`."""
    best_effort, steps = 'generation_tokens_total{class="best-effort"}', "engine_steps_total"
    processes = {"api": psutil.Process(server.process.pid), "engine": server.engine()}
    before, begin = (server.metric(best_effort), server.metric(steps)), time.monotonic()
    busy = {name: _cpu_s(one) for name, one in processes.items()}
    requests = _bench(server, rate, seconds, seed, *options)
    took = time.monotonic() - begin
    after = (server.metric(best_effort), server.metric(steps))
    real_time = [one for one in requests if one["service"] == "real-time"]
    return {
        "ttft_s": [one["first_token_s"] - one["due_s"] for one in real_time if one["first_token_s"] is not None],
        "requests": len(requests),
        "unfinished": sum(one["error"] is not None for one in requests),
        "steps": after[1] - before[1],
        "best_effort_tokens_per_s": (after[0] - before[0]) / took,
        "cpu": {name: round((_cpu_s(one) - busy[name]) / took, 2) for name, one in processes.items()},
        "load_1min": os.getloadavg()[0],
    }


def _bench(server: Server, rate: float, seconds: float, seed: int, *options: str) -> list[dict[str, Any]]:
    """The lines of --record-requests of one run of `skipjoin bench`."""
    with tempfile.TemporaryDirectory() as folder:
        record, out = Path(folder, "requests.jsonl"), Path(folder, "out.json")
        command = [PROGRAM, "bench", "--base-url", server.url, "--lengths", CHAT_LENGTHS]
        command += ["--rates", str(rate), "--duration", str(seconds), "--seeds", str(seed), *options]
        command += ["--record-requests", str(record), "--out", str(out)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return [json.loads(text) for text in record.read_text().splitlines()]


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
