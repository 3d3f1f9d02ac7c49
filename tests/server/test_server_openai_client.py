from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from server_worlds import BLOCKS, ServerProcess, simulated_server

from skipjoin.server.api import limits


@pytest.fixture(scope="module")
def keyed(tokenizer_folder: Path) -> Iterator[ServerProcess]:
    server = simulated_server(
        tokenizer_folder, 0.001, BLOCKS, api_keys="right+other", priority_range="-1:0", priority_tier="all"
    )
    yield server
    server.stop()


@pytest.fixture
def client(keyed: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{keyed.url}/v1", api_key="right", max_retries=0) as found:
        yield found


HELLO = [{"role": "user", "content": "hello"}]


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=8)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == "hello"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8
    assert answer._request_id
    again = [*HELLO, answer.choices[0].message.model_dump(), {"role": "user", "content": "more"}]
    assert client.chat.completions.create(model="tiny", messages=again, max_tokens=2).choices  # type: ignore[arg-type]


def test_cached_tokens_need_the_same_key_salt_and_prefix(client: openai.OpenAI, keyed: ServerProcess) -> None:
    def cached(text: str, caller: openai.OpenAI = client, n: int = 1, **extra: str) -> int:
        body = {"model": "tiny", "prompt": text, "max_tokens": 2, "n": n, "extra_body": extra}
        usage = caller.completions.create(**body).usage
        chunks = caller.completions.create(**body, stream=True, stream_options={"include_usage": True})
        *_, last = chunks
        # The stream is the second request, so it hits all full blocks of 16 tokens before the last token.
        assert last.usage.prompt_tokens_details.cached_tokens == (len(text) - 1) // 16 * 16
        return usage.prompt_tokens_details.cached_tokens

    text = "tell me a story " * 4
    assert (cached(text), cached(text), cached(text + "now")) == (0, 48, 64)
    assert cached(text, cache_salt="pepper") == 0
    assert cached("B" + text[1:]) == 0
    assert cached("n choices" + text, n=3) == 0
    with openai.OpenAI(base_url=f"{keyed.url}/v1", api_key="other", max_retries=0) as other:
        assert cached(text, other) == 0
        assert cached(text, other) == 48
        assert cached(text, other, cache_salt="pepper") == 0
    chat = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 1}
    found = [client.chat.completions.create(**chat).usage.prompt_tokens_details.cached_tokens for _ in range(2)]
    assert found == [0, 64]
    scored = {"model": "tiny", "prompt": text, "max_tokens": 1, "echo": True, "logprobs": 1}
    assert client.completions.create(**scored).usage.prompt_tokens_details.cached_tokens == 0


def test_chat_stream_with_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny",
        messages=HELLO,  # type: ignore[arg-type]
        max_completion_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hello"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 8


def test_service_tier_is_reported(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=2, service_tier="flex"  # type: ignore[arg-type]
    )  # fmt: skip
    assert answer.service_tier == "flex"
    stream = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=2, service_tier="priority", stream=True  # type: ignore[arg-type]
    )  # fmt: skip
    assert {chunk.service_tier for chunk in stream} == {"priority"}
    with pytest.raises(openai.BadRequestError, match="service_tier: Input should be 'auto', 'default', 'flex' or"):
        client.chat.completions.create(model="tiny", messages=HELLO, service_tier="scale")  # type: ignore[arg-type]


def test_errors_become_the_right_exceptions(client: openai.OpenAI, keyed: ServerProcess) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt="x", temperature=3)
    assert bad.value.param == "temperature"
    with (
        openai.OpenAI(base_url=f"{keyed.url}/v1", api_key="wrong", max_retries=0) as unauthorized,
        pytest.raises(openai.AuthenticationError) as refused,
    ):
        unauthorized.models.list()
    assert refused.value.code == "invalid_api_key"
    with pytest.raises(openai.APIStatusError) as late:
        client.completions.create(model="tiny", prompt="x" * 400, max_tokens=100, extra_body={"deadline_ms": 20})
    assert late.value.code == "deadline_exceeded"


