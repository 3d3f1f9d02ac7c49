"""Whatever clients send, the answer is an answer or a 4xx that says why, and the engine goes on."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_worlds import BLOCKS, JSON, ServerProcess, simulated_server

from skipjoin.config import ServerConfig
from skipjoin.server.api.app import build_app
from skipjoin.server.api.protocol import ChatRequest, CompletionRequest
from skipjoin.server.api.service import Service
from skipjoin.server.engines.engine_client import EngineClient
from skipjoin.server.metrics import Metrics

SOME = settings(max_examples=6, suppress_health_check=list(HealthCheck))


def check(response: Any) -> None:
    """An answer, or an OpenAI error that is the client's fault."""
    assert response.status_code < 500, response.text
    assert response.headers["x-request-id"]
    if response.status_code >= 400:
        error = json.loads(response.text)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]


@pytest.fixture(scope="module")
def server(tokenizer_folder: Path) -> Iterator[ServerProcess]:
    """One with a short context, because many requests generate as much as it holds."""
    found = simulated_server(tokenizer_folder, 0.0, BLOCKS, context=40)
    yield found
    found.stop()


def published() -> dict[str, Any]:
    """The schema that the server publishes."""
    metrics = Metrics()
    service = Service(ServerConfig(), EngineClient(metrics), metrics)
    document: dict[str, Any] = build_app(service).app.openapi()  # type: ignore[attr-defined]
    service.close()
    return document


def slices(document: dict[str, Any], size: int = 8) -> Iterator[dict[str, Any]]:
    """The schema again and again, each time with a few fields of the large bodies: the whole takes minutes to draw
    examples from."""
    for start in range(0, 64, size):
        part = copy.deepcopy(document)
        for name in ("CompletionRequest", "ChatRequest"):
            body = part["components"]["schemas"][name]
            kept = [*body["required"], *list(body["properties"])[start : start + size]]
            body["properties"] = {field: body["properties"][field] for field in dict.fromkeys(kept)}
        yield part


def operations() -> Iterator[Any]:
    """Strategies of requests to each route: what the schema allows, and what it forbids."""
    for number, document in enumerate(slices(published())):
        for result in schemathesis.openapi.from_dict(document).get_all_operations():
            operation = result.ok()
            if number and "completions" not in operation.path:
                continue
            for mode in schemathesis.GenerationMode:
                if mode.is_positive or operation.body:  # else nothing can be wrong
                    yield pytest.param(operation.as_strategy(mode), id=f"{operation.label} {mode.value} {number}")


@pytest.mark.parametrize("cases", list(operations()))
def test_what_the_schema_allows_and_forbids(server: ServerProcess, cases: Any) -> None:
    @given(cases)
    @SOME
    def send(case: Any) -> None:
        check(case.call(base_url=server.url))

    send()


numbers = st.one_of(
    st.integers(-3, 30),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([2**31, 2**63, -(2**63) - 1, 10**30, 1e308, -1e-300]),
)
anything = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = sorted({*CompletionRequest.model_fields, *ChatRequest.model_fields, "whatever"})
PATHS = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "/tokenize": {"prompt": "abc"},
    "/detokenize": {"tokens": [1]},
}


@given(
    st.sampled_from(sorted(PATHS)),
    st.dictionaries(st.sampled_from(FIELDS), anything, max_size=3),
    st.dictionaries(st.sampled_from(FIELDS), numbers | st.none() | st.booleans(), max_size=3),
)
@settings(max_examples=50, suppress_health_check=list(HealthCheck))
def test_any_json_in_any_field(server: ServerProcess, path: str, some: dict[str, Any], more: dict[str, Any]) -> None:
    check(client(server).post(path, json={**PATHS[path], **some, **more}))


@given(st.sampled_from(sorted(PATHS)), st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
@settings(max_examples=25, suppress_health_check=list(HealthCheck))
def test_any_bytes(server: ServerProcess, path: str, body: bytes) -> None:
    response = client(server).post(path, content=body, headers=JSON)
    check(response)
    assert response.status_code == 400


@pytest.mark.parametrize("path", sorted(PATHS))
@pytest.mark.parametrize(
    "content",
    [
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 100_000,
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": -Infinity}',
        b'{"prompt": "a", "n": 1e400}',
        b'{"logit_bias": {' + b",".join(b'"%d": 1' % token for token in range(5000)) + b"}}",
        b'{"prompt": "' + b"x" * 3_000_000 + b'", "max_tokens": 1e9}',
    ],
    ids=["surrogate", "deep", "nan", "infinity", "1e400", "5000 biases", "3 MB"],
)
def test_known_troublemakers(server: ServerProcess, path: str, content: bytes) -> None:
    response = client(server).post(path, content=content, headers=JSON)
    check(response)
    assert response.status_code == 400


def test_the_engine_is_alive_and_idle_afterwards(server: ServerProcess) -> None:
    server.wait_idle()
    assert client(server).get("/health").status_code == 200
    assert client(server).post("/v1/completions", json=PATHS["/v1/completions"]).json()["usage"]["total_tokens"] == 7


_clients: dict[str, httpx.Client] = {}


def client(server: ServerProcess) -> httpx.Client:
    """One client for all examples: connections are kept."""
    return _clients.setdefault(server.url, httpx.Client(base_url=server.url, timeout=30))


@pytest.fixture(scope="module", autouse=True)
def _close_clients() -> Any:
    yield
    while _clients:
        _clients.popitem()[1].close()
