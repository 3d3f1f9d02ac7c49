from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Mapping
from typing import Any

from fuzz.case import BODIES, CHAT, CLIENTS, COMPLETIONS, JSON, Case, chunked, head, post
from skipjoin.server.api.chat_body import ChatRequest, DetokenizeRequest, TokenizeRequest
from skipjoin.server.api.protocol import CompletionRequest
from skipjoin.server.batches.routes import BatchRequest

MODELS = {
    COMPLETIONS: CompletionRequest,
    CHAT: ChatRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/batches": BatchRequest,
}
SCHEMAS: dict[str, dict[str, Any]] = {path: model.model_json_schema() for path, model in MODELS.items()}
# Unexpected JSON texts, small and large.
_ODD = (
    *("NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1e-400", "-0", "1e308", "0.1", "-1", "0", "9" * 400),
    *(str(number) for number in (2**31, 2**32, 2**53 + 1, 2**63, 2**64, -(2**63) - 1)),
    *("null", "true", "false", "[]", "{}", "[[]]", "[null]", '{"":0}', '{"a":{}}', '{"__proto__":{"a":1}}', "[1,2.5]"),
    *('""', '"\\ud800"', '"\\udc00\\ud800"', '"\\u0000"', '"a\\u0000b"', '"\\u202e"', '" "', '"\\n"', '"\ufeff"'),
    *('"{{ 7*7 }}"', '"<|endoftext|>"', '"../../etc/passwd"', '"\U0001f600"', '"%s%n"', '"$ref"', '"a"', '"1"'),
    '"' + "x" * 600 + '"',
    *("[" * 40 + "]" * 40, '{"a":' * 40 + "0" + "}" * 40),
)  # fmt: skip
_HUGE: tuple[Callable[[], str], ...] = (
    lambda: "[" * 100_000,
    lambda: "[" * 2000 + "]" * 2000,
    lambda: '{"a":' * 2000 + "0" + "}" * 2000,
    lambda: '"' + "ab " * 1_000_000 + '"',
    lambda: '"' + "\\u20ac" * 100_000 + '"',
    lambda: "[" + "0," * 200_000 + "0]",
    lambda: "[" + '"",' * 200_000 + '""]',
    lambda: "[" + "{}," * 100_000 + "{}]",
    lambda: "{" + ",".join(f'"{number}":1' for number in range(100_000)) + "}",
    lambda: "9" * 1_000_000,
)
_WRONG_TYPES = ("text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-16", "", "a" * 3000)
# Probabilities of odd values, of huge ones among them, and of invalid JSON.
_ODD_SHARE, _HUGE_SHARE, _BROKEN_SHARE = 0.05, 0.04, 0.05


def odd(draw: random.Random) -> str:
    if draw.random() < _HUGE_SHARE:
        return draw.choice(_HUGE)()
    return draw.choice(_ODD)


def allowed(draw: random.Random, schema: Mapping[str, Any], definitions: Mapping[str, Any], depth: int = 0) -> str:
    """Return a JSON text that a schema allows, except for odd values in some places."""
    if draw.random() < _ODD_SHARE:
        return odd(draw)
    if "$ref" in schema:
        return allowed(draw, definitions[schema["$ref"].rpartition("/")[2]], definitions, depth)
    if some := schema.get("anyOf") or schema.get("oneOf"):
        return allowed(draw, draw.choice(some), definitions, depth)
    if "enum" in schema or "const" in schema:
        return json.dumps(draw.choice(schema.get("enum", [schema.get("const")])))
    kind = schema.get("type")
    if kind == "object":
        return _object(draw, schema, definitions, depth)
    if kind == "array":
        count = draw.randint(schema.get("minItems", 0), min(4, schema.get("maxItems", 4)))
        return (
            "[" + ",".join(allowed(draw, schema.get("items", {}), definitions, depth + 1) for _ in range(count)) + "]"
        )
    if kind == "string":
        size = draw.randint(schema.get("minLength", 0), min(12, schema.get("maxLength", 12)))
        return json.dumps("".join(draw.choices(string.ascii_letters + " €\n", k=size)))
    if kind in ("integer", "number"):
        return _number(draw, schema)
    return {"boolean": draw.choice(("true", "false")), "null": "null"}.get(kind or "", odd(draw))


def _number(draw: random.Random, schema: Mapping[str, Any]) -> str:
    low = schema.get("minimum", schema.get("exclusiveMinimum", -10))
    high = schema.get("maximum", 1000)
    value = draw.choice((low, high, draw.uniform(low, min(high, low + 20)), draw.uniform(low, high)))
    return str(int(value)) if schema["type"] == "integer" else json.dumps(float(value))


