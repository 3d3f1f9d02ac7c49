from __future__ import annotations

import json
import re
import threading
import time
from io import StringIO
from typing import Any

import httpx
import msgspec
import pytest
from rich.console import Console
from server_worlds import READY, StartServer
from typer.testing import CliRunner

from skipjoin.cli import app
from skipjoin.cli.options import flags_of
from skipjoin.cli.top import _Screen
from skipjoin.config import EngineConfig, ServerConfig
from skipjoin.core.refusals import QUIET_S
from skipjoin.core.waits import WaitReason
from skipjoin.observe.reasons import words_of
from skipjoin.options import settings_of
from skipjoin.recipes import find, listed
from skipjoin.server.api.feed import reasons_of
from skipjoin.server.api.request_index import RequestIndex


def test_request_is_explained_while_it_waits_and_after_its_end(start_server: StartServer) -> None:
    """Two long requests hold all KV blocks but one, so that the third waits."""
    server = start_server(step_s=0.01, blocks=13)
    with httpx.Client(base_url=server.url, timeout=60) as client:

        def ask(name: str) -> None:
            body = {"prompt": "abc" * 5, "max_tokens": 80, "ignore_eos": True}
            client.post("/v1/completions", json=body, headers={"x-request-id": name})

        threads = [threading.Thread(target=ask, args=(f"job/{number}",)) for number in range(4)]
        for thread in threads:
            thread.start()
            time.sleep(0.02)
        seen = _until(lambda: _explained(client, "job/3"), lambda row: row["state"] not in ("running", "not_examined"))
        live = _explained(client, "job/3")
        assert not live["is_finished"]
        assert live["intervals"][-1]["is_current"]
        assert seen["competitors"]
        assert all(other["id"].startswith("cmpl-") for other in seen["competitors"])
        assert (live["place"] < live["live_requests"] <= 4, live["facts"][0]["label"]) == (True, "first token first")
        shown = CliRunner().invoke(app, ["explain", "job/3", "--url", server.url]).output
        assert re.search(r"Number [1-4] of [1-4] live requests", shown)
        assert live["facts"][0]["meaning"] in shown
        row = client.get("/debug/requests").json()["requests"][0]
        assert [fact["label"] for fact in row["facts"]] == [fact["label"] for fact in live["facts"]]
        for thread in threads:
            thread.join()
        found = client.get("/debug/requests/job%2F3").json()
        (ended,) = found["choices"]
        assert ended["is_finished"]
        assert (ended["place"], ended["facts"]) == (None, [])
        assert (ended["state"], ended["output_tokens"]) == ("length", 80)
        assert sum(ended["seconds"].values()) == pytest.approx(ended["total_s"], abs=1e-3)
        assert ended["intervals"] == _explained(client, found["id"])["intervals"]
        missing = client.get("/debug/requests/other")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "request_not_found")
    shown = CliRunner().invoke(app, ["explain", "job/3", "--url", server.url])
    assert shown.exit_code == 0, shown.output
    assert f"{found['id']}: ended (length)" in shown.output
    assert found["reasons"][ended["longest_wait"]]["text"] in shown.output
    as_json = CliRunner().invoke(app, ["explain", found["id"], "--json", "--url", server.url])
    assert json.loads(as_json.output)["request_id"] == "job/3"
    refused = CliRunner().invoke(app, ["explain", "other", "--url", server.url])
    assert (refused.exit_code, "no request 'other'" in refused.stderr) == (1, True)


def _explained(client: httpx.Client, name: str) -> dict[str, Any]:
    answer = client.get(f"/debug/requests/{name.replace('/', '%2F')}")
    if answer.status_code == 404:  # not submitted yet
        return {"state": "running"}
    return answer.json()["choices"][0]


def _until(look: Any, wanted: Any) -> Any:
    end = time.monotonic() + 20
    while not wanted(found := look()):
        assert time.monotonic() < end, found
        time.sleep(0.01)
    return found


def test_index_finds_a_request_by_both_ids_for_its_owner_only() -> None:
    index = RequestIndex()
    mine = index.add("cmpl-1", "same", "me", [7, 8])
    other = index.add("cmpl-2", "same", "you", [9])
    assert index.find("cmpl-1", "me") is index.find("same", "me") is index.find("cmpl-1", None) is mine
    assert index.find("same", None) is index.find("same", "you") is other
    assert index.find("cmpl-2", "me") is index.find("nothing", None) is None
    assert (index.of_number(8), mine.choices) == (mine, {7: 0, 8: 1})


