"""Concurrent streams of the built-in model: their texts, and the times at which their tokens arrived."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import aiohttp

import harness

STREAMS, TOKENS = 8, 400
Streamed = tuple[str, list[float]]


async def run_streams(url: str, during: Callable[[], Awaitable[object]] | None = None) -> list[Streamed]:
    """Run greedy and seeded streams alternately, together with `during`, and return the text and times of each."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        running = asyncio.gather(*(_stream(session, url, number) for number in range(STREAMS)))
        if during is not None:
            await during()
        return await running


async def pauses(
    url: str,
    kills: int,
    kill: Callable[[random.Random], Awaitable[object]],
    pause_of: Callable[[list[Streamed]], float],
) -> dict[str, Any]:
    """Kill something at a random moment in the first half of the streams' time, repeatedly.

    Returns:
        The pauses of streams with and without a kill (`still_s`, `undisturbed_still_s`), and the number of kills after
        which all texts equal those of undisturbed streams (`same`).
    """
    draw = random.Random(1)
    await run_streams(url)
    begin = time.monotonic()
    expected = [text for text, _ in await run_streams(url)]
    undisturbed_s = time.monotonic() - begin
    undisturbed = [pause_of(await run_streams(url)) for _ in range(kills)]
    still, same = [], 0
    for _ in range(kills):

        async def kill_later() -> None:
            await asyncio.sleep(draw.uniform(0.1, 0.5) * undisturbed_s)
            await kill(draw)

        found = await run_streams(url, kill_later)
        still.append(pause_of(found))
        same += [text for text, _ in found] == expected
        harness.show(f"paused for {still[-1]:.3f} s, {same} times the same texts")
    return {
        "kills": kills,
        "streams": STREAMS,
        "tokens": TOKENS,
        "same": same,
        "undisturbed_s": round(undisturbed_s, 2),
        "undisturbed_still_s": harness.spread(undisturbed),
        "still_s": harness.spread(still),
    }


def longest_gap(times: list[float]) -> float:
    return max((later - earlier for earlier, later in pairwise(times)), default=0.0)


async def _stream(session: aiohttp.ClientSession, url: str, number: int) -> Streamed:
    body: dict[str, Any] = {"prompt": f"Count from {number + 3} to {number + 300}", "max_tokens": TOKENS}
    body |= {"stream": True, "ignore_eos": True}
    body |= {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0.0}
    text, times = "", []
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        async for line in answer.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    return f"{text} {event['error']}", times
                text += event["choices"][0]["text"]
                times.append(time.monotonic())
    return text, times
