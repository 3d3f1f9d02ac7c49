from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from chaos.catalog import entry
from chaos.plan import Ask

# Seconds without data after which a request counts as hung, longer than any fault.
HANG_S = 60.0
# Seconds that a slow client waits between reads, and a stuck one before the first read.
_SLOW_S, _STUCK_S = 0.05, 2.5
_DONE = "[DONE]"


@dataclass
class Choice:
    text: str = ""
    reason: str | None = None


@dataclass
class Outcome:
    ask: Ask
    status: int | None = None
    choices: dict[int, Choice] = field(default_factory=dict)
    tokens: int = 0
    error: str | None = None
    is_done: bool = False
    cut: str | None = None
    has_left: bool = False
    wrong: str | None = None

    @property
    def is_complete(self) -> bool:
        return self.is_done and self.error is None

    @property
    def end(self) -> str:
        if self.is_complete:
            return "complete"
        return "left" if self.has_left else "cut" if self.cut is not None else str(self.error)

    def __str__(self) -> str:
        details = [("cut", self.cut), ("error", self.error), ("wrong", self.wrong), ("left", self.has_left or None)]
        text = ", ".join(f"{name}: {value}" for name, value in details if value is not None)
        received = {index: (len(choice.text), choice.reason) for index, choice in self.choices.items()}
        return f"entry {self.ask.number} ({self.ask.manner}, {self.ask.extra}) status {self.status} {received} {text}"


class Clients:
    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        self.url = url
        self.events = 0
        self.outcomes: list[Outcome] = []
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_read=HANG_S, connect=HANG_S),
            read_bufsize=1 << 15,
            headers=headers,
        )

    async def close(self) -> None:
        await self._session.close()

    async def ask(self, ask: Ask) -> Outcome:
        outcome = Outcome(ask)
        self.outcomes.append(outcome)
        await asyncio.sleep(ask.begin_s)
        try:
            async with self._session.post(self.url + entry(ask.number).path, json=ask.body) as answer:
                outcome.status = answer.status
                await self._read(outcome, answer)
        except TimeoutError:
            outcome.wrong = f"no data within {HANG_S:g} s"
        except (aiohttp.ClientError, OSError) as error:
            outcome.cut = f"{type(error).__name__}: {error}"
        return outcome

    async def _read(self, outcome: Outcome, answer: aiohttp.ClientResponse) -> None:
        if answer.status == 200 and outcome.ask.is_streamed:
            await self._read_stream(outcome, answer)
        elif outcome.ask.manner == "leave" and outcome.ask.after % 2:
            outcome.has_left = True  # after the response head
        else:
            take_whole(outcome, await answer.json())

    async def _read_stream(self, outcome: Outcome, answer: aiohttp.ClientResponse) -> None:
        ask = outcome.ask
        await asyncio.sleep(_STUCK_S if ask.manner == "stuck" else 0)
        seen = 0
        async for event in _events(answer):
            take_event(outcome, event)
            seen += 1
            self.events += 1
            if ask.manner == "slow":
                await asyncio.sleep(_SLOW_S)
            if ask.manner == "leave" and seen > ask.after:
                outcome.has_left = True
                return
        if not (outcome.is_done or outcome.error):
            outcome.wrong = "the stream ended without [DONE] and without an error"

    async def send_garbage(self, begin_s: float, data: bytes) -> None:
        """Send bytes that are no complete request, and keep the connection open for a while."""
        await asyncio.sleep(begin_s)
        address = urlsplit(self.url)
        try:
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            try:
                writer.write(data)
                await writer.drain()
                async with asyncio.timeout(1.0):
                    await reader.read()
            finally:
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError):
            return


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[str]:
    async for line in answer.content:
        if line.strip():
            yield line.decode().strip().removeprefix("data: ")


def take_event(outcome: Outcome, data: str) -> None:
    if outcome.is_done or outcome.error is not None:
        outcome.wrong = f"an event after the end: {data[:200]}"
    elif data == _DONE:
        outcome.is_done = True
        _check_complete(outcome)
    else:
        event = json.loads(data)
        if "error" in event:
            outcome.error = str(event["error"]["code"])
            return
        outcome.tokens = (event.get("usage") or {}).get("completion_tokens", outcome.tokens)
        _take_choices(outcome, event["choices"], lambda choice: choice.get("delta", choice))


def take_whole(outcome: Outcome, body: Any) -> None:
    if "error" in body:
        outcome.error = str(body["error"]["code"])
        return
    outcome.tokens = body["usage"]["completion_tokens"]
    outcome.is_done = True
    _take_choices(outcome, body["choices"], lambda choice: choice.get("message", choice))
    _check_complete(outcome)


def _take_choices(outcome: Outcome, choices: Any, part: Callable[[Any], Any]) -> None:
    """Add choices to an outcome, the text of each of which is in `part(choice)`."""
    for given in choices:
        choice = outcome.choices.setdefault(given["index"], Choice())
        if choice.reason is not None:
            outcome.wrong = f"choice {given['index']} continues after its finish reason"
        found = part(given)
        choice.text += found.get("content") or found.get("text") or ""
        choice.reason = given["finish_reason"]


def _check_complete(outcome: Outcome) -> None:
    wanted = entry(outcome.ask.number).choices
    if sorted(outcome.choices) != list(range(wanted)) or not all(choice.reason for choice in outcome.choices.values()):
        outcome.wrong = f"{wanted} choices with a finish reason each were expected"
