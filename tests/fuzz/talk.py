from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

import httptools

from fuzz.case import Answer, Case, wrong_with

# Maximum seconds until complete requests are answered, until bytes that may be incomplete are answered, and until the
# server closes a connection that it must close. The last is less than its timeout for bodies (20 s).
HANG_S, PATIENCE_S, CLOSE_S = 60.0, 1.0, 12.0


class _Reader(asyncio.Protocol):
    """Client side of a connection, which parses the answers."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.failure: str | None = None
        self.is_closed = False
        self.changed = asyncio.Event()
        self.may_write = asyncio.Event()
        self.may_write.set()
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}

    @property
    def complete(self) -> int:
        return sum(answer.is_complete for answer in self.answers)

    def pause_writing(self) -> None:
        self.may_write.clear()

    def resume_writing(self) -> None:
        self.may_write.set()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if not isinstance(error, httptools.HttpParserUpgrade):
                self.failure = f"the answer is not HTTP: {error}: {data[:200]!r}"
        self.changed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        self.may_write.set()
        self.changed.set()

    def on_message_begin(self) -> None:
        self._headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if (status := self._parser.get_status_code()) >= 200:
            self.answers.append(Answer(status, self._headers))

    def on_body(self, body: bytes) -> None:
        self.answers[-1].body += body

    def on_message_complete(self) -> None:
        if self.answers and self._parser.get_status_code() >= 200:
            self.answers[-1].is_complete = True

    async def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not condition():
                    self.changed.clear()
                    await self.changed.wait()
        return condition()


async def play(case: Case, host: str, port: int) -> list[str]:
    loop = asyncio.get_running_loop()
    transport, reader = await loop.create_connection(_Reader, host, port)
    try:
        found = await _exchange(case, transport, reader)
    finally:
        if not reader.is_closed:
            transport.abort()
    if reader.failure:
        found.append(reader.failure)
    for answer in reader.answers:
        if (failure := wrong_with(case, answer, is_last=answer is reader.answers[-1])) is not None:
            found.append(f"{failure}: {answer}")
    return found


async def _exchange(case: Case, transport: asyncio.Transport, reader: _Reader) -> list[str]:
    try:
        async with asyncio.timeout(HANG_S):
            await _send(case, transport, reader)
    except TimeoutError:
        return [f"the server reads nothing for {HANG_S:g} s"]
    if case.leaves:
        if case.leaves == "close":
            transport.close()
        return []
    begin = time.monotonic()
    if case.answers and not await reader.until(lambda: reader.complete >= case.answers or reader.is_closed, HANG_S):
        return [f"{reader.complete} answers of {case.answers} after {HANG_S:g} s"]
    if case.must_close:
        if not await reader.until(lambda: reader.is_closed, CLOSE_S):
            return [f"the connection is still open {time.monotonic() - begin:.1f} s after the last byte was sent"]
        return []
    if case.answers:
        return [] if reader.complete >= case.answers else [f"closed after {reader.complete} answers of {case.answers}"]
    if not await reader.until(lambda: reader.complete > 0 or reader.is_closed, PATIENCE_S):
        transport.write_eof()
        if not await reader.until(lambda: reader.is_closed, CLOSE_S):
            return [f"the connection is still open {CLOSE_S:g} s after the client closed it"]
    return []


async def _send(case: Case, transport: asyncio.Transport, reader: _Reader) -> None:
    for piece in case.pieces:
        await reader.may_write.wait()
        if reader.is_closed:
            return
        transport.write(piece)
        await asyncio.sleep(case.pause_s)
        if case.waits:
            await reader.until(lambda: bool(reader.answers) or reader.is_closed, HANG_S)
    if not case.leaves:
        await reader.may_write.wait()
