from __future__ import annotations

import json
import random

from fuzz.case import CHAT, COMPLETIONS, encoded
from fuzz.values import body, broken, odd

_FIELDS = ("custom_id", "method", "url", "body")


def jsonl(draw: random.Random, path: str) -> bytes:
    """Return a batch file for an endpoint: a few lines, most of them valid, with odd bodies, fields and line ends."""
    lines = [_line(draw, path, number) for number in range(draw.randint(1, 6))]
    if draw.random() < 0.6:  # otherwise a file whose lines run
        fault = draw.choice(_FAULTS)
        at = draw.randrange(len(lines) + 1)
        lines[at:at] = fault(draw, path)
    end = draw.choices((b"\n", b"\r\n", b"\n\n", b"\r"), (20, 4, 3, 1))[0]
    start = draw.choices((b"", b"\xef\xbb\xbf", b"\xff\xfe", b"\n"), (20, 2, 1, 1))[0]
    return start + end.join(lines) + draw.choice((b"", end))


def _line(draw: random.Random, path: str, number: int) -> bytes:
    data = encoded(path) if draw.random() < 0.7 else body(draw, path)
    if len(data) > 20_000 or b"\n" in data or b"\r" in data:
        data = encoded(path)
    return b'{"custom_id":"%d","method":"POST","url":"%s","body":%s}' % (number, path.encode(), data)


def _with_odd_field(draw: random.Random, path: str) -> list[bytes]:
    fields = {"custom_id": '"odd"', "method": '"POST"', "url": json.dumps(path), "body": encoded(path).decode()}
    name = draw.choice(_FIELDS)
    if draw.random() < 0.2:
        del fields[name]
    else:
        fields[name] = odd(draw)
    text = "{" + ",".join(f'"{name}":{value}' for name, value in fields.items()) + "}"
    return [text.encode("utf-8", "surrogatepass").replace(b"\n", b" ")]


_FAULTS = (
    _with_odd_field,
    _with_odd_field,
    lambda draw, path: [_line(draw, path, 0)] * 2,
    lambda draw, path: [broken(draw, _line(draw, path, 90))],
    lambda draw, path: [_line(draw, CHAT if path == COMPLETIONS else COMPLETIONS, 91)],
    lambda draw, path: [
        b'{"custom_id":"92","method":"POST","url":"%s","body":%s}' % (path.encode(), encoded(path, stream=True))
    ],
    lambda draw, path: [b""] * draw.choice((1, 60_000, 200_000)),
    lambda draw, path: [b" \t\x0b\x0c"] * 10,
    lambda draw, path: [b"\0" * 500],
    lambda draw, path: [b"[" * 5_000_000],
    lambda draw, path: [b'{"a":' * 100_000],
    lambda draw, path: [b"x" * 6_000_000],
    lambda draw, path: [
        b'{"custom_id":"%d","method":"POST","url":"%s","body":{}}' % (at, path.encode()) for at in range(100, 60_200)
    ],
    lambda draw, path: [b"0"] * 500,
    lambda draw, path: [json.dumps({"custom_id": "\u2028" * 512, "method": "POST", "url": path, "body": {}}).encode()],
)
