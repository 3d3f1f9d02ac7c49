from __future__ import annotations

import asyncio
import itertools
import json
import re
from functools import partial
from pathlib import Path

import pytest

from fuzz.case import HIDDEN, TRAILER, Answer, Case, wrong_with
from fuzz.driver import alarm_of, fuzz
from fuzz.plan import CASES, Round
from fuzz.values import MODELS
from fuzz.wire import TARGETS
from skipjoin.config import ServerConfig
from skipjoin.server.api.app import build_app
from skipjoin.server.api.service import Service
from skipjoin.server.batches.service import Batches
from skipjoin.server.engines.engine_client import EngineClient
from skipjoin.server.metrics import Metrics
from support.rounds import limited

SEED, SECONDS = 33, 1.5


@pytest.mark.timeout(600)
def test_short_fuzz_run_finds_nothing() -> None:
    found = asyncio.run(fuzz(limited(map(partial(Round, SEED), itertools.count()), None, SECONDS / 60)))
    assert not found, "\n".join(found)


def test_rounds_are_deterministic() -> None:
    assert Round(3, 5).cases() == Round(3, 5).cases()
    assert Round(3, 5).cases() != Round(3, 6).cases()
    assert len(Round(3, 5).cases()) == CASES
    (alone,) = Round(3, 5, only=7).cases()
    assert alone in Round(3, 5).cases()


def test_all_endpoints_are_fuzzed(tmp_path: Path) -> None:
    metrics = Metrics()
    config = ServerConfig(batch_dir=str(tmp_path))
    service = Service(config, EngineClient(metrics), metrics)
    app = build_app(service, Batches(service, most=1)).app
    names = {"model": "tally", "file_id": "file-0", "batch_id": "batch_0", "response_id": "resp_0", "name": "cmpl-0"}
    paths = {re.sub(r"{(\w+)(:segments)?}", lambda found: names[found[1]], route.path) for route in app.routes}  # type: ignore[attr-defined]
    service.close()
    paths.remove("/debug/events")  # the stream does not end
    assert paths <= set(TARGETS) | set(MODELS)
    assert len(paths) > 15


ID = {"x-request-id": "a"}
JSON = {**ID, "content-type": "application/json"}
STREAM = {**ID, "content-type": "text/event-stream; charset=utf-8"}
ERROR = json.dumps({"error": {"message": "m", "type": "t", "param": None, "code": "c"}}).encode()
BUSY = ERROR.replace(b'"c"', b'"too_many_connections"')


def failure_of(status: int, headers: dict[str, str], body: bytes, **case: object) -> str | None:
    answer = Answer(status, headers, body, is_complete=True)
    return wrong_with(Case("any", (), **case), answer, is_last=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("status", "headers", "body"),
    [
        (200, JSON, b"{}"),
        (200, STREAM, b'data: {"choices":[]}\n\ndata: [DONE]\n\n'),
        (200, STREAM, b'data: {"error":{"code":"deadline_exceeded"}}\n\n'),
        (400, JSON, ERROR),
        (503, JSON, BUSY),
        (408, {"connection": "close"}, ERROR),
    ],
)
def test_valid_answers_pass(status: int, headers: dict[str, str], body: bytes) -> None:
    assert failure_of(status, headers, body) is None


@pytest.mark.parametrize(
    ("status", "headers", "body", "case"),
    [
        (200, {}, b"", {}),  # no id
        (200, JSON, b"{", {}),
        (200, JSON, b'{"a":NaN}', {}),
        (200, STREAM, b'data: {"choices":[]}\n\n', {}),  # no end
        (200, STREAM, b"data: [DONE]", {}),  # cut off
        (200, STREAM, b'data: {"error":{"code":"engine_dead"}}\n\n', {}),
        (400, JSON, b"{}", {}),
        (400, JSON, b'{"detail":"x"}', {}),
        (500, JSON, ERROR, {}),
        (503, JSON, ERROR, {}),
        (200, JSON, b"{}", {"is_locked": True}),
        (200, JSON, b"{}", {"statuses": frozenset({400})}),
        (200, {**JSON, "x-request-id": f"{HIDDEN}1"}, b"{}", {}),
        (200, {**JSON, "x-request-id": f"{TRAILER}1"}, b"{}", {}),
        (200, {**JSON, "x-injected": "1"}, b"{}", {}),
    ],
)
def test_invalid_answers_are_detected(
    status: int, headers: dict[str, str], body: bytes, case: dict[str, object]
) -> None:
    assert failure_of(status, headers, body, **case) is not None


def test_errors_in_the_log_are_detected() -> None:
    assert (
        alarm_of("12:00 INFO api: GET /v1/errors\n12:00 WARNING uvicorn.error: Invalid HTTP request received.\n")
        is None
    )
    for line in (
        "12:00 ERROR uvicorn.error: Exception",
        "Traceback (most recent call last):",
        "Task exception was never retrieved",
    ):
        assert line in (alarm_of(f"12:00 INFO api: x\n{line}\n") or "")