@pytest.fixture(scope="module")
def small(tokenizer_folder: Path) -> Iterator[ServerProcess]:
    """A server of one request at a time, whose engine the last test kills."""
    server = simulated_server(tokenizer_folder, 0.02, BLOCKS, max_queued_requests=1)
    yield server
    server.stop()


def test_overload_is_a_rate_limit_error(small: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{small.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(model="tiny", prompt="x", max_tokens=400, stream=True)
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model="tiny", prompt="x")
        assert int(refused.value.response.headers["retry-after"]) >= 1
        stream.close()
        small.wait_idle()


def test_engine_death_is_an_api_error_in_a_stream(small: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{small.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(model="tiny", prompt="x", max_tokens=400, stream=True)
        threading.Timer(0.3, small.engine.kill).start()
        with pytest.raises(openai.APIError, match="the engine has stopped"):
            list(stream)
        with pytest.raises(openai.InternalServerError):
            client.completions.create(model="tiny", prompt="x")


def whole_request(connection: socket.socket) -> bytes:
    """Return a request with its body. What is left unread would reset the connection when it is closed."""
    request, missing = b"", 1
    while missing > 0 and (part := connection.recv(1 << 16)):
        request += part
        head, end, body = request.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)^content-length: *(\d+)", head, re.MULTILINE)
        missing = (int(length[1]) if length else 0) - len(body) if end else 1
    return request


@contextlib.contextmanager
def canned(*answers: bytes) -> Iterator[tuple[openai.OpenAI, list[bytes]]]:
    """Yield a client of a server that gives each connection the next answer, and the requests that it got."""
    requests: list[bytes] = []

    def serve() -> None:
        for answer in answers:
            try:
                connection, _ = listener.accept()
            except OSError:  # it is closed, as the client does not come again
                return
            with connection:
                requests.append(whole_request(connection))
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with openai.OpenAI(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", api_key="x") as client:
            yield client, requests


def test_longest_retry_after_is_honored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client retries after at most two minutes. It gives up at once if the server asks for more."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    head = b"Connection: close\r\nContent-Length: %d\r\n"
    models = json.dumps({"object": "list", "data": []}).encode()
    answered = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n" + head % len(models) + b"\r\n" + models
    for seconds, is_retried in ((limits._retry_after(1e9), True), (121, False)):
        refused = b"HTTP/1.1 429 Busy\r\n" + head % 2 + b"Retry-After: %d\r\n\r\n{}" % seconds
        slept.clear()
        with canned(refused, answered) as (client, requests):
            if is_retried:
                client.models.list()
                assert slept == [seconds]
            else:
                with pytest.raises(openai.RateLimitError):
                    client.models.list()
                assert not slept
        assert requests


@pytest.mark.parametrize(("version", "raises"), [("1.1", True), ("1.0", False)])
def test_cut_stream_is_an_error_with_chunks_only(keyed: ServerProcess, version: str, raises: bool) -> None:
    """A stream that is cut after an event looks complete to the client unless it comes in chunks."""
    host, port = keyed.url.removeprefix("http://").split(":")
    body = json.dumps({"messages": HELLO, "max_tokens": 8, "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/{version}\r\nHost: localhost\r\nAuthorization: Bearer right\r\n"
    length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall((head + length).encode() + body)
        connection.shutdown(socket.SHUT_WR)
        stream = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert (b"transfer-encoding: chunked" in stream) == raises
    events = stream.split(b"\n\n")
    assert b"[DONE]" in events[-2]
    cut = b"\n\n".join(events[:3]) + b"\n\n" + (b"\r\n" if raises else b"")
    with canned(cut) as (client, _):
        deltas = client.chat.completions.create(model="tiny", messages=HELLO, stream=True)  # type: ignore[arg-type]
        with pytest.raises(openai.APIConnectionError) if raises else contextlib.nullcontext():
            assert list(deltas)
