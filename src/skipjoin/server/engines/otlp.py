"""Spans as protobuf messages of OTLP (opentelemetry-proto, `trace.v1` and `common.v1`).

Written by hand because the protobuf library takes three times as long, and the SDK's exporter twenty times. A message
is the concatenation of its fields, so encoded spans can be joined later.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

# Types of attributes that are exported. Integers are at least zero.
Value = str | int | float | tuple[str, ...]

_INTERNAL, _SERVER = 1, 2
# `SpanFlags`: whether the parent is in another process is known, and it is.
_KNOWN, _REMOTE = 0x100, 0x300
# Fields 1 and 2 (trace and span), 4 (parent), 7 and 8 (begin and end), 16 (flags).
_IDS = struct.Struct("<2s16s2s8s")
_PARENT = struct.Struct("<2s8s")
_TIMES = struct.Struct("<sQsQ2sI")
_DOUBLE = struct.Struct("<d")


class SpanIds(NamedTuple):
    """Trace of a span (16 bytes), the span itself and its parent (8 bytes each)."""

    trace: bytes
    span: bytes
    parent: bytes | None


def encode_span(
    name: str, ids: SpanIds, begin_ns: int, end_ns: int, attributes: bytes, *, is_server: bool = False
) -> bytes:
    """Return a span as a field of `ScopeSpans`.

    Args:
        is_server: Whether this is the first span of this process, whose parent is in a client.
    """
    trace, span, parent = ids
    message = (
        _IDS.pack(b"\x0a\x10", trace, b"\x12\x08", span)
        + (b"" if parent is None else _PARENT.pack(b"\x22\x08", parent))
        + _name_and_kind(name, _SERVER if is_server else _INTERNAL)
        + _TIMES.pack(b"\x39", begin_ns, b"\x41", end_ns, b"\x85\x01", _REMOTE if is_server and parent else _KNOWN)
        + attributes
    )
    return b"\x12" + _varint(len(message)) + message


def encode_attribute(key: str, value: Value) -> bytes:
    return _attribute(9, key, value)


# For values that few spans do not share with others.
encode_frequent_attribute = lru_cache(maxsize=4096)(encode_attribute)


def encode_request(resource: Mapping[str, Value], scope: str, version: str, spans: Iterable[bytes]) -> bytes:
    described = _field(1, b"".join(_attribute(1, key, value) for key, value in resource.items()))
    named = _field(1, _field(1, scope.encode()) + _field(2, version.encode()))
    return _field(1, described + _field(2, named + b"".join(spans)))


@lru_cache(maxsize=64)
def _name_and_kind(name: str, kind: int) -> bytes:
    return _field(5, name.encode()) + b"\x30" + _varint(kind)


def _attribute(number: int, key: str, value: Value) -> bytes:
    return _field(number, _field(1, key.encode()) + _field(2, _any_value(value)))


def _any_value(value: Value) -> bytes:
    if isinstance(value, str):
        return _field(1, value.encode())
    if isinstance(value, int):
        return b"\x18" + _varint(value)
    if isinstance(value, float):
        return b"\x21" + _DOUBLE.pack(value)
    return _field(5, b"".join(_field(1, _any_value(one)) for one in value))


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    if value < 0x80:
        return value.to_bytes(1)
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