def test_response_id_is_found_although_another_client_sent_it_as_request_id() -> None:
    index = RequestIndex()
    real = index.add("cmpl-1", "", "alice", [1])
    fake = index.add("cmpl-2", "cmpl-1", "mallory", [2])
    assert index.find("cmpl-1", None) is real
    assert index.find("cmpl-1", "mallory") is fake


def test_program_names_its_latest_call_after_ids() -> None:
    index = RequestIndex(max_finished=0)
    first = index.add("cmpl-1", "a", "me", [1], "run")
    index.add("cmpl-2", "b", "you", [2], "run")
    assert index.find_call("run", "me") is first
    last = index.add("cmpl-3", "c", "me", [3], "run")
    assert index.find_call("run", "me") is last
    assert index.find("run", "me") is None  # nothing is canceled by the name of a program
    named = index.add("cmpl-4", "run", "me", [4])
    assert index.find_call("run", "me") is named
    for request in (first, last, named):
        index.ended(request)
    assert index.find_call("run", "me") is None


def test_index_is_bounded_in_age_and_number_and_keeps_live_requests() -> None:
    now = 0.0
    index = RequestIndex(keep_s=10, max_finished=2, clock=lambda: now)
    live = index.add("live", "", "", [0])
    ended = [index.add(f"id-{number}", "again", "", [number]) for number in range(1, 5)]
    for request in ended:
        index.ended(request)
        index.ended(request)
    assert [index.find(request.response_id, None) for request in ended] == [None, None, *ended[2:]]
    now = 11.0
    assert index.find("again", None) is index.of_number(4) is None
    assert index.find("live", None) is live


@pytest.mark.parametrize("recipe", sorted(listed()))
def test_every_reason_has_words_and_names_only_options_that_exist(recipe: str) -> None:
    found = reasons_of(msgspec.structs.replace(READY, recipe=recipe))
    assert set(found) >= set(WaitReason)
    assert all(reason.short and reason.text.endswith(".") for reason in found.values())
    flags = {
        flag
        for source in (EngineConfig, ServerConfig)
        for setting in settings_of(source).values()
        for flag in flags_of(setting)
    }
    for reason in found.values():
        assert set(re.findall(r"--[\w-]+", reason.remedy)) <= flags
        for names in re.findall(r"--set with ([\w, ]+)\) or another", reason.remedy):
            assert names.split(", ") == list(find(recipe).parameters)
    assert ("--set" in found[WaitReason.HELD_BY_BATCHER].remedy) == bool(find(recipe).parameters)


def test_held_batch_line_is_explained_by_recent_chats() -> None:
    words = reasons_of(READY)[WaitReason.BEHIND_REAL_TIME]
    assert f"within the last {QUIET_S:.0f} s" in words.text
    assert "--slo-tpot-ms" in words.remedy
    assert "--best-effort-wait-s" in words.remedy


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
def test_top_shows_whole_ids_at_any_width(width: int) -> None:
    ids = [f"chatcmpl-{number:032x}" for number in range(3)]
    row = dict.fromkeys(("prompt_tokens", "output_tokens", "max_tokens", "device_blocks", "cpu_blocks"), 12345)
    row |= {"service": "best-effort", "is_urgent": True, "state": "preempted", "wait_reason": "no_slot", "choice": 0}
    row |= {"wait_s": 123.4, "age_s": 1234.5, "predicted_tokens": 1234.0}
    screen = _Screen()
    screen.take("hello", {"model": "m", "recipe": "r", "reasons": words_of(reasons_of(READY))})
    load = {"running": 1, "waiting": 2, "kv_cache_usage": 0.5}
    rows = [row | {"id": number} for number in ids]
    screen.take(
        "snapshot", {"time": 0.0, "rows": rows, "groups": [], "engines": [], "load": load, "silent_replicas": []}
    )
    console = Console(file=StringIO(), width=width)
    screen.width = width
    console.print(screen.render(None))
    shown = console.file.getvalue()
    text = shown if width >= 60 else shown.replace(" ", "").replace("\n", "")  # whose ids take two lines
    assert all(number in text for number in ids)
    assert max(map(len, shown.splitlines())) <= width
    assert ("no slot" in shown, "12345/12345" in shown) == (width >= 100, width >= 80)
