"""The console in a browser: every view under load, a request from arrival to end, and inert hostile text."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_worlds import BLOCKS, ServerProcess, simulated_server

from support.browser import chromium, open_page

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"
SECRET = "pqrstu"
VIEWS = ("now", "timeline", "memory", "objectives", "forecasts", "batches", "replicas")
WAIT_MS = 60_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def server(tokenizer_folder: Path) -> Iterator[ServerProcess]:
    """Server with few KV blocks and a hostile model name, over the simulated engine."""
    found = simulated_server(tokenizer_folder, 0.01, 13, served_model_name=HOSTILE, slo_ttft_ms=100)
    yield found
    found.stop()


class Load:
    """Requests in the background until the end of the block, as many as given at a time."""

    def __init__(self, url: str, workers: int = 3) -> None:
        self._url = url
        self._is_done = False
        self._threads = [threading.Thread(target=self._work, args=(number,)) for number in range(workers)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_done = True
        for thread in self._threads:
            thread.join()

    def _work(self, number: int) -> None:
        turn = 0
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while not self._is_done:
                body = {"prompt": SECRET * 2, "max_tokens": 60, "ignore_eos": True}
                client.post("/v1/completions", json=body, headers={"x-request-id": f"load-{number}-{turn}"})
                turn += 1


@pytest.mark.browser
@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_every_view_works_under_load(browser: Any, server: ServerProcess, scheme: str, width: int) -> None:
    watched = open_page(browser, server.url, color_scheme=scheme, viewport={"width": width, "height": 900})
    page = watched.page
    with Load(server.url):
        for view in VIEWS:
            page.goto(f"{server.url}/console#/{view}")
            page.wait_for_selector("#link.live", timeout=WAIT_MS)
            page.wait_for_selector("main h1", timeout=WAIT_MS)
            page.locator("main .card").first.wait_for(timeout=WAIT_MS)
            if scheme == "light":
                assert watched.barriers() == [], view
            text = page.inner_text("body")
            assert HOSTILE in text
            assert SECRET not in text
            assert not page.evaluate("document.documentElement.scrollWidth > innerWidth"), view
        with page.expect_download() as download:
            page.goto(f"{server.url}/console#/timeline")
            page.get_by_text(re.compile(r"^[1-9][\d,]* steps,")).wait_for(timeout=WAIT_MS)
            page.click("#export")
        trace = json.loads(Path(download.value.path()).read_text())
        assert {"X", "C", "M"} <= {event["ph"] for event in trace["traceEvents"]}
    assert watched.problems == []
    page.context.close()


@pytest.mark.browser
def test_request_is_watched_from_its_wait_to_its_end(browser: Any, server: ServerProcess) -> None:
    watched = open_page(browser, server.url)
    page = watched.page
    # The request needs all KV blocks, so it waits and is preempted while others arrive.
    body = {"prompt": SECRET * 2, "max_tokens": 190, "ignore_eos": True}
    with httpx.Client(base_url=server.url, timeout=60) as client:
        asked = threading.Thread(
            target=client.post, args=("/v1/completions",), kwargs={"json": body, "headers": {"x-request-id": "watched"}}
        )
        with Load(server.url, 3):
            asked.start()
            page.goto(f"{server.url}/console#/request/watched")
            page.wait_for_selector(".facts", timeout=WAIT_MS)
            page.locator("main h2", has_text=re.compile("^Waits")).wait_for(timeout=WAIT_MS)
        asked.join()
    page.locator("main h2", has_text=re.compile("^Ended")).wait_for(timeout=WAIT_MS)
    found = httpx.get(f"{server.url}/debug/requests/watched").json()
    (choice,) = found["choices"]
    text = page.inner_text("main")
    assert found["id"] in text
    if choice["longest_wait"] is not None and choice["seconds"][choice["longest_wait"]] > 0:
        words = found["reasons"][choice["longest_wait"]]
        assert words["text"] in text
        assert words["remedy"] in text
    assert page.locator("section:has(h2:text-is('Intervals')) tbody tr").count() == len(choice["intervals"]) + len(
        choice["omitted_s"]
    )
    assert SECRET not in text
    assert watched.barriers() == watched.problems == []
    page.context.close()


@pytest.mark.browser
def test_page_asks_for_a_key_and_names_unknown_requests(browser: Any, tokenizer_folder: Path) -> None:
    server = simulated_server(tokenizer_folder, 0.001, BLOCKS, api_keys="right")
    try:
        watched = open_page(browser, server.url)
        page = watched.page
        page.goto(f"{server.url}/console#/now")
        page.fill("#key", "right", timeout=WAIT_MS)
        page.keyboard.press("Enter")
        page.wait_for_selector("#link.live", timeout=WAIT_MS)
        assert "own requests only" in page.inner_text("#server")
        page.goto(f"{server.url}/console#/request/{HOSTILE.replace('/', '%2F')}")
        page.wait_for_selector("p.bad", timeout=WAIT_MS)
        assert HOSTILE in page.inner_text("p.bad")
        assert all("401" in problem or "404" in problem for problem in watched.problems), watched.problems
        page.context.close()
    finally:
        server.stop()


@pytest.mark.browser
def test_chat_streams_regenerates_and_links_each_answer_to_its_request(browser: Any, server: ServerProcess) -> None:
    watched = open_page(browser, server.url)
    page = watched.page
    page.goto(f"{server.url}/")
    page.locator("#model option").first.wait_for(state="attached", timeout=WAIT_MS)
    assert page.inner_text("#model") == HOSTILE
    page.click("summary")
    page.fill("#max_tokens", "20")
    page.fill("#text", HOSTILE)
    page.keyboard.press("Enter")
    page.locator("#again").wait_for(timeout=WAIT_MS)
    assert page.locator(".message.user .text").inner_text() == HOSTILE
    first = page.locator(".links a").get_attribute("href")
    page.click("#again")
    page.locator(f".links a:not([href='{first}'])").wait_for(timeout=WAIT_MS)
    assert page.locator(".message").count() == 2
    with page.context.expect_page() as opened:
        page.click(".links a")
    opened.value.locator("main h2", has_text=re.compile("^Ended")).wait_for(timeout=WAIT_MS)
    assert watched.barriers() == watched.problems == []
    page.context.close()
