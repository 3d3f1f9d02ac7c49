from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import httpx
import pytest
from forked_servers import ForkedServer
from server_worlds import BLOCKS, ServerProcess, simulated_server
from typer.testing import CliRunner

from skipjoin.cli import app
from skipjoin.routes import PAGES, ROUTES
from support.browser import chromium, open_page

KEY = "operator"
# The first of three servers has a key.
KEYS = ("--api-key", KEY, "--api-key", "", "--api-key", "")
WAIT_MS = 60_000


@contextlib.contextmanager
def console(*options: str) -> Iterator[str]:
    process = ForkedServer(["command", "console", "--port", "0", *options])
    try:
        line = process.stdout.readline()
        yield line.split()[1].removesuffix("/console,")
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


@pytest.fixture(scope="module")
def keyed(tokenizer_folder: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    found = simulated_server(tokenizer_folder, 0.001, BLOCKS, api_keys=KEY)  # type: ignore[arg-type]
    yield found
    found.stop()


def test_pages_and_data_of_several_servers_come_from_one_console(server: ServerProcess, keyed: ServerProcess) -> None:
    options = ("--server", keyed.url, "--server", server.url, "--server", "http://127.0.0.1:9", *KEYS)
    with console(*options) as url, httpx.Client(base_url=url, timeout=60) as client:
        assert all(client.get(path).content == httpx.get(server.url + path).content for path in PAGES)
        servers = client.get("/console/servers.json").json()
        assert [server["name"] for server in servers] == [keyed.url, server.url, "http://127.0.0.1:9"]
        assert httpx.get(f"{server.url}/console/servers.json").json() == [{"name": "", "path": ""}]
        first, second, third = (server["path"] for server in servers)
        body = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 5, "stream": True}
        for path in (first, second):
            answer = client.post(f"{path}/v1/chat/completions", json=body)
            assert answer.text.rstrip().endswith("data: [DONE]")
            with client.stream("GET", f"{path}/debug/events") as stream:  # endless, so it is not held back
                assert next(stream.iter_lines()) == "event: hello"
        lost = client.get(f"{third}/v1/models")
        assert (lost.status_code, "cannot be reached" in lost.json()["error"]["message"]) == (503, True)
        hidden = ("/metrics", "/v1/files", "/debug/../metrics", "/debug/%2e%2e/metrics", "//debug/events")
        assert [client.get(first + path).status_code for path in hidden] == [404, 404, 404, 404, 404]
        assert client.post(f"{first}/v1/completions", json={}).status_code == 404
        # With a key inside, pages of other sites must not reach it.
        assert client.get(f"{first}/v1/models", headers={"Host": "evil.example"}).status_code == 403
        assert client.get(f"{first}/v1/models", headers={"Origin": "http://evil.example"}).status_code == 403
    assert {route.method for route in ROUTES.values() if route.is_relayed} == {"GET", "POST"}


def test_other_machines_must_send_their_own_key(keyed: ServerProcess) -> None:
    with console("--server", keyed.url, "--api-key", KEY, "--host", "0.0.0.0") as url:
        local = url.replace("0.0.0.0", "127.0.0.1")
        path = f"{local}/servers/0/v1/models"
        assert httpx.get(path).status_code == 401
        assert httpx.get(path, headers={"Authorization": f"Bearer {KEY}"}).status_code == 200


class Impostor(BaseHTTPRequestHandler):
    """Answers with a page, and notes which keys it got."""

    keys: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        self.keys.append(self.headers["authorization"])
        page = b"<script>alert(1)</script>"
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.send_header("content-length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def test_other_server_gets_no_key_and_sends_no_page(keyed: ServerProcess) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Impostor) as impostor:
        threading.Thread(target=impostor.serve_forever).start()
        other = f"http://127.0.0.1:{impostor.server_port}"
        with console("--server", keyed.url, "--server", other, *KEYS[:4]) as url:
            right = httpx.get(f"{url}/servers/0/v1/models", timeout=60)
            wrong = httpx.get(f"{url}/servers/1/v1/models", timeout=60)
        impostor.shutdown()
    assert (right.status_code, wrong.status_code, wrong.json()["error"]["code"]) == (200, 502, "not_a_server")
    assert "sandbox" in right.headers["content-security-policy"]
    assert right.headers["x-content-type-options"] == "nosniff"
    assert Impostor.keys == [None]


def test_one_key_for_several_servers_is_refused() -> None:
    shown = CliRunner().invoke(app, ["console", "--server", "http://a", "--server", "http://b", "--api-key", KEY])
    assert shown.exit_code != 0
    assert "once for each of the 2 servers" in shown.output


@pytest.mark.browser
def test_browser_switches_between_servers(keyed: ServerProcess) -> None:
    lost = "http://127.0.0.1:9"
    with chromium() as browser, console("--server", keyed.url, "--server", lost, *KEYS[:4]) as url:
        watched = open_page(browser, url)
        page = watched.page
        page.goto(f"{url}/console#/memory")
        page.wait_for_selector("#link.live", timeout=WAIT_MS)
        assert watched.problems == []
        page.get_by_label("Server", exact=True).select_option(lost)
        page.get_by_text(f"not connected: {lost} cannot be reached").wait_for(timeout=WAIT_MS)
        page.get_by_label("Server", exact=True).select_option(keyed.url)
        page.wait_for_selector("#link.live", timeout=WAIT_MS)
        page.get_by_role("heading", name="Memory").wait_for(timeout=WAIT_MS)
        page.context.close()
