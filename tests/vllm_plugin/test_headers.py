from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from skipjoin.vllm.headers import RequestHeaders

BODY = {"model": "m", "prompt": "hi"}


def send(headers: dict[str, str], body: bytes, path: str = "/v1/completions") -> tuple[int, Any]:
    """Send a request in two parts. Return the status, and the body that the application got or the answer."""
    seen: list[bytes] = []
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, reply: Any) -> None:
        more = True
        while more:
            message = await receive()
            seen.append(message["body"])
            more = message.get("more_body", False)
        length = dict(scope["headers"])[b"content-length"]
        assert int(length) == len(b"".join(seen))
        await reply({"type": "http.response.start", "status": 200, "headers": []})

    parts = [body[:5], body[5:]]

    async def receive() -> dict[str, Any]:
        part = parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    async def reply(message: Any) -> None:
        sent.append(message)

    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "path": path, "headers": [*encoded, (b"content-length", str(len(body)).encode())]}
    asyncio.run(RequestHeaders(app)(scope, receive, reply))
    return sent[0]["status"], b"".join(seen) or b"".join(message.get("body", b"") for message in sent[1:])


def test_headers_become_arguments_of_the_body() -> None:
    body = json.dumps({**BODY, "vllm_xargs": {"slo_tpot_ms": 9, "mine": 1}}).encode()
    headers = {"X-SLO-TTFT-ms": "250", "x-slo-tpot-ms": "50", "x-service-tier": "flex", "x-program-id": "p1"}
    status, got = send(headers, body, "/v1/chat/completions")
    assert status == 200
    # A value in the body is more specific than the header of a gateway.
    wanted = {"slo_ttft_ms": "250", "service_tier": "flex", "slo_tpot_ms": 9, "mine": 1, "program_id": "p1"}
    assert json.loads(got) == {**BODY, "vllm_xargs": wanted}


def test_headers_of_llm_d_are_read() -> None:
    both = {"x-slo-ttft-ms": "9", "x-llm-d-slo-ttft-ms": "250", "x-llm-d-slo-tpot-ms": "50"}
    flow = {"x-llm-d-inference-fairness-id": "tenant", "x-llm-d-inference-objective": "flex"}
    _, got = send({**both, **flow}, json.dumps(BODY).encode())
    wanted = {"slo_ttft_ms": "250", "slo_tpot_ms": "50", "program_id": "tenant", "service_tier": "flex"}
    assert json.loads(got)["vllm_xargs"] == wanted
    own = {"x-program-id": "p1", "x-service-tier": "default", **flow}
    _, got = send(own, json.dumps(BODY).encode())
    assert json.loads(got)["vllm_xargs"] == {"program_id": "p1", "service_tier": "default"}


def test_an_objective_that_only_llm_d_knows_is_ignored() -> None:
    assert send({"x-llm-d-inference-objective": "gold"}, b'{"a":  1}') == (200, b'{"a":  1}')


@pytest.mark.parametrize(
    ("headers", "path"), [({}, "/v1/completions"), ({"x-slo-ttft-ms": "bad"}, "/v1/models")], ids=["none", "path"]
)
def test_other_requests_pass_unchanged(headers: dict[str, str], path: str) -> None:
    assert send(headers, b'{"a":  1}', path) == (200, b'{"a":  1}')


@pytest.mark.parametrize("body", [b"", b"no json", b"[1, 2]", b'{"vllm_xargs": 3}', b"\xff\xfe{}", b"[" * 9999])
def test_bodies_that_cannot_be_changed_are_left_to_vllm(body: bytes) -> None:
    status, got = send({"x-slo-ttft-ms": "250"}, body)
    assert (status, got) == (200, body)


@pytest.mark.parametrize(
    ("header", "value"), [("x-slo-jct-ms", "0"), ("x-slo-jct-ms", "soon"), ("x-service-tier", "gold")]
)
def test_an_invalid_header_is_a_bad_request(header: str, value: str) -> None:
    status, got = send({header: value}, json.dumps(BODY).encode())
    assert status == 400
    error = json.loads(got)["error"]
    assert error["param"] == header
    assert header in error["message"]
    assert repr(value) in error["message"]
