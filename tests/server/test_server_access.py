from __future__ import annotations

import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from server_worlds import BLOCKS, JSON, MakeApi, ServerProcess, simulated_server

from skipjoin.routes import Access, paths
from skipjoin.server.api import debug

pytestmark = pytest.mark.anyio

KEY = {"Authorization": "Bearer right"}


async def test_every_route_except_health_and_pages_needs_a_key(
    make_api: MakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(debug, "TIMEOUT_S", 0.05)
    async with make_api(api_keys=("other", "right")) as api:
        found = {(route.path, method) for route in api.app.app.routes for method in route.methods}  # type: ignore[attr-defined]
        assert {path for path, _ in found} >= {"/v1/completions", "/metrics", "/load", "/tokenize", "/debug/requests"}
        for path, method in found:
            target = path.replace("{model:segments}", "tiny")
            response = await api.http.request(method, target)
            if path in paths(Access.OPEN, Access.PROBE):
                assert response.status_code == 200
                continue
            assert response.status_code == 401, path
            assert response.headers["x-request-id"]
            if method != "HEAD":
                error = response.json()["error"]
                if path.startswith("/api/"):  # Ollama's errors are texts
                    assert "needs an API key" in error
                    continue
                assert error["type"] == "authentication_error"
                assert error.get("code", "invalid_api_key") == "invalid_api_key"  # Anthropic's have no codes
            if path != "/debug/events":  # which does not end
                assert (await api.http.request(method, target, headers=KEY)).status_code != 401
        assert (await api.http.get("/nothing")).status_code == 401


@pytest.mark.parametrize(
    "value",
    ["", "Bearer", "Bearer ", "right", "Basic right", "Bearer wrong", "Bearer rightt", "Bearer righ", "Bearer é"],
)
async def test_wrong_keys_are_rejected(make_api: MakeApi, value: str) -> None:
    async with make_api(api_keys=("right",)) as api:
        response = await api.http.get("/v1/models", headers=[(b"authorization", value.encode())])
        assert response.status_code == 401
        assert response.json()["error"]["message"].startswith("the API key that was sent is none of this server's: ")
        assert (await api.http.get("/v1/models", headers={"Authorization": "bearer right"})).status_code == 200


async def test_rejection_time_does_not_grow_with_number_of_keys(make_api: MakeApi) -> None:
    async def seconds(count: int) -> float:
        async with make_api(api_keys=tuple(f"key-{number}" for number in range(count))) as api:
            await api.http.get("/v1/models")
            begin = time.process_time()
            for _ in range(20):
                assert (await api.http.get("/v1/models", headers=KEY)).status_code == 401
            return time.process_time() - begin

    assert await seconds(100_000) < 10 * await seconds(1)


async def test_two_authorization_headers_are_rejected(make_api: MakeApi) -> None:
    async with make_api(api_keys=("right",)) as api:
        headers = [(b"authorization", b"Bearer right"), (b"authorization", b"Bearer wrong")]
        assert (await api.http.get("/v1/models", headers=headers)).status_code == 401


@pytest.mark.parametrize(
    "target",
    ["/health/../v1/models", "/health/", "//health", "/%68ealth", "/health%2f..%2fv1/models", "/Health", "/health;x"],
)
async def test_variants_of_open_paths_need_a_key(make_api: MakeApi, target: str) -> None:
    async with make_api(api_keys=("right",)) as api:
        statuses = []

        async def send(message: dict[str, object]) -> None:
            statuses.append(message.get("status"))

        path = target.replace("%68", "h").replace("%2f", "/")
        scope = {
            "type": "http", "method": "GET", "path": path, "raw_path": target.encode(), "query_string": b"",
            "headers": [], "root_path": "",
        }  # fmt: skip
        await api.app(scope, None, send)  # type: ignore[arg-type]
        assert statuses[0] == 401


async def test_web_sockets_are_closed(make_api: MakeApi) -> None:
    async with make_api() as api:
        sent = []

        async def send(message: dict[str, object]) -> None:
            sent.append(message)

        await api.app({"type": "websocket", "path": "/health", "headers": []}, None, send)  # type: ignore[arg-type]
        assert sent == [{"type": "websocket.close", "code": 1008}]


async def test_large_bodies_are_413_with_or_without_length(make_api: MakeApi) -> None:
    async with make_api(max_body_bytes=1000) as api:
        body = json.dumps({"prompt": "x" * 1000}).encode()
        assert (await api.http.post("/v1/completions", content=body, headers=JSON)).status_code == 413

        async def parts() -> AsyncIterator[bytes]:
            for start in range(0, len(body), 100):
                yield body[start : start + 100]

        response = await api.http.post("/v1/completions", content=parts(), headers=JSON)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"
        assert api.is_clean()


async def test_large_headers_are_431(make_api: MakeApi) -> None:
    async with make_api(max_header_bytes=2000) as api:
        assert (await api.http.get("/health", headers={"x": "y" * 2000})).status_code == 431
        assert (await api.http.get("/health?" + "y" * 2000)).status_code == 431
        assert (await api.http.get("/health", headers={"x": "y" * 1000})).status_code == 200


def exchange(server: ServerProcess, request: bytes) -> bytes:
    """Send the bytes and return the answer until the server closes or pauses for two seconds."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=2) as connection:
        answer = b""
        try:
            connection.sendall(request)
            while data := connection.recv(65536):
                answer += data
        except (TimeoutError, ConnectionError):
            pass
        return answer


@pytest.fixture(scope="module")
def locked(tokenizer_folder: Path) -> Iterator[ServerProcess]:
    server = simulated_server(tokenizer_folder, 0.001, BLOCKS, api_keys="right", metrics_port=0)
    yield server
    server.stop()


@pytest.mark.parametrize(
    "request_line",
    [
        b"GET /v1/models HTTP/1.1\r\nHost: x/health?",
        b"GET http://x/health/../v1/models HTTP/1.1\r\nHost: x",
        b"GET /health%2f..%2fv1/models HTTP/1.1\r\nHost: x",
        b"GET /v1/models?/health HTTP/1.1\r\nHost: localhost",
        b"GET /v1/models#/health HTTP/1.1\r\nHost: localhost",
        b"GET //v1/models HTTP/1.1\r\nHost: localhost",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Forwarded-Prefix: /health\r\nX-Original-URL: /health",
        b"OPTIONS * HTTP/1.1\r\nHost: x",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade",
    ],
)
def test_path_and_header_tricks_do_not_bypass_auth(locked: ServerProcess, request_line: bytes) -> None:
    answer = exchange(locked, request_line + b"\r\n\r\n")
    assert answer.startswith((b"HTTP/1.1 401", b"HTTP/1.1 400")), answer
    assert b"tiny" not in answer


def test_health_needs_no_key_and_key_grants_access(locked: ServerProcess) -> None:
    assert httpx.get(f"{locked.url}/health").status_code == 200
    assert httpx.get(f"{locked.url}/v1/models", headers=KEY).status_code == 200


def test_metrics_port_needs_no_key_and_reports_memory(locked: ServerProcess) -> None:
    line = next(line for line in locked.process.stdout if line.startswith("Metrics: "))
    url = line.removeprefix("Metrics: ").strip()
    assert not url.startswith(locked.url)
    for name, process in (("api", locked.api), ("engine", locked.engine)):
        head = f"skipjoin:{name}_resident_memory_bytes "
        for _ in range(600):  # engines report once a second
            (found,) = (line for line in httpx.get(url).text.splitlines() if line.startswith(head))
            if (resident := float(found.removeprefix(head))) > 0:
                break
            time.sleep(0.05)
        assert resident == pytest.approx(process.memory_info().rss, rel=0.3)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\n" + b"x: " + b"y" * 1_000_000,
        b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 200_000,
        b"GET /" + b"y" * 1_000_000,
    ],
    ids=["one header", "many headers", "target"],
)
def test_oversized_request_heads_are_rejected(server: ServerProcess, head: bytes) -> None:
    """An unfinished head of a megabyte is rejected or dropped, not buffered."""
    answer = exchange(server, head)
    assert answer == b"" or answer.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400"))
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_invalid_http_gets_openai_error(server: ServerProcess) -> None:
    answer = exchange(server, b"nonsense\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400")
    assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "invalid_http"


def test_huge_body_is_rejected_before_it_is_read(server: ServerProcess) -> None:
    post = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    answer = exchange(server, post + b"Content-Length: 100000000\r\n\r\n" + b"x" * 100_000)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 413")
    chunks = post + b"Transfer-Encoding: chunked\r\n\r\n"
    answer = exchange(server, chunks + b"100000\r\n" + b"x" * 0x100000 + b"\r\n" + b"100000\r\n" + b"x" * 0x100000)
    assert httpx.get(f"{server.url}/health").status_code == 200
