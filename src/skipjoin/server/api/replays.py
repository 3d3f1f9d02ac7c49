from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import msgspec
from pydantic import Field

from skipjoin.routes import SERVER_SENT
from skipjoin.server.api.errors import ApiError, bad_request
from skipjoin.server.api.fields import Body
from skipjoin.server.api.responses import encode

PROGRAM = (sys.executable, "-m", "skipjoin.replay")
# One line of the program. A result has some kilobytes.
_MAX_LINE = 1 << 20
_MAX_RECIPES = 16


class ReplayBody(Body):
    recipes: list[str] = Field(min_length=1, max_length=_MAX_RECIPES)
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_blocks: int | None = None
    since_s: float = Field(3600.0, ge=1, le=3600)


class Replays:
    """Runs the simulator, and ends it with the client or the server."""

    def __init__(self, program: Sequence[str] = PROGRAM) -> None:
        self._program = program
        self._process: asyncio.subprocess.Process | None = None
        self._is_busy = False
        self._is_closed = False

    def close(self) -> None:
        self._is_closed = True
        self._kill()

    async def events(self, question: bytes) -> AsyncGenerator[bytes, None]:
        """Yield `progress` events, then `result` or `failed`. Raise 503 if one runs already."""
        if self._is_busy or self._is_closed:
            raise ApiError(503, "a simulation runs already: wait for its end, or cancel it", code="replay_is_running")
        self._is_busy = True
        try:
            is_first = True
            async for name, data in self._lines(question):
                if name == "failed" and is_first:
                    raise bad_request(data["message"], code="replay_refused")
                is_first = False
                yield SERVER_SENT.frame(encode(data), name)
        finally:
            self._kill()
            self._is_busy = False

    async def _lines(self, question: bytes) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
        process = self._process = await asyncio.create_subprocess_exec(
            *self._program,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_MAX_LINE,
            start_new_session=True,  # so that Ctrl-C is handled by the server alone
        )
        assert process.stdin is not None
        assert process.stdout is not None
        writing = asyncio.create_task(_write(process.stdin, question))
        try:
            while line := await process.stdout.readline():
                found = msgspec.json.decode(line)
                if "result" in found:
                    yield "result", found["result"]
                    return
                if "error" in found:
                    yield "failed", {"message": found["error"]}
                    return
                yield "progress", found
            code = await process.wait()
            yield ("failed", {"message": f"the simulator ended without a result (code {code}); see the server's log"})
        finally:
            writing.cancel()

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        self._process = None


def question_of(load: Mapping[str, Any], body: ReplayBody) -> bytes:
    limits = body.model_dump(include={"max_num_seqs", "max_num_batched_tokens", "kv_blocks"})
    return encode({"found": load, "recipes": body.recipes, "limits": limits})


async def _write(stream: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        stream.write(data)
        await stream.drain()
        stream.close()
