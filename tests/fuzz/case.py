from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from chaos.invariants import wrong_body
from skipjoin.routes import PAGES

# API keys. All cases and stories use those of CLIENTS; requests with the key WRONG must be rejected.
CLIENTS = ("fuzz-alpha", "fuzz-beta")
CANARY, OPERATOR, WRONG = "canary", "operator", "fuzz-wrong"
KEYS = (*CLIENTS, CANARY, OPERATOR)
# Prefixes of `x-request-id` in bytes that are not request headers: bodies and trailers.
HIDDEN, TRAILER = "hidden-", "trailer-"
OPEN_PATHS = ("/health", "/ready", "/live", *PAGES)

Headers = Sequence[tuple[str | bytes, str | bytes]]


@dataclass(frozen=True)
class Case:
    """What a client sends on one connection.

    Attributes:
        pieces: Bytes that are sent one after another, `pause_s` apart.
        answers: Number of complete requests at the beginning, each of which must be answered.
        is_locked: No answer may be successful, because no head has a key.
        statuses: Allowed statuses, or empty for any except server errors.
        must_close: The server must close the connection soon, because a request is incomplete or too large.
        leaves: "close" or "reset" if the client disconnects without waiting for an answer, else "".
        waits: Send the first piece alone, and the others once it is answered.
    """

    name: str
    pieces: tuple[bytes, ...]
    pause_s: float = 0.0
    answers: int = 0
    is_locked: bool = False
    statuses: frozenset[int] = frozenset()
    must_close: bool = False
    leaves: str = ""
    waits: bool = False

    def __str__(self) -> str:
        data = b"".join(self.pieces)
        shown = repr(data[:300]) + (f"... ({len(data)} bytes)" if len(data) > 300 else "")
        return f"{self.name}: {shown}"


@dataclass
class Answer:
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_complete: bool = False

    def __str__(self) -> str:
        return f"{self.status} {self.body[:300]!r}"


def wrong_with(case: Case, answer: Answer, is_last: bool) -> str | None:
    """Return what is wrong with an answer, or None."""
    marker = answer.headers.get("x-request-id", "")
    if marker.startswith(HIDDEN):
        return "bytes inside a request were answered as a request"
    if marker.startswith(TRAILER):
        return "a trailer was treated as a header"
    if case.is_locked and answer.status < 400:
        return "a request without a key was answered"
    if case.statuses and answer.status not in case.statuses:
        return f"the status must be one of {sorted(case.statuses)}"
    if not answer.is_complete:
        return None if case.leaves or case.must_close or is_last else "an answer is incomplete"
    if "x-injected" in answer.headers:
        return "a response header was injected by the request"
    return wrong_body(answer.status, answer.headers, answer.body)


def as_bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode()


def head(method: str, target: str | bytes, headers: Headers = (), *, key: str | None = CLIENTS[0]) -> bytes:
    """Return the head of a request, without Authorization if `key` is None."""
    own: Headers = [("Host", "localhost"), *([] if key is None else [("Authorization", f"Bearer {key}")])]
    lines = [b"%s %s HTTP/1.1" % (method.encode(), as_bytes(target))]
    lines += [as_bytes(name) + b": " + as_bytes(value) for name, value in (*own, *headers)]
    return b"\r\n".join(lines) + b"\r\n\r\n"


JSON = ("Content-Type", "application/json")


def post(path: str, body: bytes, headers: Headers = (JSON,), *, key: str | None = CLIENTS[0]) -> bytes:
    return head("POST", path, [*headers, ("Content-Length", str(len(body)))], key=key) + body


def chunked(data: bytes, size: int) -> bytes:
    return b"".join(
        b"%x\r\n%s\r\n" % (len(data[at : at + size]), data[at : at + size]) for at in range(0, len(data), size)
    )


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# Valid bodies whose answers are fast.
BODIES: dict[str, dict[str, object]] = {
    COMPLETIONS: {"prompt": "Spell apple\n", "max_tokens": 4},
    CHAT: {"messages": [{"role": "user", "content": "Spell apple"}], "max_tokens": 4},
    "/tokenize": {"prompt": "abc"},
    "/detokenize": {"tokens": [65]},
    "/v1/batches": {"input_file_id": "file-0", "endpoint": COMPLETIONS, "completion_window": "24h"},
}


def encoded(path: str, **more: object) -> bytes:
    return json.dumps({**BODIES[path], **more}).encode()
