from __future__ import annotations

import random

from fuzz.case import CLIENTS, Case, Headers, as_bytes, chunked, head

_BOUNDARIES = ("b", "-" * 70, "a b", "'()+_,-./:=?", "x" * 3000, "", "\u20ac", "--", "b\tb")
_NAMES = (
    '"f.jsonl"',
    '"../../etc/passwd"',
    '""',
    '"a\0b"',
    '"' + "n" * 3000 + '"',
    '"\u202e"',
    "unquoted",
    '"a\\"b"',
    '"%00"',
)
_PART = b'Content-Disposition: form-data; name="a"'
_LINE = b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":"abc","max_tokens":1}}\n'


def form_case(draw: random.Random) -> Case:
    boundary = "b" if draw.random() < 0.7 else draw.choice(_BOUNDARIES)
    parts = _parts(draw)
    mark = b"--" + as_bytes(boundary)
    newline = draw.choices((b"\r\n", b"\n", b"\r"), (30, 1, 1))[0]
    data = b"".join(mark + newline + lines + newline + newline + content + newline for lines, content in parts)
    data += draw.choices(
        (mark + b"--" + newline, mark + b"--", mark, b"", mark + b"--junk" + b"x" * 5000), (20, 3, 2, 1, 1)
    )[0]
    if draw.random() < 0.1:
        data = draw.choice((b"preamble" * 1000, newline, b"\0", mark)) + data
    kind = (
        "multipart/form-data; boundary="
        + draw.choices((boundary, f'"{boundary}"', boundary + "x", ""), (20, 5, 1, 1))[0]
    )
    if draw.random() < 0.05:
        kind = draw.choice(
            (
                "multipart/mixed; boundary=b",
                "multipart/form-data",
                "application/json",
                "multipart/form-data; boundary*=utf-8''b",
                ";" * 3000,
            )
        )
    headers: Headers = [("Content-Type", kind)]
    key = draw.choice(CLIENTS)
    if draw.random() < 0.3:
        start = head("POST", "/v1/files", [*headers, ("Transfer-Encoding", "chunked")], key=key)
        return Case(
            "form in chunks",
            (start, chunked(data, draw.choice((1, 17, 4000)) if len(data) < 5000 else 60_000), b"0\r\n\r\n"),
            answers=1,
        )
    length = len(data) + draw.choices((0, 7, -7), (20, 1, 1))[0]
    start = head("POST", "/v1/files", [*headers, ("Content-Length", str(length))], key=key)
    return Case("form", (start, data), answers=int(length == len(data)))


def _parts(draw: random.Random) -> list[tuple[bytes, bytes]]:
    parts = [_field("purpose", b"batch"), _file(draw)]
    for _ in range(draw.choice((0, 1, 1, 2))):
        at = draw.randrange(len(parts) + 1)
        parts[at:at] = draw.choice(
            (
                [_field("purpose", draw.choice((b"batch", b"fine-tune", b"", b"\xff\xfe", b"x" * 2000)))],
                [_field("expires_after[anchor]", b"created_at")],
                [_field("expires_after[seconds]", draw.choice((b"3600", b"-1", b"1e9", b"9" * 500, b"\xd9\xa1", b"")))],
                [_field(draw.choice(("", "whatever", "file", "n" * 2000, "purpose\0")), b"x")],
                [_file(draw)],
                [(b"", b"a part without headers")],
                [(b"X: " + b"y" * 300_000, b"a huge header")],
                [(b"\r\n".join([b"X: y"] * 3000), b"many headers")],
                [(b"no colon", b"")],
                [(b": no name\r\nContent-Disposition: form-data", b"")],
                [(_PART + b'; name="file"; ' + b";" * 3000, b"")],
                [(b"Content-Disposition: form-data; name*=utf-8''file; filename*=utf-8''%00%ff", b"x")],
                [(_PART + b"\r\nContent-Type: multipart/mixed; boundary=b", b"--b\r\n\r\n\r\n--b--")],
                [(_PART + b"\r\nContent-Transfer-Encoding: base64", b"eA==")],
                [_field(f"f{number}", b"") for number in range(draw.choice((14, 15, 16, 400)))],
                [_field("a", b"\r\n--b\r\n"), _field("b", b"\r\n--" * 20_000)],
            )
        )  # fmt: skip
    if draw.random() < 0.2:
        del parts[draw.randrange(len(parts))]
    if draw.random() < 0.2:
        draw.shuffle(parts)
    return parts


def _field(name: str, value: bytes) -> tuple[bytes, bytes]:
    return f'Content-Disposition: form-data; name="{name}"'.encode(), value


def _file(draw: random.Random) -> tuple[bytes, bytes]:
    name = as_bytes(draw.choice(_NAMES))
    content = draw.choice((_LINE, _LINE, b"", b"\0" * 100, b"\r\n--" * 10_000, draw.randbytes(3000), _LINE * 10_000))
    return (
        b'Content-Disposition: form-data; name="file"; filename=' + name + b"\r\nContent-Type: application/jsonl",
        content,
    )
