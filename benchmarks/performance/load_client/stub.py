"""OpenAI-compatible server without a model that sends one token to every request each 20 ms.

    python stub.py CORE

The server is pinned to the core. It prints its port, serves until its input ends, and then prints a JSON array with the
arrival times of all completion requests in seconds on the monotonic clock. As in an engine, the tokens of all streams
are sent together, once per step.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from typing import cast

import uvloop

STEP_S = 0.02
MODEL = b'{"object":"list","data":[{"id":"stub","object":"model","max_model_len":4096}]}'
TOKEN = b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","created":1700000000,"model":"stub","choices":[{"index":0,"text":" hello","logprobs":null,"finish_reason":null}],"usage":null,"object":"text_completion"}\n\n'  # noqa: E501
START = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """Return a chunk of a chunked HTTP response."""
    return b"%x\r\n%s\r\n" % (len(data), data)


TOKEN_CHUNK = chunk(TOKEN)


def last_chunks(tokens: int) -> bytes:
    """Return the last token, the usage and the end of a stream."""
    usage = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1}
    tail = b'data: {"choices":[],"usage":%s}\n\ndata: [DONE]\n\n' % json.dumps(usage).encode()
    return chunk(TOKEN.replace(b'"finish_reason":null', b'"finish_reason":"length"') + tail) + b"0\r\n\r\n"


class Connection(asyncio.Protocol):
    """Connection with one request at a time."""

    def __init__(self, live: dict[Connection, int], arrivals: list[float]) -> None:
        self._live = live
        self._arrivals = arrivals
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._live.pop(self, None)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        self._data += data
        head, end, body = self._data.partition(b"\r\n\r\n")
        if not end:
            return
        if head.startswith(b"GET"):
            self._data = b""
            self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(MODEL), MODEL))
            return
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        if len(body) < length:
            return
        self._data = b""
        self._arrivals.append(now)
        self.tokens = json.loads(body)["max_tokens"]
        self.transport.write(START)
        self._live[self] = self.tokens


async def steps(live: dict[Connection, int]) -> None:
    """Send a token to every stream in each step."""
    due = time.monotonic()
    while True:
        due += STEP_S
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        for connection, left in list(live.items()):
            if left > 1:
                live[connection] = left - 1
                connection.transport.write(TOKEN_CHUNK)
            else:
                del live[connection]
                connection.transport.write(last_chunks(connection.tokens))


async def main() -> None:
    live: dict[Connection, int] = {}
    arrivals: list[float] = []
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(live, arrivals), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    stepping = asyncio.create_task(steps(live))
    await loop.run_in_executor(None, sys.stdin.read)
    stepping.cancel()
    print(json.dumps(arrivals), flush=True)


if __name__ == "__main__":
    os.sched_setaffinity(0, {int(sys.argv[1])})
    gc.freeze()
    gc.disable()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
