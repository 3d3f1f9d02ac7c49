"""One connection's bytes and what the answers to them may be."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

# Keys of the server. All cases and stories use those of CLIENTS; a request whose key is WRONG must be refused.
CLIENTS = ("fuzz-alpha", "fuzz-beta")
CANARY, OPERATOR, WRONG = "canary", "operator", "fuzz-wrong"
KEYS = (*CLIENTS, CANARY, OPERATOR)
# Beginnings of `x-request-id` in bytes that are no header of a request: a body, a trailer.
HIDDEN, TRAILER = "hidden-", "trailer-"
OPEN_PATHS = ("/health", "/ready", "/live")

Headers = Sequence[tuple[str | bytes, str | bytes]]


@dataclass(frozen=True)
class Case:
    """What a client sends on one connection.

    pieces: sent one after another, `pause_s` apart; waits: those after the first one only when that is answered.
    answers: number of complete requests at the beginning, each of which must be answered. is_locked: no answer may
    be below 400, because no key is in a head. statuses: that answers may have; empty: any but those of server
    errors. must_close: the server has to close the connection soon: it has answered a request that is not complete,
    or a bound was passed. leaves: what the client does without waiting for an answer: "" (it waits), "close" or
    "reset".
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


def as_bytes(text: str | bytes) -> bytes:
    """Encode a text of a head."""
    return text if isinstance(text, bytes) else text.encode()


def head(method: str, target: str | bytes, headers: Headers = (), *, key: str | None = CLIENTS[0]) -> bytes:
    """Return a request's head. key: None leaves the header out."""
    own: Headers = [("Host", "localhost"), *([] if key is None else [("Authorization", f"Bearer {key}")])]
    lines = [b"%s %s HTTP/1.1" % (method.encode(), as_bytes(target))]
    lines += [as_bytes(name) + b": " + as_bytes(value) for name, value in (*own, *headers)]
    return b"\r\n".join(lines) + b"\r\n\r\n"


JSON = ("Content-Type", "application/json")


def post(path: str, body: bytes, headers: Headers = (JSON,), *, key: str | None = CLIENTS[0]) -> bytes:
    """Return a complete POST request."""
    return head("POST", path, [*headers, ("Content-Length", str(len(body)))], key=key) + body


def chunked(data: bytes, size: int) -> bytes:
    """Return data as chunks, without the last one."""
    return b"".join(
        b"%x\r\n%s\r\n" % (len(data[at : at + size]), data[at : at + size]) for at in range(0, len(data), size)
    )


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# Bodies that are answered with 200, in a moment.
BODIES: dict[str, dict[str, object]] = {
    COMPLETIONS: {"prompt": "Spell apple\n", "max_tokens": 4},
    CHAT: {"messages": [{"role": "user", "content": "Spell apple"}], "max_tokens": 4},
    "/tokenize": {"prompt": "abc"},
    "/detokenize": {"tokens": [65]},
    "/v1/batches": {"input_file_id": "file-0", "endpoint": COMPLETIONS, "completion_window": "24h"},
}


def encoded(path: str, **more: object) -> bytes:
    """Return the body of a path that is answered, with further fields."""
    return json.dumps({**BODIES[path], **more}).encode()
