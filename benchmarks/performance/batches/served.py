"""`skipjoin serve` of the built-in model with batches, requests for it, and their figures."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
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

sys.path.insert(0, str(Path(__file__).parents[2]))
import harness
from servers import Skipjoin

COMPLETIONS = "/v1/completions"
START_S, BATCH_S = 120, 600
# The model gets one core; the API process and the client get the other. Prefix caching is off, because the same prompts
# are sent twice.
OPTIONS = ("--threads", "1", "--kv-cache-gib", "0.5", "--no-enable-prefix-caching")
# Objectives that a machine of this size meets, for the recipe that schedules by them.
OBJECTIVES = ("--slo-ttft-ms", "100", "--slo-tpot-ms", "50")
RECIPES = {"fastserve": (), "bros": OBJECTIVES}
# Lengths of the chat whose latency is measured.
CHAT_LENGTHS = "uniform:100-300,20-40"
QUANTILES = (50, 95, 99)
Figures = dict[str, Any]


class BatchServer(Skipjoin):
    """A server with a batch folder and an OpenAI client for it."""

    def __init__(self, folder: Path, *options: object) -> None:
        super().__init__("tally", "--batch-dir", folder, *options)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)


@contextmanager
def serving(*options: object) -> Iterator[BatchServer]:
    """Run a warmed-up server with its own batch folder."""
    with harness.scratch() as folder, BatchServer(folder, *OPTIONS, *options) as server:
        warm = {"prompt": [100] * 100, "max_tokens": 8, "service_tier": "flex"}
        httpx.post(server.url + COMPLETIONS, json=warm, timeout=START_S).raise_for_status()
        yield server


def bodies(count: int, prompts: tuple[int, int], tokens: int) -> list[dict[str, Any]]:
    """Return greedy requests; `prompts` is the range of their prompt lengths."""
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
    rows = [
        {"custom_id": str(number), "method": "POST", "url": COMPLETIONS, "body": body}
        for number, body in enumerate(requests)
    ]
    data = "\n".join(map(json.dumps, rows)).encode()
    file = client.files.create(file=("lines.jsonl", data), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")


def wait(client: openai.OpenAI, batch: Batch, status: str) -> Batch:
    end = time.monotonic() + BATCH_S
    while (batch := client.batches.retrieve(batch.id)).status != status:
        if time.monotonic() > end:
            raise RuntimeError(f"the batch is still {batch}")
        time.sleep(0.2)  # each query takes some milliseconds of the server
    return batch


def over_http(
    server: Skipjoin, requests: Sequence[dict[str, Any]], lanes: int, headers: Mapping[str, str] | None = None
) -> float:
    """Run the requests over HTTP with `lanes` in flight, and return the seconds until all have finished."""
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


def chat(server: Skipjoin, rate: float, seconds: float, seed: int) -> Figures:
    """Send chat at a steady rate together with the server's other work.

    Returns:
        Times to the first token of its real-time requests (`ttft_s`), number of steps, best-effort tokens per second,
        and the shares of a core that the server's processes used.
    """
    processes = {"api": psutil.Process(server.process.pid), "engine": server.engines()[0]}
    before, begin = _counts(server), time.monotonic()
    busy = {name: _cpu_s(one) for name, one in processes.items()}
    requests = _bench(server, rate, seconds, seed)
    took = time.monotonic() - begin
    after = _counts(server)
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


def _counts(server: Skipjoin) -> tuple[float, float]:
    """Return the best-effort tokens and the steps so far."""
    best_effort = server.metric("generation_tokens_total", **{"class": "best-effort"})
    return best_effort, server.metric("engine_steps_total")


def _bench(server: Skipjoin, rate: float, seconds: float, seed: int) -> list[dict[str, Any]]:
    with harness.scratch() as folder:
        options = ("--rates", rate, "--duration", seconds, "--seeds", seed, "--record-requests", folder / "lines")
        harness.records_of("bench", "--base-url", server.url, "--lengths", CHAT_LENGTHS, *options)
        return [json.loads(text) for text in (folder / "lines").read_text().splitlines()]


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
