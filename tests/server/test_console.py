from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_worlds import BLOCKS, ServerProcess, simulated_server

from skipjoin.recipes import DEFAULT
from support.browser import chromium, open_page

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"
SECRET = "pqrstu"
VIEWS = ("now", "timeline", "memory", "objectives", "forecasts", "whatif", "batches", "replicas")
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
            if view == VIEWS[0]:
                page.keyboard.press("Tab")
                assert page.evaluate("document.activeElement.className") == "skip"
        _try_other_recipes(page, server.url)
        with page.expect_download() as download:
            page.goto(f"{server.url}/console#/timeline")
            page.get_by_text(re.compile(r"^[1-9][\d,]* steps,")).wait_for(timeout=WAIT_MS)
            page.click("#export")
        trace = json.loads(Path(download.value.path()).read_text())
        assert {"X", "C", "M"} <= {event["ph"] for event in trace["traceEvents"]}
    assert watched.problems == []
    page.context.close()


def _try_other_recipes(page: Any, url: str) -> None:
    page.goto(f"{url}/console#/whatif")
    page.fill("#max_num_seqs", "1")
    page.click("#simulate")
    page.get_by_text(re.compile("requests? replayed")).wait_for(timeout=WAIT_MS)
    rows = page.locator("tbody tr")
    assert rows.nth(0).inner_text().startswith(f"{DEFAULT}, measured")
    assert rows.nth(2).inner_text().startswith("error of the simulator")
    assert rows.filter(has_text="fcfs, max_num_seqs 1").count() == 1
    assert page.locator("svg.chart path").count() == rows.count() - 1


def _check_reason(page: Any, url: str) -> None:
    """Check that a waiting request's page has the words of its recorded reason, at a moment without a change."""
    for _ in range(200):
        before = httpx.get(f"{url}/debug/requests/watched").json()
        shown = page.inner_text("main")
        after = httpx.get(f"{url}/debug/requests/watched").json()["choices"][0]["state"]
        state = before["choices"][0]["state"]
        if state == after != "running" and f"Waits: {before['reasons'][state]['short']}" in shown:
            assert before["reasons"][state]["text"] in shown
            assert before["reasons"][state]["remedy"] in shown
            return
        time.sleep(0.05)
    raise AssertionError(f"{shown!r} has no reason {state}")


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
            _check_reason(page, server.url)
            assert page.locator("section:has(h2:text-is('Rank')) tbody tr").count() >= 4
            page.get_by_text(re.compile(r"preempted \(")).first.wait_for(timeout=WAIT_MS)
        asked.join()
    page.locator("main h2", has_text=re.compile("^Ended")).wait_for(timeout=WAIT_MS)
    found = httpx.get(f"{server.url}/debug/requests/watched").json()
    (choice,) = found["choices"]
    text = page.inner_text("main")
    assert found["id"] in text
    assert choice["preemptions"]
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


@pytest.mark.browser
def test_chat_shows_reasoning_and_calls_and_sends_their_results(browser: Any, server: ServerProcess) -> None:
    """The model of these tests calls no tools, so that the answers are scripted."""
    call = {"index": 0, "id": "call-1", "type": "function", "function": {"name": HOSTILE, "arguments": '{"city":'}}
    rest = {"index": 0, "function": {"arguments": '"Bern"}'}}
    scripts = [
        [{"reasoning_content": "I should look."}, {"tool_calls": [call]}, {"tool_calls": [rest]}],
        [{"content": "It rains."}],
    ]
    bodies: list[Any] = []

    def answer(route: Any) -> None:
        bodies.append(json.loads(route.request.post_data))
        chunks = [{"id": "cmpl-x", "choices": [{"delta": delta}]} for delta in scripts[len(bodies) - 1]]
        text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
        route.fulfill(content_type="text/event-stream", body=f"{text}data: [DONE]\n\n")

    watched = open_page(browser, server.url)
    page = watched.page
    page.route("**/v1/chat/completions", answer)
    page.goto(f"{server.url}/")
    page.locator("#model option").first.wait_for(state="attached", timeout=WAIT_MS)
    page.click("summary")
    page.fill("#tools", '[{"type": "function", "function": {"name": "weather"}}]')
    page.fill("#schema", '{"type": "object"}')
    page.fill("#text", "Weather?")
    page.keyboard.press("Enter")
    page.locator(".results textarea").wait_for(timeout=WAIT_MS)
    assert "I should look." in page.locator(".reasoning").text_content()
    assert page.locator(".call code").inner_text() == HOSTILE
    assert json.loads(page.locator(".call pre").inner_text()) == {"city": "Bern"}
    assert watched.barriers() == []
    page.fill(".results textarea", "rain")
    page.click(".results button")
    page.get_by_text("It rains.").wait_for(timeout=WAIT_MS)
    assert bodies[0]["tools"][0]["function"]["name"] == "weather"
    assert bodies[0]["response_format"]["json_schema"]["schema"] == {"type": "object"}
    asked, called, result = bodies[1]["messages"]
    assert (asked["role"], called["tool_calls"][0]["id"]) == ("user", "call-1")
    assert result == {"role": "tool", "tool_call_id": "call-1", "content": "rain"}
    page.fill("#schema", "{")
    page.click("#again")
    page.get_by_text("The JSON schema in the settings is not JSON").wait_for(timeout=WAIT_MS)
    assert watched.problems == []
    page.context.close()
