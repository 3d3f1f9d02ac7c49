"""Limits of connections: timeouts for reading and writing, and their number. Uses real sockets and a small app."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence

import aiohttp
import httptools
import pytest
from starlette.types import Receive, Scope, Send

from skipjoin.server.api import connections
from skipjoin.server.api.auth import AccessGuard
from skipjoin.server.api.connections import SPARE, ConnectionLimits
from skipjoin.server.api.http import HttpServer
from skipjoin.server.listeners import listen
from support.waiting import until

pytestmark = pytest.mark.anyio
HEAD = b"POST /x HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
GET = b"GET /x HTTP/1.1\r\nHost: localhost\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
MB = 1 << 20


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}  # as the server does


class World:
    """Server whose application reads the body, except for `/early`, and answers with `size` bytes."""

    def __init__(self, size: int = 2, *, keys: Sequence[str] = (), proxies: Sequence[str] = ()) -> None:
        self.size = size
        self.app = AccessGuard(self._answer, api_keys=keys, max_header_bytes=1000, max_body_bytes=MB)
        self.proxies = proxies
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""
        self.started = 0
        self.finished: list[int] = []
        self.refused = Counter[str]()
        self._writers: list[asyncio.StreamWriter] = []
        self.hold = asyncio.Event()
        self.hold.set()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.started += 1
        body = b""
        while scope["path"] != "/early" and (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
        self.headers, self.body = list(scope["headers"]), body
        if scope["path"] not in ("/health", "/early"):
            await self.hold.wait()
        sent = 0
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while sent < self.size:
            await send({"type": "http.response.body", "body": b"x" * min(MB, self.size), "more_body": True})
            sent += MB
        await send({"type": "http.response.body"})
        self.finished.append(sent)

    @contextlib.asynccontextmanager
    async def serve(self, **limits: float) -> AsyncIterator[World]:
        with listen("127.0.0.1", 0) as listener:
            connection_limits = ConnectionLimits(max_header_bytes=1000, **limits)  # type: ignore[arg-type]
            server = HttpServer(self.app, connection_limits, lambda reason: self.refused.update([reason]), self.proxies)
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

    async def connect(
        self, data: bytes = b"", address: str = "127.0.0.1"
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(address, 0))
        self._writers.append(writer)
        writer.write(data)
        return reader, writer

    async def answer(self, data: bytes) -> bytes:
        """Send data and return everything received until the server closes the connection."""
        reader, _ = await self.connect(data)
        with contextlib.suppress(ConnectionError):
            return await asyncio.wait_for(reader.read(), 10)
        return b""


def error_of(answer: bytes) -> tuple[bytes, str]:
    return answer[9:12], json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["message"]


async def ok(stream: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> bytes:
    """Read the next answer, check that it is 200 and return its head."""
    head = await asyncio.wait_for(stream[0].readuntil(b"\r\n\r\n"), 30)
    assert head.startswith(b"HTTP/1.1 200"), head
    await asyncio.wait_for(stream[0].readuntil(b"0\r\n\r\n"), 30)
    return head


async def is_closed(stream: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> bool:
    with contextlib.suppress(ConnectionError):
        return await asyncio.wait_for(stream[0].read(), 30) == b""
    return True


async def test_slow_heads_and_bodies_time_out() -> None:
    async with World().serve(head_s=0.2, body_s=0.2, body_bytes_per_s=1000) as world:
        incomplete = HEAD + b"Content-Length: 100\r\n\r\nabc"
        silent, head, body = await asyncio.gather(*(world.answer(data) for data in (b"", HEAD, incomplete)))
        assert silent == b""
        assert error_of(head) == (b"408", "the request's head must be complete within 0.2 s")
        assert error_of(body)[0] == b"408"
        assert "the body must be complete within 0.2 s and a second more for each 1000 bytes" in error_of(body)[1]
        assert not world.connections
        assert world.refused == {"late": 3}


async def test_trickled_body_times_out_and_steady_body_does_not() -> None:
    async with World().serve(body_s=1.0, body_bytes_per_s=4000) as world:

        async def send(part: bytes) -> bytes:
            reader, writer = await world.connect(HEAD + b"Connection: close\r\nContent-Length: 4000\r\n\r\n")
            status = asyncio.create_task(reader.readline())
            for _ in range(4000 // len(part)):
                if status.done():
                    break
                writer.write(part)
                await asyncio.sleep(0.05)
            return await status

        steady, trickle = await asyncio.gather(send(b"x" * 250), send(b"x"))
        assert steady.startswith(b"HTTP/1.1 200")
        assert trickle.startswith(b"HTTP/1.1 408")


async def test_read_timeouts_pause_while_server_answers() -> None:
    async with World().serve(head_s=0.1, body_s=0.1) as world:
        world.hold.clear()
        reader, writer = await world.connect(GET)
        await asyncio.sleep(0.2)
        writer.write(b"GET /")
        await asyncio.sleep(0.2)
        world.hold.set()
        assert (await reader.readuntil(b"0\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert b"408" in await reader.read()


async def test_client_that_does_not_read_is_disconnected() -> None:
    async with World(64 * MB).serve(write_s=0.3) as world:
        _, writer = await world.connect(GET)
        writer.transport.pause_reading()
        await until(lambda: world.finished)
        assert not world.connections
        assert world.refused == {"slow_reader": 1}


async def test_slow_reader_gets_whole_response() -> None:
    async with World(8 * MB).serve(write_s=0.6) as world:
        reader, _ = await world.connect(GET)
        got = 0
        while got < 8 * MB:
            got += len(await reader.read(1 << 18))
            await asyncio.sleep(0.03)
        assert world.connections


async def test_progress_hidden_by_kernel_buffers_does_not_disconnect() -> None:
    """The kernel buffers megabytes, and reports progress when a third of them are read."""
    async with World(16 * MB).serve(write_s=4) as world:
        reader, _ = await world.connect(GET)
        loop, got = asyncio.get_running_loop(), 0
        begin = loop.time()
        # At ten times the required rate, also where the sleeps of a busy machine take longer.
        while got < 48 << 14:
            while got < (loop.time() - begin) / 0.1 * (1 << 14):
                got += len(await reader.readexactly(1 << 14))
            await asyncio.sleep(0.1)
        assert not world.refused


async def test_disconnect_is_noticed_with_pipelined_request() -> None:
    disconnected = asyncio.Event()

    class Endless(World):
        async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
            async def wait_for_end() -> None:
                while (await receive())["type"] != "http.disconnect":
                    pass
                disconnected.set()

            waiting = asyncio.create_task(wait_for_end())
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while not waiting.done():
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
                await asyncio.sleep(0.01)

    async with Endless().serve() as world:
        reader, writer = await world.connect(GET + GET)
        assert await reader.read(1)
        writer.transport.abort()
        async with asyncio.timeout(10):
            await disconnected.wait()


async def test_idle_connections_are_closed_for_new_ones() -> None:
    async with World().serve(max_connections=4) as world:
        for _ in range(20):
            await world.connect()
        for data in (GET, HEALTH):
            reader, _ = await world.connect(data)
            assert (await reader.readuntil(b"0\r\n\r\n")).startswith(b"HTTP/1.1 200")
        await until(lambda: len(world.connections) == 4)
        assert world.refused == {"idle": 18}


async def test_health_is_served_when_all_connections_are_busy() -> None:
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


# -- framing and trailers of chunked bodies -----------------------------------------------------------------------


@pytest.mark.parametrize("path", [b"/x", b"/early"])
@pytest.mark.parametrize(
    ("begin", "part"),
    [
        (b"1\r\nx\r\n0\r\n", b"A:\r\n"),
        (b"1\r\nx\r\n0\r\n", b"A"),
        (b"1\r\nx\r\n0\r\nA: ", b"a"),
        (b"1;", b"a"),
        (b"", b"0"),
        (b"", b"1;" + 1000 * b"a" + b"\r\nx\r\n"),
    ],
    ids=["trailers", "trailer name", "trailer value", "extension", "zeros", "extensions"],
)
async def test_overhead_of_chunked_body_is_limited(path: bytes, begin: bytes, part: bytes) -> None:
    async with World().serve(body_s=30, linger_bytes=1 << 16) as world:
        world.hold.clear()
        stream = await world.connect(CHUNKED.replace(b"/x", path) + begin)
        await until(lambda: world.started)  # later bytes do not count as headers
        limit, sent = 16 * MB, 0
        block = part * (10_000 // len(part))
        with contextlib.suppress(ConnectionError):
            while sent < limit and not stream[0].at_eof():
                stream[1].write(block)
                sent += len(block)
                await asyncio.wait_for(stream[1].drain(), 10)
                await asyncio.sleep(0)
        assert sent < limit
        await until(lambda: not world.connections)


async def test_trailers_are_not_headers() -> None:
    async with World(keys=("right",)).serve() as world:
        trailers = (
            b"Authorization: Bearer right\r\nX-Request-Deadline-Ms: 1\r\nX-SLO-TTFT-Ms: 1\r\nExpect: 100-continue"
        )
        answer = await world.answer(CHUNKED + b"1\r\nx\r\n0\r\n" + trailers + b"\r\n\r\n")
        assert error_of(answer)[0] == b"401"
        # The application reads the headers only after the body.
        begin = CHUNKED.replace(b"Host:", b"Authorization: Bearer right\r\nHost:") + b"1\r\nx\r\n"
        stream = await world.connect(begin)
        await asyncio.sleep(0.05)
        stream[1].write(b"0\r\n" + trailers + b"\r\n\r\n")
        await ok(stream)
        names = [name for name, _ in world.headers]
        assert names == [b"authorization", b"host", b"transfer-encoding"]


async def test_tiny_chunks_cost_a_few_times_their_parsing() -> None:
    body = b"1\r\nx\r\n" * (MB - 1) + b"0\r\n\r\n"

    def parse() -> None:
        parts: list[bytes] = []

        class Protocol:
            on_body = parts.append

        httptools.HttpRequestParser(Protocol()).feed_data(CHUNKED + body)
        assert len(b"".join(parts)) == MB - 1

    async with World().serve() as world:
        ratios = []
        for _ in range(3):
            begin = time.thread_time()
            parse()
            middle = time.thread_time()
            stream = await world.connect(CHUNKED + body)
            await ok(stream)
            ratios.append((time.thread_time() - middle) / (middle - begin))
        assert min(ratios) < 3


async def test_malformed_body_does_not_leak_into_next_request() -> None:
    async with World().serve() as world:
        assert error_of(await world.answer(CHUNKED + b"5\r\nwrong\r\n5\r\nwrong!"))[0] == b"400"
        await ok(await world.connect(CHUNKED + b"5\r\nright\r\n0\r\n\r\n"))
        assert world.body == b"right"


# -- pipelined requests -------------------------------------------------------------------------------------------


async def test_pipelined_requests_are_read_lazily() -> None:
    async with World().serve() as world:
        world.hold.clear()
        sent = 4000
        stream = await world.connect(b"GET /x HTTP/1.1\r\n\r\n" * sent)
        await until(lambda: world.connections and next(iter(world.connections)).flow.read_paused)
        (connection,) = world.connections
        assert len(connection.pipeline) < 400
        world.hold.set()
        for _ in range(sent):
            await ok(stream)
        assert len(world.finished) == sent


async def test_invalid_http_does_not_corrupt_previous_response() -> None:
    async with World().serve() as world:
        world.hold.clear()
        stream = await world.connect(GET + b"nonsense\r\n\r\n")
        await until(lambda: world.refused == {"invalid": 1})
        world.hold.set()
        assert b"connection: close" in await ok(stream)
        assert await is_closed(stream)


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
@pytest.mark.parametrize("size", [1, 1 << 16])
async def test_unsupported_upgrade_is_ignored(protocol: bytes, size: int) -> None:
    upgrade = HEAD + b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AA\r\nUpgrade: " + protocol + b"\r\n"
    body = b"x" * (size - 1) + b"y"
    sized = upgrade + b"Content-Length: %d\r\n\r\n" % size + body
    chunked = upgrade + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % size + body + b"\r\n0\r\n\r\n"
    async with World().serve() as world:
        stream = await world.connect()
        for request, expected in ((sized, body), (chunked, body), (upgrade + b"\r\n", b"")):
            for part in (request[:90], request[90:]):
                stream[1].write(part)
                await asyncio.sleep(0.01)
            assert b"connection: close" not in await ok(stream)
            assert world.body == expected
            assert (b"host", b"localhost") in world.headers
            assert b"upgrade" not in dict(world.headers)
        stream[1].write((sized + GET) * 20)
        for _ in range(40):
            await ok(stream)


async def test_body_of_upgrade_request_is_not_parsed_as_request() -> None:
    async with World().serve() as world:
        upgrade = HEAD + b"Connection: Upgrade\r\nUpgrade: x\r\n"
        stream = await world.connect(upgrade + b"Content-Length: %d\r\n\r\n" % len(GET))
        await asyncio.sleep(0.05)
        stream[1].write(GET)
        await ok(stream)
        assert world.body == GET
        assert len(world.finished) == 1
        for framing in (b"Transfer-Encoding: x", b"Content-Length: 1\r\nContent-Length: 2"):
            assert error_of(await world.answer(upgrade + framing + b"\r\n\r\nab"))[0] == b"400"
        connect = b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n"
        assert error_of(await world.answer(connect + GET)) == (
            b"400",
            "a CONNECT request must not have a body: leave it out",
        )


# -- clients that send nothing more, and HTTP/1.0 -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "answers"),
    [
        (GET, 1),
        (HEAD + b"Content-Length: 5\r\n\r\nhello", 1),
        (GET * 3, 3),
        (GET * 200, 200),
        (GET * 2 + HEAD, 2),
        (GET * 2 + HEAD + b"Content-Length: 5\r\n\r\nhel", 2),
        (GET + b"nonsense\r\n\r\n", 1),
        (GET.replace(b"1.1", b"1.0"), 1),
        (HEAD, 0),
        (HEAD + b"Content-Length: 5\r\n\r\nhel", 0),
        (b"", 0),
    ],
    ids=[
        "get",
        "post",
        "pipelined",
        "many",
        "part of a head",
        "part of a body",
        "invalid",
        "1.0",
        "head",
        "body",
        "empty",
    ],
)
async def test_client_that_sends_nothing_more_gets_all_answers(data: bytes, answers: int) -> None:
    async with World().serve() as world:
        reader, writer = await world.connect(data)
        writer.write_eof()
        found = await asyncio.wait_for(reader.read(), 30)
        assert found.count(b"HTTP/1.1 200") == found.count(b"HTTP/") == found.count(b"xx") == answers
        await until(lambda: not world.connections)


async def test_half_closed_client_gets_late_answer_and_vanished_one_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_PROVOKE_S", 0.1)
    monkeypatch.setattr(connections, "_CHECK_S", 0.05)
    async with World().serve() as world:
        world.hold.clear()
        vanished = [await world.connect(data) for data in (GET, GET, GET + HEAD)]
        half = [await world.connect(data) for data in (GET, GET.replace(b"1.1", b"1.0"))]
        await until(lambda: world.started == 5)
        for _, writer in half:
            writer.write_eof()
        for _, writer in vanished:
            writer.close()
        await until(lambda: len(world.connections) == 2)
        await asyncio.sleep(0.2)
        world.hold.set()
        new, old = [await asyncio.wait_for(reader.read(), 30) for reader, _ in half]
        assert new.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200")
        assert old.startswith(b"HTTP/1.1 200")


async def test_http_1_0_gets_no_chunks_and_no_interim_response() -> None:
    async with World(100_000).serve() as world:
        request = HEAD.replace(b"1.1", b"1.0") + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\nhello"
        head, _, body = (await world.answer(request)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in head
        assert b"transfer-encoding" not in head
        assert body == b"x" * 100_000
        refused = await world.answer(GET.replace(b"1.1", b"1.0").replace(b"Host", b"Content-Length: 2000000\r\nHost"))
        assert error_of(refused)[0] == b"413"


# -- answers before the request is complete -----------------------------------------------------------------------


async def test_connection_answered_early_is_drained_and_closed() -> None:
    early = HEAD.replace(b"/x", b"/early") + b"Content-Length: 1000000\r\n\r\n"
    async with World().serve(linger_s=1, linger_pause_s=0.3, linger_bytes=MB) as world:

        async def send(part: bytes, pause_s: float) -> int:
            stream = await world.connect(early)
            assert b"connection: close" in await ok(stream)
            assert await is_closed(stream)  # for writing
            sent = 0
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(10):
                    while not stream[1].transport.is_closing():
                        stream[1].write(part)
                        sent += len(part)
                        await stream[1].drain()
                        await asyncio.sleep(pause_s)
            return sent

        await ok(await world.connect(early))
        await until(lambda: not world.connections)  # the client sends nothing more
        trickle, flood = await asyncio.gather(send(b"x", 0.1), send(b"x" * 100_000, 0.001))
        assert trickle < 100
        assert flood >= MB


@pytest.mark.parametrize("client", ["asyncio", "aiohttp"])
async def test_rejection_reaches_client_that_sends_all_before_reading(client: str) -> None:
    body = bytes(8 * MB)

    async def by_asyncio(world: World, key: bytes) -> int:
        head = HEAD + b"Authorization: Bearer %s\r\nContent-Length: %d\r\n\r\n" % (key, len(body))
        reader, writer = await world.connect(head + body)
        await writer.drain()
        return int((await reader.read())[9:12])

    async def by_aiohttp(world: World, key: bytes) -> int:
        headers = {"Authorization": f"Bearer {key.decode()}"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"http://127.0.0.1:{world.port}/x", data=io.BytesIO(body), headers=headers) as answer,
        ):
            return answer.status if b"error" in await answer.read() else 0

    send = by_asyncio if client == "asyncio" else by_aiohttp
    async with World(keys=("right",)).serve() as world:
        for key, status in ((b"right", 413), (b"wrong", 401)):
            found = [await asyncio.wait_for(send(world, key), 30) for _ in range(5)]
            assert found == [status] * 5


# -- limits of connections ----------------------------------------------------------------------------------------


async def test_connections_awaiting_client_data_are_closed_for_new_ones() -> None:
    incomplete = HEAD + b"Content-Length: 100\r\n\r\nabc"
    early = HEAD.replace(b"/x", b"/early") + b"Content-Length: 100\r\n\r\n"
    async with World().serve(max_connections=4) as world:
        for data in (incomplete, early):
            for _ in range(3 * SPARE):
                await world.connect(data)
            stream = await world.connect(GET)
            await ok(stream)
        assert world.refused["no_room"] == 0
        await until(lambda: len(world.connections) <= 4)


async def test_address_with_most_connections_loses_one() -> None:
    async with World().serve(max_connections=40) as world:
        other = await world.connect(GET, "127.0.0.2")
        await ok(other)
        for _ in range(100):
            await world.connect(HEAD + b"Content-Length: 100\r\n\r\n")
        await until(lambda: len(world.connections) <= 40 and world.refused["idle"] >= 60)
        other[1].write(GET)
        await ok(other)


async def test_connections_per_address_are_limited() -> None:
    async with World().serve(max_per_address=4) as world:
        incomplete = [await world.connect(HEAD + b"Content-Length: 100\r\n\r\n") for _ in range(4)]
        await until(lambda: all(not connection.is_unread for connection in world.connections))
        world.hold.clear()
        busy = [await world.connect(GET) for _ in range(4)]
        assert all([await is_closed(stream) for stream in incomplete])
        await until(lambda: world.refused == {"share": 4})
        status, text = error_of(await world.answer(GET))
        assert (status, text) == (
            b"429", "there are 4 connections of this address, the most that this server allows: use fewer",
        )  # fmt: skip
        assert (await world.answer(HEALTH.replace(b"Host", b"Connection: close\r\nHost"))).startswith(b"HTTP/1.1 200")
        busy.append(await world.connect(GET, "127.0.0.2"))
        world.hold.set()
        for stream in busy:
            await ok(stream)


async def test_authenticated_connections_are_limited_by_key_not_address() -> None:
    async with World(keys=("a", "b")).serve(max_per_address=2, max_per_key=3) as world:

        def get(key: bytes) -> bytes:
            return GET.replace(b"Host", b"Authorization: Bearer " + key + b"\r\nHost")

        idle = [await world.connect(get(b"a")) for _ in range(3)]
        for stream in idle:
            await ok(stream)
        world.hold.clear()
        busy = [await world.connect(get(b"a"))]
        assert await is_closed(idle[0])
        for stream in idle[1:]:
            stream[1].write(get(b"a"))
        busy += idle[1:]
        await until(lambda: sum(connection._is_answering for connection in world.connections) == 3)
        status, text = error_of(await world.answer(get(b"a")))
        assert (status, text) == (
            b"429", "there are 3 connections of this key, the most that this server allows: use fewer",
        )  # fmt: skip
        busy.append(await world.connect(get(b"b")))
        world.hold.set()
        for stream in busy:
            await ok(stream)


async def test_connections_of_trusted_proxy_count_for_its_clients() -> None:
    async with World(proxies=("127.0.0.1",)).serve(max_per_address=2) as world:

        def get(client: bytes) -> bytes:
            return GET.replace(b"Host", b"X-Forwarded-For: 10.0.0.9, " + client + b"\r\nHost")

        world.hold.clear()
        busy = [
            await world.connect(get(client)) for client in (b"192.0.2.1", b"192.0.2.1", b"192.0.2.2", b"2001:db8::1")
        ]
        await until(lambda: sum(connection._is_answering for connection in world.connections) == 4)
        assert error_of(await world.answer(get(b"192.0.2.1")))[0] == b"429"
        busy += [await world.connect(get(b"2001:db8::2"))]
        await until(lambda: sum(connection._is_answering for connection in world.connections) == 5)
        assert error_of(await world.answer(get(b"2001:db8::3")))[0] == b"429"  # the same IPv6 network
        busy += [await world.connect(get(b"192.0.2.1"), "127.0.0.2") for _ in range(2)]  # not a trusted proxy
        await until(lambda: sum(connection._is_answering for connection in world.connections) == 7)
        world.hold.set()
        for stream in busy:
            await ok(stream)