def _object(draw: random.Random, schema: Mapping[str, Any], definitions: Mapping[str, Any], depth: int) -> str:
    fields = schema.get("properties")
    if fields is None:
        value = schema.get("additionalProperties") or next(iter(schema.get("patternProperties", {"": {}}).values()))
        value = value if isinstance(value, dict) else {}
        names = [draw.choice((str(draw.randint(0, 600)), "name", "")) for _ in range(draw.randint(0, 3))]
        return (
            "{" + ",".join(f"{json.dumps(name)}:{allowed(draw, value, definitions, depth + 1)}" for name in names) + "}"
        )
    some = draw.sample(list(fields), min(len(fields), draw.randint(0, 3 if depth else 4)))
    names = dict.fromkeys([*schema.get("required", ()), *some])
    return "{" + ",".join(f'"{name}":{allowed(draw, fields[name], definitions, depth + 1)}' for name in names) + "}"


def body(draw: random.Random, path: str) -> bytes:
    """Return a valid body for a path with a few fields changed, rarely invalid JSON."""
    schema = SCHEMAS[path]
    fields, definitions = schema["properties"], schema.get("$defs", {})
    texts = {name: json.dumps(value) for name, value in BODIES[path].items()}
    for name in draw.sample(list(fields), min(len(fields), draw.randint(0, 4))):
        texts[name] = odd(draw) if draw.random() < 0.15 else allowed(draw, fields[name], definitions)
    pairs = list(texts.items())
    if draw.random() < 0.15:
        pairs.append((draw.choice([*texts, "whatever", "", "\ud800"]), odd(draw)))
    if draw.random() < 0.1:
        draw.shuffle(pairs)
        del pairs[0]
    text = "{" + ",".join(f"{json.dumps(name)}:{value}" for name, value in pairs) + "}"
    data = text.encode("utf-8", "surrogatepass")
    return broken(draw, data) if draw.random() < _BROKEN_SHARE else data


def broken(draw: random.Random, data: bytes) -> bytes:
    at = draw.randrange(len(data) + 1)
    return draw.choice(
        (
            data[:at],
            data[:at] + draw.randbytes(4) + data[at:],
            b"\xef\xbb\xbf" + data,
            data.decode("utf-8", "replace").encode("utf-16"),
            data[:at] + b"\0" + data[at:],
            data + b"\0",
            data + data,
            b"[" + data + b"]",
            b"null",
            b"",
            draw.randbytes(200),
            b" " * 100_000 + data,
            data.replace(b":", b"=", 1),
            data.replace(b'"', b"'"),
            b"/* */" + data,
        )
    )


_SLO_HEADERS = (
    "x-request-deadline-ms",
    "x-slo-ttft-ms",
    "x-slo-tpot-ms",
    "x-slo-jct-ms",
    "x-request-id",
    "idempotency-key",
)
_HEADER_VALUES = ("", "0", "1", "-1", "1e3", "nan", "inf", "604800000", "9" * 50, "\u0661", "a b", "1\t2", "x" * 5000)


def refused(draw: random.Random) -> Case:
    """Return a request with a body that every endpoint must reject."""
    data = draw.choice(_REFUSED) if draw.random() < 0.7 else draw.randbytes(200)
    path = draw.choice((COMPLETIONS, CHAT, "/tokenize", "/detokenize"))
    return Case(f"refused {path}", (post(path, data),), answers=1, statuses=frozenset({400}))


_REFUSED = (
    b'{"prompt": "\\ud800"}',
    b'{"prompt": ' + b"[" * 100_000,
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "temperature": -Infinity}',
    b'{"prompt": "a", "n": 1e400}',
    b'{"logit_bias": {' + b",".join(b'"%d": 1' % token for token in range(5000)) + b"}}",
    b'{"prompt": "' + b"x" * 3_000_000 + b'", "max_tokens": 1e9}',
)


def json_case(draw: random.Random) -> Case:
    """Return a request with a random body, with Content-Length or in chunks."""
    path = draw.choice(list(MODELS))
    data = body(draw, path)
    kind = JSON if draw.random() < 0.95 else ("Content-Type", draw.choice(_WRONG_TYPES))
    headers = [kind]
    if draw.random() < 0.2:
        headers.append((draw.choice(_SLO_HEADERS), draw.choice(_HEADER_VALUES)))
    key = draw.choice(CLIENTS)
    if draw.random() < 0.8:
        return Case(f"json {path}", (post(path, data, headers, key=key),), answers=1)
    framed = head("POST", path, [*headers, ("Transfer-Encoding", "chunked")], key=key)
    return Case(
        f"json in chunks {path}",
        (framed, chunked(data, draw.randint(len(data) // 200 + 1, 70_000)), b"0\r\n\r\n"),
        answers=1,
    )
