"""Raw bytes: odd heads, chunks, lengths and trailers, smuggled requests, pipelining, disconnecting clients.

Bodies and trailers contain requests and headers with a valid key and a special `x-request-id`. An answer with this id
shows that the server treated them as a request.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from fuzz.case import (
    CHAT,
    CLIENTS,
    COMPLETIONS,
    HIDDEN,
    JSON,
    OPEN_PATHS,
    TRAILER,
    WRONG,
    Case,
    chunked,
    encoded,
    head,
    post,
)

METHODS = ("GET", "POST", "DELETE", "PUT", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "PURGE", "get", "FOO")
TARGETS = (
    *OPEN_PATHS,
    *("/version", "/load", "/metrics", "/v1/models", "/v1/models/tally", "/debug/requests", "/openapi.json"),
    *("/debug/requests/cmpl-0", "/debug/histories", "/debug/arrivals", "/debug/replay", "/console/servers.json"),
    *("/v1/files", "/v1/files/file-0", "/v1/files/file-0/content", "/v1/batches", "/v1/batches/batch_0"),
    *("/v1/batches/batch_0/cancel", COMPLETIONS, CHAT, "/tokenize", "/detokenize", "/v1/requests/cmpl-0"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/tokenizer_info"),
    *("/v1/responses", "/v1/responses/resp_0", "/v1/responses/resp_0/input_items", "/v1/responses/input_tokens"),
    *("/v1/messages", "/v1/messages/count_tokens"),
    *("/v1/embeddings", "/v1/rerank", "/rerank", "/v2/rerank", "/v1/score", "/score"),
    *("/api/embeddings", "/v1/responses/compact"),
    *("/api/chat", "/api/generate", "/api/embed", "/api/show", "/api/tags", "/api/ps", "/api/version"),
)
_ODD_TARGETS = (
    *("*", "/", "//", "/v1/../v1/models", "/v1/models/%00", "/v1/models/" + "a/" * 200, "/%2e%2e/%2e%2e/etc/passwd"),
    *("/v1/files?limit=-1", "/v1/files?limit=1e9&after=%00", "/v1/files?purpose=x", "/v1/batches?limit=99999999999"),
    *("/v1/files?order=%F0%9F%98%80", "/v1/files?after=" + "x" * 3000, "/v1/batches?after=batch_0", "/v1/files/%2e%2e"),
    *("/v1/files/..%2f..%2fbatches.db/content", "/v1/files/file-" + "0" * 300, "/v1/batches/%ff", "/live?" + "x" * 900),
    *("/debug/histories?since_s=nan&most=-1", "/debug/arrivals?since_s=1e400", "/debug/requests/%00"),
    *("/console/%2e%2e/x",),
    *("http://localhost/v1/models", "http://[::1", "localhost:80", "/v1/models#x", "/v1/models?" + "&" * 5000, "/\xe9"),
    *("/x" * 40_000, "/v1/files?limit=1&limit=2", "/v1/files?limit=%31", "/v1/models/a%0d%0aX-Injected:%201"),
)  # fmt: skip
# Bytes of trailers after which the connection must be closed, well above the limit of a head (64 KiB).
MANY_TRAILERS = 16 << 20


def hidden(number: int, target: str = "/v1/models") -> bytes:
    """Return a request to hide where no request is expected, identified by `number`."""
    return head("GET", target, [("x-request-id", f"{HIDDEN}{number}")])


def _any_target(draw: random.Random) -> str:
    return draw.choice(TARGETS if draw.random() < 0.6 else _ODD_TARGETS)


# -- heads --------------------------------------------------------------------------------------------------------


def heads(draw: random.Random) -> Case:
    method, target = draw.choice(METHODS), _any_target(draw)
    is_usual = draw.random() < 0.3
    lines = [f"{method} {target} HTTP/1.1".encode("latin-1"), b"Host: localhost"]
    if has_key := draw.random() < 0.7:
        lines.append(b"Authorization: Bearer " + CLIENTS[0].encode())
    if not is_usual:
        draw.choice(_FAULTS)(draw, lines)
    end = draw.choices((b"\r\n", b"\n", b"\r"), (20, 2, 1))[0]
    data = end.join(lines) + 2 * end
    return Case("head", tuple(_cut(draw, data)), pause_s=0.002, is_locked=not has_key and _needs_key(target))


def _needs_key(target: str) -> bool:
    return target.partition("?")[0] not in OPEN_PATHS


def _first(line: bytes) -> Callable[[random.Random, list[bytes]], None]:
    def change(draw: random.Random, lines: list[bytes]) -> None:
        lines[0] = line

    return change


def _insert(*some: bytes) -> Callable[[random.Random, list[bytes]], None]:
    def change(draw: random.Random, lines: list[bytes]) -> None:
        at = draw.randint(1, len(lines))
        lines[at:at] = [draw.choice(some)]

    return change


_FAULTS = (
    _first(b"GET /v1/models HTTP/1.0"),
    _first(b"GET /v1/models HTTP/0.9"),
    _first(b"GET /v1/models HTTP/2.0"),
    _first(b"GET /v1/models"),
    _first(b"GET  /v1/models  HTTP/1.1"),
    _first(b"GET\t/v1/models\tHTTP/1.1"),
    _first(b"PRI * HTTP/2.0"),
    _first(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    _first(b""),
    _first(b"\0" * 50),
    _first(b"GET /\x00 HTTP/1.1"),
    _first(b"A" * 200_000),
    _insert(b"Host: a", b"Host:", b"Host: [::1", b"host: evil.example"),
    _insert(b"Authorization: Bearer " + WRONG.encode(), b"Authorization:", b"authorization: Basic eDp5"),
    _insert(b"no colon", b": no name", b"name : x", b" folded: x", b"\tfolded"),
    _insert(b"x\0y: z", b"x: \0", b"x: a\rb", b"x: \x7f"),
    _insert(b"x: " + b"y" * 70_000, b"\r\n".join([b"x: y"] * 20_000), b"y" * 70_000 + b": x"),
    _insert(b"Connection: keep-alive, close", b"Connection: , ,", b"Connection: Upgrade\r\nUpgrade: websocket"),
    _insert(b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk"),
    _insert(b"Expect: 100-continue", b"Expect: 200-ok", b"TE: trailers", b"Trailer: Authorization"),
    _insert(b"x-request-id: " + b"\xff\xfe", b"x-request-id: a\tb", b"x-request-id: " + b"z" * 500, b"Origin: null"),
    _insert(b"Origin: https://evil.example", b"Origin: https://x\r\nAccess-Control-Request-Method: POST"),
    _insert(b"Range: bytes=0-0", b"Accept-Encoding: gzip;q=nan", b"Content-Encoding: gzip"),
    _insert(b"Cookie: " + b"a=b;" * 5000, b"Via: " + b"1.1 a," * 900, b"Forwarded: for=x"),
    _insert(b"X-Forwarded-For: 127.0.0.1", b"X-Forwarded-Prefix: /health", b"X-Original-URL: /health"),
    _insert(b"X-HTTP-Method-Override: DELETE", b"If-None-Match: *", b"Last-Event-ID: 1", b"Max-Forwards: 0"),
)  # fmt: skip


def _cut(draw: random.Random, data: bytes) -> list[bytes]:
    """Cut data into up to three pieces, or a short one into single bytes."""
    if len(data) < 400 and draw.random() < 0.1:
        return [data[at : at + 1] for at in range(len(data))]
    places = sorted(draw.randrange(len(data) + 1) for _ in range(draw.choice((0, 0, 1, 2))))
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


# -- lengths and chunks -------------------------------------------------------------------------------------------


def lengths(draw: random.Random) -> Case:
    """Return a request of ambiguous length with a smuggled request, which only a server or only a proxy would find."""
    data, number = encoded(COMPLETIONS), draw.randrange(10**6)
    inner = draw.choice((data, chunked(data, 20) + b"0\r\n\r\n", b"0\r\n\r\n", b""))
    framing = [(name, value.replace("RIGHT", str(len(data)))) for name, value in draw.choice(_AMBIGUOUS)]
    return Case("length", (head("POST", COMPLETIONS, [JSON, *framing]) + inner + hidden(number),))


_AMBIGUOUS = (
    [("Content-Length", "RIGHT"), ("Content-Length", "5")],
    [("Content-Length", "5"), ("Content-Length", "RIGHT")],
    [("Content-Length", "RIGHT,5")],
    [("Content-Length", "+RIGHT")],
    [("Content-Length", "-1")],
    [("Content-Length", "1e2")],
    [("Content-Length", "0x10")],
    [("Content-Length", "RIGHT RIGHT")],
    [("Content-Length", "9" * 30)],
    [("Content-Length ", "RIGHT")],
    [("Content-Length", "RIGHT"), ("Transfer-Encoding", "chunked")],
    [("Transfer-Encoding", "chunked"), ("Content-Length", "RIGHT")],
    [("Transfer-Encoding", "identity"), ("Content-Length", "RIGHT")],
    [("Transfer-Encoding", "xchunked")],
    [("Transfer-Encoding", "chunked, identity")],
    [("Transfer-Encoding", "\x0bchunked")],
    [("Transfer-Encoding", "chunked"), ("Transfer-Encoding", "x")],
    [("Transfer-Encoding ", "chunked")],
)


def chunks(draw: random.Random) -> Case:
    data = encoded(COMPLETIONS)
    size = b"%x" % len(data)
    framed = draw.choice(
        (
            chunked(data, 1) + b"0\r\n\r\n",
            b"".join(b"1;%s\r\n%c\r\n" % (b"e" * draw.choice((1, 100, 4000)), byte) for byte in data) + b"0\r\n\r\n",
            size + b';a="b\r\n";c\r\n' + data + b"\r\n0\r\n\r\n",
            b"0x" + size + b"\r\n" + data + b"\r\n0\r\n\r\n",
            b"-" + size + b"\r\n" + data + b"\r\n0\r\n\r\n",
            b"0" * 5000 + size + b"\r\n" + data + b"\r\n0\r\n\r\n",
            b"F" * 17 + b"\r\n" + data,
            b"7FFFFFFFFFFFFFFF\r\n" + data,
            size + b"\n" + data + b"\n0\n\n",
            size + b" \r\n" + data + b"\r\n0\r\n\r\n",
            size + b"\r\n" + data + b"0\r\n\r\n",
            size + b"\r\n" + data + b"\r\n0\r\n",
            size + b"\r\n" + data + b"XX0\r\n\r\n",
            b"\r\n" + size + b"\r\n" + data,
            b"5;" + b"e" * 2_000_000 + b"\r\n",
            b"zz\r\n" + data,
            chunked(b" " * 20_000, 1) + chunked(data, 7) + b"0\r\n\r\n",
            chunked(b" " * 5_000_000, 1 << 16) + b"0\r\n\r\n",
        )
    )
    path = draw.choice((COMPLETIONS, CHAT, "/health", "/nowhere", "/v1/files"))
    method = "GET" if path == "/health" else "POST"
    start = head(method, path, [JSON, ("Transfer-Encoding", "chunked")])
    return Case("chunks", (start, *_cut(draw, framed)), pause_s=0.001)


# -- trailers -----------------------------------------------------------------------------------------------------


def _chunked_post(path: str, trailer: bytes, key: str | None, more: bytes = b"") -> bytes:
    method = "GET" if path in ("/health", "/v1/models") else "POST"
    data = b"x" if method == "GET" else encoded(path)
    return (
        head(method, path, [JSON, ("Transfer-Encoding", "chunked")], key=key)
        + chunked(data, 4000)
        + b"0\r\n"
        + trailer
        + more
    )


def known_trailers(draw: random.Random) -> Case:
    """Return trailers that would change the answer if they were headers."""
    number = draw.randrange(10**6)
    some = draw.sample(
        (
            b"x-request-deadline-ms: junk\r\n",
            b"x-request-deadline-ms: 1\r\n",
            b"x-slo-ttft-ms: junk\r\n",
            b"x-slo-jct-ms: -1\r\n",
            b"Authorization: Bearer " + WRONG.encode() + b"\r\n",
            b"Content-Type: text/plain\r\n",
            b"Host: evil.example\r\n",
            b"Origin: https://evil.example\r\n",
            b"Expect: 100-continue\r\n",
            b"Connection: close\r\n",
            f"x-request-id: {TRAILER}{number}\r\n".encode(),
        ),
        draw.randint(1, 4),
    )
    path = draw.choice((COMPLETIONS, CHAT, "/tokenize", "/v1/models", "/health"))
    data = _chunked_post(path, b"".join(some), CLIENTS[0], b"\r\n")
    return Case("known trailers", (data,), answers=1, statuses=frozenset({200}))


def forbidden_trailers(draw: random.Random) -> Case:
    """Return forbidden or malformed trailers, which must be rejected or ignored."""
    field = draw.choice(
        (b"Content-Length: 3", b"Transfer-Encoding: chunked", b"x: \x01", b"no colon", b": no name", b" x")
    )
    path = draw.choice((COMPLETIONS, CHAT, "/tokenize", "/detokenize"))
    data = _chunked_post(path, field + b"\r\n", CLIENTS[0], b"\r\n")
    return Case("forbidden trailers", (data,), answers=1, statuses=frozenset({200, 400}))


def key_in_trailers(draw: random.Random) -> Case:
    key = b"Authorization: Bearer " + CLIENTS[0].encode() + b"\r\n"
    path = draw.choice((COMPLETIONS, CHAT, "/v1/models", "/detokenize"))
    return Case("a key in trailers", (_chunked_post(path, key, None, b"\r\n"),), answers=1, is_locked=True)


def many_trailers(draw: random.Random) -> Case:
    line = draw.choice((b"A:\r\n", b"A: b\r\n", b"x-%d: y\r\n" % draw.randrange(99), b"A: " + b"y" * 900 + b"\r\n"))
    path, key = draw.choice((("/health", None), ("/v1/models", CLIENTS[1])))
    block = line * (MANY_TRAILERS // 16 // len(line))
    # They are sent after the head was checked, which would reject trailers in the same packet.
    return Case("many trailers", (_chunked_post(path, b"", key), *[block] * 16), waits=True, must_close=True)


def endless_trailer(draw: random.Random) -> Case:
    path = draw.choice(("/health", COMPLETIONS, "/v1/models"))
    start = _chunked_post(path, draw.choice((b"A: ", b"")), CLIENTS[0])
    return Case("an endless trailer", (start, *[b"y" * (MANY_TRAILERS // 16)] * 16), must_close=True)


# -- incomplete requests ------------------------------------------------------------------------------------------


# Requests that are answered before their body.
_UNREAD = (
    ("GET", "/health"),
    ("GET", "/v1/models"),
    ("DELETE", "/v1/files/file-0"),
    ("POST", "/nowhere"),
    ("PUT", COMPLETIONS),
    ("POST", "/v1/batches/batch_0/cancel"),
)


def incomplete(draw: random.Random) -> Case:
    """Return a request with an unfinished body, which is answered before the body."""
    method, target = draw.choice(_UNREAD)
    key = draw.choice((CLIENTS[0], None))
    framing = draw.choice((("Content-Length", "100"), ("Content-Length", "3000000"), ("Transfer-Encoding", "chunked")))
    begun = draw.choice((b"", b"5\r\nabc", b"x" * 50)) if framing[0] == "Content-Length" else b"5\r\nabc"
    data = head(method, target, [framing], key=key) + begun
    return Case("incomplete", (data,), answers=1, must_close=True, is_locked=key is None and _needs_key(target))


def leaving(draw: random.Random) -> Case:
    """Return a client that disconnects during a head, a body or a stream."""
    stream = post(CHAT, encoded(CHAT, stream=True, n=3, max_tokens=100, ignore_eos=True), key=draw.choice(CLIENTS))
    upload = head(
        "POST", "/v1/files", [("Content-Type", "multipart/form-data; boundary=b"), ("Content-Length", "900000")]
    )
    upload += b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n' + b"x" * 300_000
    data = draw.choice((stream, stream, post(COMPLETIONS, encoded(COMPLETIONS, max_tokens=200, n=2)), upload))
    kept = len(data) if draw.random() < 0.5 else draw.randrange(len(data))
    pieces = tuple(_cut(draw, data[:kept]))
    return Case(
        "leaving", pieces, pause_s=draw.uniform(0, 0.5) / (1 + len(pieces)), leaves=draw.choice(("close", "reset"))
    )


def slow(draw: random.Random) -> Case:
    path = draw.choice((CHAT, COMPLETIONS, "/tokenize"))
    data = post(path, encoded(path), key=draw.choice(CLIENTS))
    return Case(
        "slow",
        tuple(data[at : at + 1] for at in range(len(data))),
        pause_s=draw.uniform(0, 0.004),
        answers=1,
        statuses=frozenset({200, 429}),
    )


def pipeline(draw: random.Random) -> Case:
    count = draw.randint(2, 12)
    some = draw.choices(
        (
            head("GET", "/health", key=None),
            head("GET", "/v1/models"),
            post("/tokenize", encoded("/tokenize")),
            post(COMPLETIONS, encoded(COMPLETIONS)),
            post(CHAT, encoded(CHAT, stream=True)),
        ),
        k=count,
    )
    if draw.random() < 0.3:  # many small requests from a client that disconnects early
        return Case("flood", (head("GET", "/health", key=None) * 2000,), leaves=draw.choice(("close", "reset")))
    tail = draw.choice((b"", b"GET /hea"))
    return Case("pipeline", (b"".join(some) + tail,), answers=count, statuses=frozenset({200, 429}))


def upgrades(draw: random.Random) -> Case:
    """Return requests that ask for another protocol. The bodies contain a request, and a usual one may follow."""
    protocol, number = draw.choice(("h2c", "websocket", "h2c, websocket", "TLS/1.0")), draw.randrange(10**6)
    asks = [("Connection", draw.choice(("Upgrade", "Upgrade, HTTP2-Settings", "upgrade"))), ("Upgrade", protocol)]
    inner = draw.choice((hidden(number), encoded(COMPLETIONS), b"\r\n" * 3 + hidden(number)))
    framing = draw.choice((("Content-Length", str(len(inner))), ("Transfer-Encoding", "chunked")))
    body = inner if framing[0] == "Content-Length" else chunked(inner, draw.choice((1, 30, 9000))) + b"0\r\n\r\n"
    data = head("POST", COMPLETIONS, draw.sample([JSON, framing, *asks], 4)) + body
    count = draw.randint(1, 3)
    tail = draw.choice((b"", head("GET", "/health", key=None)))
    pieces = tuple(_cut(draw, data * count + tail))
    return Case("upgrade", pieces, answers=count + bool(tail), statuses=frozenset({200, 400, 429}))


def bodies_with_requests(draw: random.Random) -> Case:
    """Return a body that looks like a request, for a path that does not read it."""
    number = draw.randrange(10**6)
    inner = hidden(number)
    method, target = draw.choice(_UNREAD)
    if draw.random() < 0.5:
        data = head(method, target, [("Content-Length", str(len(inner)))]) + inner
    else:
        data = head(method, target, [("Transfer-Encoding", "chunked")]) + chunked(inner, 30) + b"0\r\n\r\n"
    return Case("a request in a body", (data,), answers=1)
