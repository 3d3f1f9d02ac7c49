"""Load client that sends each stream at its due time and records its outcome."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass

import aiohttp

# Streams have this many seconds after the last request is sent.
DRAIN_S = 10.0
FAILED = -1
HEADERS = {"Content-Type": "application/json"}


@dataclass(slots=True)
class Outcome:
    """A request, with times in seconds from the start of the load.

    Attributes:
        due: When the request should be sent.
        status: HTTP status; 0 without a response, FAILED if the connection failed.
        answered: When the response was complete.
        first: When the first event arrived.
        last: When the stream ended, or None if it did not.
    """

    due: float
    sent: float = 0.0
    status: int = 0
    answered: float | None = None
    retry_after: float = 0.0
    first: float | None = None
    last: float | None = None

    @property
    def ttft(self) -> float | None:
        """Seconds from the due time to the first token."""
        return None if self.first is None else self.first - self.due

    def tpot(self, tokens: int) -> float | None:
        """Return the seconds per token after the first; `tokens` is their number, as not every token has an event."""
        return None if self.first is None or self.last is None else (self.last - self.first) / (tokens - 1)


async def closed_loop(url: str, bodies: Iterator[bytes], lanes: int, seconds: float) -> int:
    """Keep `lanes` streams in flight for `seconds` and return the number that finished."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    done = 0

    async def lane(session: aiohttp.ClientSession) -> None:
        nonlocal done
        while loop.time() < end:
            outcome = Outcome(0.0)
            await _stream(session, url, next(bodies), outcome, 0.0)
            done += outcome.status == 200 and loop.time() <= end

    async with _session() as session:
        await asyncio.gather(*(lane(session) for _ in range(lanes)))
    return done


async def open_loop(url: str, bodies: Iterator[bytes], rate: float, seconds: float) -> list[Outcome]:
    loop, draw = asyncio.get_running_loop(), random.Random(f"{rate}")
    outcomes: list[Outcome] = []
    tasks: set[asyncio.Task[None]] = set()
    begin, due = loop.time(), 0.0
    async with _session() as session:
        while (due := due + draw.expovariate(rate)) < seconds:
            body = next(bodies)
            await asyncio.sleep(max(0.0, begin + due - loop.time()))
            outcomes.append(Outcome(due))
            task = asyncio.create_task(_stream(session, url, body, outcomes[-1], begin))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=DRAIN_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
    return outcomes


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), headers=HEADERS
    )


async def _stream(session: aiohttp.ClientSession, url: str, body: bytes, outcome: Outcome, begin: float) -> None:
    loop = asyncio.get_running_loop()
    outcome.sent = loop.time() - begin
    try:
        async with session.post(f"{url}/v1/completions", data=body) as answer:
            outcome.status = answer.status
            if answer.status == 200:
                await _read(answer, outcome, begin)
            else:
                await answer.read()
                outcome.retry_after = float(answer.headers.get("Retry-After", 0))
            outcome.answered = loop.time() - begin
    except aiohttp.ClientError:
        outcome.status = FAILED


async def _read(answer: aiohttp.ClientResponse, outcome: Outcome, begin: float) -> None:
    loop = asyncio.get_running_loop()
    latest = 0.0
    async for line in answer.content:
        if line.startswith(b"data: {"):
            latest = loop.time() - begin
            outcome.first = latest if outcome.first is None else outcome.first
        elif line.startswith(b"data: [DONE]"):
            outcome.last = latest
