"""What a connection may take: time to send, time to read, a descriptor. On real sockets, over a small application."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from server_worlds import StartServer
from starlette.types import Receive, Scope, Send

from skipjoin.server.api.http import PER_ENGINE, RESERVED, SPARE, ConnectionLimits, HttpServer, listen, room_for

pytestmark = pytest.mark.anyio
HEAD = b"POST /x HTTP/1.1\r\nHost: localhost\r\n"
GET = b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
MB = 1 << 20


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}  # as in a server


class World:
    """A server whose application reads the body and answers with `size` bytes. ended: how many of them, of answers that
    are over. refused: connections that it refused, by why."""

    def __init__(self, size: int = 2) -> None:
        self.size = size
        self.ended: list[int] = []
        self.refused = Counter[str]()
        self._writers: list[asyncio.StreamWriter] = []
        self.hold = asyncio.Event()
        self.hold.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        while (message := await receive())["type"] == "http.request" and message["more_body"]:
            pass
        if scope["path"] != "/health":
            await self.hold.wait()
        given = 0
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while given < self.size:
            await send({"type": "http.response.body", "body": b"x" * min(MB, self.size), "more_body": True})
            given += MB
        await send({"type": "http.response.body"})
        self.ended.append(given)

    @contextlib.asynccontextmanager
    async def serve(self, **limits: float) -> AsyncIterator[World]:
        with listen("127.0.0.1", 0) as listener:
            bounds = ConnectionLimits(max_header_bytes=1000, **limits)  # type: ignore[arg-type]
            server = HttpServer(self, bounds, lambda reason: self.refused.update([reason]))
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            self.port = listener.getsockname()[1]
            self.connections = server.server_state.connections
            try:
                yield self
            finally:
                for writer in self._writers:
                    writer.transport.abort()
                server.should_exit = server.force_exit = True
                await serving

    async def connect(self, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._writers.append(writer)
        writer.write(data)
        return reader, writer

    async def answer(self, data: bytes) -> bytes:
        """What comes until the server closes."""
        reader, _ = await self.connect(data)
        with contextlib.suppress(ConnectionError):
            return await asyncio.wait_for(reader.read(), 10)
        return b""


def error_of(answer: bytes) -> tuple[bytes, str]:
    return answer[9:12], json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["message"]


async def until(holds: object) -> None:
    async with asyncio.timeout(10):
        while not holds():  # type: ignore[operator]
            await asyncio.sleep(0.01)


async def test_silence_and_slow_heads_and_bodies_are_ended() -> None:
    async with World().serve(head_s=0.2, body_s=0.2, body_bytes_per_s=1000) as world:
        begun = HEAD + b"Content-Length: 100\r\n\r\nabc"
        silent, head, body = await asyncio.gather(*(world.answer(data) for data in (b"", HEAD, begun)))
        assert silent == b""
        assert error_of(head) == (b"408", "the request's head must be complete within 0.2 s")
        assert error_of(body)[0] == b"408"
        assert "the body must be complete within 0.2 s and a second more for each 1000 bytes" in error_of(body)[1]
        assert not world.connections
        assert world.refused == {"late": 3}


async def test_a_trickle_is_ended_and_a_steady_body_is_not() -> None:
    async with World().serve(body_s=1.0, body_bytes_per_s=4000) as world:

        async def send(piece: bytes) -> bytes:
            reader, writer = await world.connect(HEAD + b"Connection: close\r\nContent-Length: 4000\r\n\r\n")
            status = asyncio.create_task(reader.readline())
            for _ in range(4000 // len(piece)):
                if status.done():
                    break
                writer.write(piece)
                await asyncio.sleep(0.05)
            return await status

        steady, trickle = await asyncio.gather(send(b"x" * 250), send(b"x"))
        assert steady.startswith(b"HTTP/1.1 200")
        assert trickle.startswith(b"HTTP/1.1 408")


async def test_time_in_which_the_server_works_does_not_count() -> None:
    async with World().serve(head_s=0.1, body_s=0.1) as world:
        world.hold.clear()
        reader, writer = await world.connect(GET)
        await asyncio.sleep(0.2)
        writer.write(b"GET /")
        await asyncio.sleep(0.2)
        world.hold.set()
        assert (await reader.readuntil(b"0\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert b"408" in await reader.read()


async def test_a_client_that_does_not_read_is_disconnected() -> None:
    async with World(64 * MB).serve(write_s=0.3) as world:
        _, writer = await world.connect(GET)
        writer.transport.pause_reading()
        await until(lambda: world.ended)
        assert not world.connections
        assert world.refused == {"slow_reader": 1}


async def test_a_client_that_reads_slowly_gets_all() -> None:
    async with World(8 * MB).serve(write_s=0.6) as world:
        reader, _ = await world.connect(GET)
        got = 0
        while got < 8 * MB:
            got += len(await reader.read(1 << 18))
            await asyncio.sleep(0.03)
        assert world.connections


async def test_idle_connections_make_way_for_new_ones() -> None:
    async with World().serve(max_connections=4) as world:
        for _ in range(20):
            await world.connect()
        for data in (GET, HEALTH):
            reader, _ = await world.connect(data)
            assert (await reader.readuntil(b"0\r\n\r\n")).startswith(b"HTTP/1.1 200")
        await until(lambda: len(world.connections) == 4)
        assert world.refused == {"idle": 18}


async def test_health_has_room_where_all_connections_are_busy() -> None:
    async with World().serve(max_connections=4) as world:
        world.hold.clear()
        busy = [await world.connect(GET) for _ in range(4)]
        await until(lambda: len(world.connections) == 4)
        status, text = error_of(await world.answer(GET))
        assert (status, text) == (b"503", "this server has no room for another connection")
        assert (await world.answer(HEALTH)).startswith(b"HTTP/1.1 200")
        for _ in range(2 * SPARE):
            await world.connect()
        assert (await world.answer(HEALTH)).startswith(b"HTTP/1.1 200")
        assert len(world.connections) <= 4 + SPARE
        assert world.refused["no_room"] == 1
        assert await world.answer(b"this is not HTTP\r\n\r\n")
        assert world.refused["invalid"] == 1
        world.hold.set()
        for reader, _ in busy:
            assert (await reader.readuntil(b"0\r\n\r\n")).startswith(b"HTTP/1.1 200")


def test_connections_leave_descriptors_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = (256, 512)
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    raised = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: raised.append(pair))
    others = SPARE + RESERVED + 2 * PER_ENGINE
    assert room_for(100, engines=2) == 100
    assert not raised
    assert room_for(300, engines=2) == 300
    assert room_for(4096, engines=2) == 512 - others
    assert raised == [(300 + others, 512), (512, 512)]


async def test_300_idle_connections_do_not_silence_a_server_with_256_descriptors(start_server: StartServer) -> None:
    server = start_server(descriptors=256)
    host, port = server.url.removeprefix("http://").split(":")
    idle = [await asyncio.open_connection(host, int(port)) for _ in range(300)]
    for _ in range(3):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(HEALTH)
        assert (await asyncio.wait_for(reader.readline(), 10)).startswith(b"HTTP/1.1 200")
        writer.close()
    assert server.api.num_fds() < 256
    for _, writer in idle:
        writer.close()
