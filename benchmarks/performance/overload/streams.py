"""The client: streams that are sent when they are due, and what became of each."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass

import aiohttp

# After the last request was sent, streams get so many seconds more.
DRAIN_S = 10.0
FAILED = -1
HEADERS = {"Content-Type": "application/json"}


@dataclass(slots=True)
class Outcome:
    """A request; times in seconds from the start of the load.

    due: when it was to be sent. status: of HTTP; 0: no answer has come; FAILED: the connection has failed. answered:
    when the answer was complete. first, last: when its first and its last event came; last: None where the stream did
    not come to its end.
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
        """Seconds to the first token, from the time that it was due."""
        return None if self.first is None else self.first - self.due

    def tpot(self, tokens: int) -> float | None:
        """Seconds for each of so many tokens after the first. Events are fewer: not every token has text."""
        return None if self.first is None or self.last is None else (self.last - self.first) / (tokens - 1)


async def closed_loop(url: str, bodies: Iterator[bytes], lanes: int, seconds: float) -> int:
    """How many streams end within so many seconds, of which so many are always in flight."""
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
    """Streams that arrive at random at this rate for so many seconds."""
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
    """Send one request, and note in `outcome` what becomes of it."""
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
