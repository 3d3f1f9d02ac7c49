from __future__ import annotations

import json
import random
from decimal import Decimal
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from pydantic import Field, TypeAdapter, ValidationError

import skipjoin
from skipjoin.model.grammars import Grammars
from skipjoin.model.tokenizer import Tokenizer, load_tokenizer
from skipjoin.schemas.formats import COMPILED_FORMATS, IGNORED_FORMATS, PATTERN_FORMATS
from skipjoin.schemas.keywords import ENFORCED, IGNORED, REFUSED, Enforced, Refused
from skipjoin.schemas.numbers import exact
from skipjoin.structured_output import GrammarError, StructuredOutput

BIG = 1234567890123456789
INTEGER = {"type": "integer"}
# Words of the compiler that say nothing to a reader.
JARGON = (
    "lookarounds",
    "WordUnicode",
    "NoExtensionBias",
    "Unimplemented",
    "Unsatisfiable",
    "Some(",
    "coerce_one_of",
    "SearchRegex",
)


@cache
def tally() -> tuple[Tokenizer, Grammars]:
    folder = Path(skipjoin.__file__).parent / "builtin/tally"
    tokenizer = load_tokenizer(folder)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    return tokenizer, Grammars(lambda: tokenizer, size, tokenizer.eos_token_ids)


def matcher(schema: Any, whitespace: str | None = None) -> LLMatcher:
    return tally()[1].matcher(StructuredOutput.json(schema, whitespace))


def allows(found: LLMatcher, text: str) -> bool:
    ids = tally()[0].encode(text, add_special_tokens=False)
    found = found.deep_copy()
    return found.try_consume_tokens(ids) == len(ids) and found.is_accepting()


def sample(found: LLMatcher, draw: random.Random, limit: int = 60) -> str | None:
    tokenizer, grammars = tally()
    found, tokens = found.deep_copy(), list[int]()
    while len(tokens) < limit and not found.is_stopped():
        bits = np.unpackbits(np.frombuffer(found.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[: grammars.vocab_size]).tolist()
        if found.is_accepting() and (len(allowed) == 1 or draw.random() < 0.3):
            break
        token = draw.choice([token for token in allowed if token not in tokenizer.eos_token_ids])
        assert found.consume_token(token)
        tokens.append(token)
    assert not found.is_error(), found.get_error()
    return b"".join(map(tokenizer.token_bytes, tokens)).decode() if found.is_accepting() else None


@pytest.mark.parametrize("row", ENFORCED, ids=lambda row: row.names[0])
def test_enforced_keywords_allow_and_exclude_their_examples(row: Enforced) -> None:
    assert any(name in json.dumps(row.example) for name in row.names)
    found = matcher(row.example)
    assert allows(found, json.dumps(row.good, separators=(",", ":")))
    assert not allows(found, json.dumps(row.bad, separators=(",", ":")))
    jsonschema.validate(row.good, row.example)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(row.bad, row.example)
    for seed in range(5):
        if (text := sample(found, random.Random(seed))) is not None:
            jsonschema.validate(json.loads(text), row.example)


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.name)
def test_refused_keywords_are_errors_unless_they_constrain_nothing(row: Refused) -> None:
    with pytest.raises(GrammarError, match="cannot be enforced") as error:
        matcher({"type": "object", "properties": {"p": row.example}, "required": ["p"]})
    assert f'"{row.name}"' in str(error.value) or row.name in ("then", "else", "minContains", "maxContains")
    assert str(error.value).endswith("(at #/properties/p)")
    if row.idle:
        assert row.name in row.idle_example
        matcher(row.idle_example)


def test_ignored_keywords_change_nothing() -> None:
    for row in IGNORED:
        for name in row.names:
            found = matcher({"type": "null", name: {"type": "string"}})
            assert allows(found, "null")
            assert not allows(found, '"a"')


# Texts of formats, and texts that are not.
_TEXTS = {
    "jwt": (["eyJh.eyJz.SflK-_"], ["eyJh.eyJz", "eyJh..a", "a.b.c=", "a.b.c.d"]),
    "relative-json-pointer": (["0", "1/a~0", "2#", "0+1/x", "10"], ["", "01", "-1", "0a", "/a", "0+0"]),
    "uri-reference": (
        ["", "a", "../a?b#c", "//h:1/p", "http://u@[::1]:80/%20", "/a:b", "?q", "mailto:x@y.z", "a/b:c"],
        [" ", "%2", ":a", "a b", "#a#b", "é", "//h:x", "http://[::1", "1:a"],
    ),
    "iri": (["https://exämple.org/ß?é", "urn:a:ü"], ["a", "//a", "", "http://a b", "http://a<"]),
    "iri-reference": (["ü/é#ö", ""], ["ü ", "<"]),
    "uri-template": (["/a{/b*}{?c,d:3}", "{+x}", "{a.b}", ""], ["{", "a}", "{}", "{a,}", "{a:0}", "{a:12345}", " "]),
    "idn-email": (["jörg@exämple.de", "a.b@c"], ["@a", "a@", "a@b@c", "a..b@c", "a b@c", "a@-b"]),
    "idn-hostname": (["bücher.example", "a-b"], ["", "-a", "a-", "a..b", "a b", "a_b"]),
    "name-email": (["Ada B <a@example.com>"], ["a@example.com", "<a@example.com>", "Ada <a>"]),
    "multi-host-uri": (["postgresql://a:b@h1:1,h2:2/d"], ["postgresql:", "h1,h2", "a:// b"]),
    "ipvanyaddress": (
        ["192.0.2.1", "2001:db8::1", "::", "1::", "::1", "1:2:3:4:5:6:7:8"],
        ["256.0.0.1", "1::2::3", "1"],
    ),
    "ipv4network": (["10.0.0.0/8"], ["10.0.0.0", "10.0.0.0/33"]),
    "ipv6interface": (["fe80::1/64"], ["fe80::1", "fe80::/129"]),
}


@pytest.mark.parametrize("name", _TEXTS)
def test_formats_with_a_pattern_have_their_texts(name: str) -> None:
    good, bad = _TEXTS[name]
    found = matcher({"type": "string", "format": name})
    assert [text for text in good if not allows(found, json.dumps(text, ensure_ascii=False))] == []
    assert [text for text in bad if allows(found, json.dumps(text, ensure_ascii=False))] == []


def test_formats_are_enforced_ignored_or_refused() -> None:
    for name, text in COMPILED_FORMATS.items():
        found = matcher({"type": "string", "format": name})
        assert allows(found, json.dumps(text))
        assert not allows(found, '"-"')
    for name in PATTERN_FORMATS:
        assert not allows(matcher({"type": "string", "format": name}), '" -"')
    uuid = COMPILED_FORMATS["uuid"]
    assert [v for v in range(1, 9) if allows(matcher({"format": f"uuid{v}"}), f'"{uuid}"')] == [4]
    for name in IGNORED_FORMATS:
        assert allows(matcher({"type": "string", "format": name}), '"-"')
    # zod names the function that wrote a pattern.
    found = matcher({"type": "string", "format": "ends_with", "allOf": [{"pattern": "^a"}, {"pattern": "b$"}]})
    assert [allows(found, f'"{text}"') for text in ("ab", "a", "b")] == [True, False, False]
    with pytest.raises(GrammarError, match=r'the format "color" is unknown: .*\(at #/items\)'):
        matcher({"type": "array", "items": {"type": "string", "format": "color"}})
    assert allows(matcher({"type": "integer", "format": "color"}), "1")


INTEGERS = st.sampled_from(
    [0, 1, 7, -3, 2**53 - 1, 2**53, 2**53 + 1, -(2**53) - 1, -(2**63), 2**63, 2**64 - 1, BIG, 10**25]
)
NUMBERS = INTEGERS | st.sampled_from([0.1, 0.25, -0.5, 1.0, 1e-7, 1e15, 9007199254740994.0, 1e25, -1e300])
STEPS = st.sampled_from([1, 2, 5, 7, 10, 1000, 5 * 10**9, 2**53 + 1, 0.1, 0.01, 0.25, 0.3, 1e-12])
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


@st.composite
def number_schemas(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["const", "enum", "integer", "number"]))
    if kind == "const":
        return {"const": draw(NUMBERS | st.lists(NUMBERS, max_size=2) | st.fixed_dictionaries({"k": NUMBERS}))}
    if kind == "enum":
        values = draw(st.lists(NUMBERS | st.sampled_from(["a", None, True]), min_size=1, max_size=4))
        return {"enum": values} | draw(st.sampled_from([{}, {"type": "integer"}, {"type": ["number", "string"]}]))
    schema: dict[str, Any] = {"type": kind}
    for bound in draw(st.sets(st.sampled_from(BOUNDS), max_size=2)):
        schema[bound] = draw(NUMBERS)
    if draw(st.integers(0, 3)) == 0:
        schema["multipleOf"] = draw(STEPS)
    return schema


@st.composite
def schemas(draw: st.DrawFn) -> dict[str, Any]:
    inner = draw(number_schemas())
    match draw(st.sampled_from(["plain", "list", "tuple", "object", "map", "anyOf", "ref"])):
        case "list":
            return {"type": "array", "items": inner, "minItems": draw(st.integers(0, 2)), "maxItems": 3}
        case "tuple":
            return {
                "type": "array",
                "prefixItems": [inner, {"type": "null"}],
                "items": draw(st.booleans()),
                "maxItems": 3,
            }
        case "object":
            required = draw(st.sampled_from([[], ["n"], ["m"], ["n", "m"]]))
            return {
                "type": "object",
                "properties": {"n": inner, "m": {"type": "boolean"}},
                "required": required,
                "additionalProperties": draw(st.sampled_from([False, {"type": "null"}])),
            }
        case "map":
            return {"type": "object", "additionalProperties": inner, "required": draw(st.sampled_from([[], ["k"]]))}
        case "anyOf":
            return {"anyOf": [inner, draw(number_schemas()), {"type": "null"}]}
        case "ref":
            return {"$ref": "#/$defs/n", "$defs": {"n": inner}, "description": "x", "default": BIG}
    return inner


def parsed(text: str) -> Fraction:
    """Return a number exactly, unless its exponent is huge, as it may be where there are no bounds."""
    return Fraction(text) if len(text.lower().partition("e")[2]) < 5 else Fraction(1, 2)


def is_valid(value: Any, schema: Any, root: Any) -> bool:
    """Return whether a value, whose decimals are fractions, follows a schema of the strategies above."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        return is_valid(value, root["$defs"]["n"], root)
    if "anyOf" in schema:
        return any(is_valid(value, branch, root) for branch in schema["anyOf"])
    options = schema.get("enum", [schema["const"]] if "const" in schema else [value])
    types = schema.get("type", [kind_of(value)])
    kinds = {kind_of(value)} | ({"number"} if kind_of(value) == "integer" else set())
    if not kinds & {types} if isinstance(types, str) else not kinds & set(types):
        return False
    if not any(is_equal(value, option) for option in options):
        return False
    if kind_of(value) in ("integer", "number"):
        return fits(Fraction(value), schema)
    if isinstance(value, list):
        prefix, items = schema.get("prefixItems", []), schema.get("items", True)
        parts = [*prefix, *[items] * len(value)]
        is_long = len(value) >= schema.get("minItems", 0) and len(value) <= schema.get("maxItems", 9**9)
        return is_long and all(is_valid(one, part, root) for one, part in zip(value, parts, strict=False))
    if isinstance(value, dict):
        known, other = schema.get("properties", {}), schema.get("additionalProperties", True)
        has_all = all(name in value for name in schema.get("required", []))
        return has_all and all(is_valid(one, known.get(name, other), root) for name, one in value.items())
    return True


def kind_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float | Fraction):
        return "integer" if (exact(value) if isinstance(value, float) else value).denominator == 1 else "number"
    return {str: "string", list: "array", dict: "object"}[type(value)]


def is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_equal(one[key], other[key]) for key in one)
    if isinstance(other, float):
        other = exact(other)
    return kind_of(one) == kind_of(other) and one == other


def fits(value: Fraction, schema: dict[str, Any]) -> bool:
    bounds = {name: exact(schema[name]) for name in (*BOUNDS, "multipleOf") if name in schema}
    return (
        value >= bounds.get("minimum", value)
        and value <= bounds.get("maximum", value)
        and value > bounds.get("exclusiveMinimum", value - 1)
        and value < bounds.get("exclusiveMaximum", value + 1)
        and ("multipleOf" not in bounds or (value / bounds["multipleOf"]).denominator == 1)
    )


@settings(max_examples=60, deadline=None)
@given(schemas(), st.sampled_from([None, "[ \n]?"]), st.integers(0, 9))
def test_sampled_numbers_follow_their_schema_exactly(schema: dict[str, Any], whitespace: str | None, seed: int) -> None:
    found, reason = None, "cannot be enforced: "
    try:
        found = matcher(schema, whitespace)
    except GrammarError as error:
        reason = str(error)
    assert reason.startswith("cannot be enforced: ")
    assert not any(word in reason for word in JARGON)
    for number in range(3 if found is not None else 0):
        assert found is not None
        text = sample(found, random.Random(seed * 10 + number))
        if text is not None:
            value = json.loads(text, parse_float=parsed)
            assert is_valid(value, schema, schema), text


@pytest.mark.parametrize(
    "value", [BIG, -BIG, 2**53, 2**53 + 1, 2**64 - 1, 10**30, 1e25, 0.1, 5e-324, [BIG, {"a": BIG}], {"café/x": [[BIG]]}]
)
def test_constants_come_out_as_they_are(value: Any) -> None:
    inner = {"type": "object", "properties": {"v": {"const": value}}, "required": ["v"], "additionalProperties": False}
    for schema, expected in (({"const": value}, value), ({"enum": [value]}, value), (inner, {"v": value})):
        text = sample(matcher(schema), random.Random(0), 400)
        assert text is not None
        assert json.loads(text) == expected


@pytest.mark.parametrize("bound", [1, 100, 0.1, -2.5])
def test_no_number_is_read_as_an_exclusive_bound(bound: float) -> None:
    for keyword, sign in (("exclusiveMaximum", -1), ("exclusiveMinimum", 1)):
        found = matcher({"type": "number", keyword: bound})
        text = format(Decimal(repr(bound)) + sign * Decimal("1e-24"), "f")
        assert float(text) == bound
        assert not allows(found, text)
        assert allows(found, format(Decimal(repr(bound)) + sign * Decimal("0.0625"), "f"))


def test_counts_may_be_written_as_decimals() -> None:
    text = matcher({"type": "string", "minLength": 1.0, "maxLength": 2e0})
    assert [allows(text, f'"{"a" * count}"') for count in range(4)] == [False, True, True, False]
    big = {"type": "integer", "minimum": BIG, "maximum": BIG}
    for item in ({"type": "null"}, big):
        found = matcher({"type": "array", "items": item, "minItems": 1.0, "maxItems": 1.0})
        one = "null" if item is not big else str(BIG)
        assert [allows(found, f"[{','.join([one] * count)}]") for count in range(3)] == [False, True, False]
    for unreached in (2**31 - 1, 2**53 + 1, 10**20):
        assert allows(matcher({"type": "string", "maxLength": unreached}), '"ab"')
        assert allows(matcher({"type": "array", "items": big, "maxItems": unreached}), "[]")
    with pytest.raises(GrammarError, match=r"its numbers must be of a size below 1\.8e308"):
        StructuredOutput.json({"const": float("1e400")})
    for keyword, value in (("maxItems", 2.5), ("minLength", -1), ("maxProperties", True), ("minItems", "1")):
        with pytest.raises(GrammarError, match=f"{keyword} must be a whole number of at least 0, got {value!r}"):
            matcher({keyword: value})


def test_bounds_of_64_bits_hold() -> None:
    low, high = -(2**63), 2**63 - 1
    found = matcher({"type": "integer", "format": "int64", "minimum": low, "maximum": high})
    assert [allows(found, str(number)) for number in (low - 1, low, 0, high, high + 1)] == [
        False,
        True,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("names", "ref"),
    [
        ({"$anchor": "foo"}, "#foo"),
        ({"$id": "#foo"}, "#foo"),
        ({"$id": "x"}, "x"),
        ({"$id": "x"}, "https://example.com/x#"),
        ({"$id": "x", "$anchor": "foo"}, "x#foo"),
        ({"$id": "urn:example:x"}, "urn:example:x"),
        ({}, "https://example.com/s#/$defs/x"),
        ({}, "s#/$defs/x"),
    ],
)
@pytest.mark.parametrize("number", [4, BIG])
def test_references_by_name_lead_to_what_bears_it(names: dict[str, str], ref: str, number: int) -> None:
    """In the schema that bears it, a reference begins at its own root."""
    inner = {"$defs": {"y": {"const": number}}, "$ref": "#/$defs/y"}
    target = inner if names.get("$id", "#")[0] != "#" else {"const": number}
    schema = {
        "$id": "https://example.com/s",
        "$defs": {"x": names | target, "y": {"const": 5}},
        "type": "object",
        "properties": {"p": {"$ref": ref}},
        "required": ["p"],
    }
    found = matcher(schema)
    assert allows(found, f'{{"p":{number}}}')
    assert not allows(found, '{"p":5}')


@pytest.mark.parametrize(
    ("schema", "part"),
    [
        ({"type": "integer", "minimum": 5, "maximum": 3}, "#/properties/p allows no number: minimum 5, maximum 3"),
        ({"type": "integer", "minimum": 1, "maximum": 6, "multipleOf": 7}, "#/properties/p allows no number"),
        ({"type": "integer", "exclusiveMinimum": 2**60, "exclusiveMaximum": 2**60 + 1}, "allows no number"),
        ({"enum": []}, "#/properties/p allows no value: its enum is empty"),
        ({"enum": [BIG], "maximum": 5}, "allows no value"),
        ({"enum": [BIG], "type": "string"}, "allows no value"),
        ({"type": "integer", "minimum": "3"}, "minimum must be a number, got '3'"),
        ({"type": "integer", "multipleOf": 0}, "multipleOf must be above 0, got 0"),
        ({"type": "integer", "minimum": 2**60, "multipleOf": 7}, "multipleOf"),
        ({"allOf": [{"const": BIG}, INTEGER]}, 'the keyword "allOf" together with numbers of 2^53 or more'),
        ({"type": "object", "minProperties": 2}, "additional properties may repeat"),
        ({"oneOf": [{"type": "number"}, INTEGER]}, "must exclude each other"),
        ({"type": "dict"}, 'the type "dict" is unknown: use one of null, boolean'),
        ({"type": "object", "properties": {"n": {"$ref": "#/properties/p"}}, "required": ["n"]}, "no value ends"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, 'each needs another one by the reference to "#"'),
        ({"anyOf": [{"$ref": "#/properties/p"}]}, "no value ends"),
        ({"$ref": "#nope"}, 'the reference to "#nope" has no target in the schema'),
        ({"$ref": "other#/$defs/x"}, 'the reference to "other" leaves the schema'),
        ({"type": "array", "items": 3}, "it must be an object or a boolean, got int"),
        ({"type": "string", "pattern": "a\\"}, "the pattern /a\\/ ends within an escape"),
        ({"type": "object", "patternProperties": {"\\": {}}}, "the pattern /\\/ ends within an escape"),
        ({"type": "string", "pattern": r"\bfoo\b"}, r"the pattern /\bfoo\b/ has \b, which no grammar expresses"),
        ({"type": "string", "pattern": "^a$|b$c"}, "has $ that is not at its end, which no grammar expresses"),
        ({"type": "string", "pattern": "a^"}, "the pattern /a^/ has ^ that is not at its beginning"),
    ],
)
def test_schemas_without_a_value_are_refused_in_words(schema: dict[str, Any], part: str) -> None:
    with pytest.raises(GrammarError) as error:
        matcher({"type": "object", "properties": {"p": schema}, "required": ["p"]})
    assert part in str(error.value)
    assert not any(word in str(error.value) for word in JARGON)
    is_value = "must be a JSON schema" not in str(error.value) and "allows no" in str(error.value)
    if is_value:  # an alternative without a value is none
        assert allows(matcher({"anyOf": [schema, {"type": "null"}]}), "null")


def test_an_expression_does_not_end_within_an_escape() -> None:
    """The compiler would leave out the backslash."""
    with pytest.raises(GrammarError, match="ends within an escape"):
        tally()[1].matcher(StructuredOutput(kind="regex", text="a\\"))
    assert allows(tally()[1].matcher(StructuredOutput(kind="regex", text="a\\\\")), "a\\")


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"properties": {"a": INTEGER}}, '{"a":1,"b":"x"}', ['{"a":1,"\\u0061":"x"}', '{"\\u0061":"x"}']),
        ({"required": ["a/b"]}, '{"a/b":1,"b":"x"}', ['{"a/b":1,"a\\/b":1}', '{"a/b":1,"\\u0061/b":1}']),
        (
            {"properties": {"a": INTEGER}, "additionalProperties": {"type": "string"}},
            '{"a":1,"b":"x"}',
            ['{"a":1,"\\u0061":"x"}', '{"a":1,"b":1}'],
        ),
        (
            {"properties": {"é\n": INTEGER}},
            '{"é\\n":1}',
            ['{"\\u00e9\\n":"x"}', '{"é\\u000a":"x"}', '{"é\\u000A":"x"}'],
        ),
        ({"properties": {"😀": INTEGER}}, '{"b":"x"}', ['{"\\ud83d\\ude00":"x"}', '{"\\uD83D\\uDE00":"x"}']),
        (
            {"properties": {"id": {"const": BIG}}},
            '{"b":"\\u0001"}',
            ['{"\\u0069d":"x"}', '{"i\\u0064":1}'],
        ),
        (
            {"patternProperties": {"^x": INTEGER}, "additionalProperties": False},
            '{"xa":1}',
            ['{"\\u0078a":"x"}', '{"xa":"x"}'],
        ),
        (
            {"allOf": [{"properties": {"a": INTEGER}}, {"required": ["b"]}]},
            '{"a":1,"b":2,"c":3}',
            ['{"b":2,"\\u0061":"x"}'],
        ),
    ],
)
def test_named_properties_have_one_spelling(schema: dict[str, Any], good: str, bad: list[str]) -> None:
    for outer, before, after in (({}, "", ""), ({"type": "array"}, "[", "]"), ({"type": "object"}, '{"o":', "}")):
        inner = {"type": "object", **schema}
        whole = {"items": inner, "properties": {"o": inner}, **outer} if outer else inner
        found = matcher(whole)
        assert allows(found, before + good + after)
        for text in bad:
            json.loads(text)
            assert not allows(found, before + text + after), text


@pytest.mark.parametrize("names", [["a"], ["a", "ab"], ["", "b"], ["a/b", "x.y"], ["é\n"]])
def test_an_older_compiler_excludes_names_by_a_pattern(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    monkeypatch.setattr("skipjoin.schemas.keys._has_exact_keys", lambda: False)
    found = matcher(
        {"properties": dict.fromkeys(names, INTEGER), "additionalProperties": {"type": "null"}, "type": "object"}
    )
    for name in ("a", "ab", "abc", "b", "", "x", "a/b", "x.yz", "é\n", "é"):
        assert allows(found, "{" + json.dumps(name, ensure_ascii=False) + ":null}") == (name not in names)
    with pytest.raises(GrammarError, match=r"need llguidance 1.8: .*\(at #\)"):
        matcher({"type": "object", "patternProperties": {"^a": True}, "additionalProperties": INTEGER})


# As pydantic 2.12 and 2.13 write them.
START = r"^(?!^[-+.]*$)[+-]?0*"
DECIMALS: list[tuple[dict[str, int], str]] = [
    ({}, r"\d*\.?\d*$"),
    ({"decimal_places": 2}, r"\d*\.?\d{0,2}0*$"),
    ({"max_digits": 3}, r"(?:\d{0,3}|(?=[\d.]{1,4}0*$)\d*\.\d*0*$)"),
    ({"max_digits": 4, "decimal_places": 2}, r"(?:\d{0,2}|(?=[\d.]{1,5}0*$)\d{0,2}\.\d{0,2}0*$)"),
    ({"max_digits": 2, "decimal_places": 2}, r"(?:\d{0,0}|(?=[\d.]{1,3}0*$)\d{0,0}\.\d{0,2}0*$)"),
]


@pytest.mark.parametrize(
    ("bounds", "pattern"), DECIMALS, ids=lambda value: str(value) if isinstance(value, dict) else ""
)
def test_decimals_of_pydantic_are_numbers(bounds: dict[str, int], pattern: str) -> None:
    numbers = TypeAdapter[Decimal](Annotated[Decimal, Field(**bounds)])  # type: ignore[arg-type]
    found = matcher({"type": "string", "pattern": START + pattern})
    for text in ("0", "-0.5", "+12", "1.25", "123.4", "0.125", "99.99", "1234", "x", "", ".", "-", "1.2.3", "12x"):
        try:
            numbers.validate_python(text)
        except ValidationError:
            assert not allows(found, json.dumps(text)), text
        else:
            assert allows(found, json.dumps(text)), text


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        # Passwords, hostnames and e-mail addresses of zod, and its durations.
        ({"pattern": r"^(?=.*[a-z])(?=.*\d)[a-z\d]{3,}$"}, ["ab1", "1ab"], ["abc", "123", "a1"]),
        ({"pattern": r"^(?=.{1,4}\.?$)[a-z]+(?:\.[a-z]+)*\.?$"}, ["a.b", "a.bc."], ["a.bcd", ".a"]),
        (
            {
                "format": "email",
                "pattern": r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)"
                r"+[A-Za-z]{2,}$",
            },
            ["a.b+c@example.com", "_@a.io"],
            [".a@example.com", "a..b@example.com", "a.@example.com", "a@b"],
        ),
        (
            {
                "format": "duration",
                "pattern": r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?"
                r"(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$",
            },
            ["P2W", "P1Y2M3DT4H5M6S", "PT1M"],
            ["P", "PT", "P1DT", "1D"],
        ),
        ({"$ref": "#/$defs/Page[a]", "$defs": {"Page[a]": {"const": "x"}}}, ["x"], ["y"]),
        ({"anyOf": [{"not": {}}, {"const": "x"}]}, ["x"], ["y"]),
    ],
)
def test_what_generators_of_schemas_write_is_enforced(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    found = matcher({"type": "string", **schema})
    assert [text for text in good if not allows(found, json.dumps(text))] == []
    assert [text for text in bad if allows(found, json.dumps(text))] == []


def test_records_of_names_may_require_them() -> None:
    names = {"type": "string", "enum": ["a", "b"]}
    found = matcher({"type": "object", "propertyNames": names, "required": ["a", "b"]})
    assert [allows(found, text) for text in ('{"a":1,"b":2}', '{"a":1}')] == [True, False]


def test_names_that_a_pattern_matches_end_a_schema_of_itself() -> None:
    schema = {"patternProperties": {"^x$": INTEGER}, "additionalProperties": {"$ref": "#"}, "required": ["x"]}
    found = matcher({"type": "object", **schema})
    assert [allows(found, text) for text in ('{"x":1}', '{"x":1,"y":{"x":2}}', '{"x":"a"}')] == [True, True, False]


@pytest.mark.parametrize("pattern", ["[ ]?", "\\s*", "[\n\t ]*", "(?:\n {2})?"])
def test_white_space_of_a_pattern_is_white_space_of_json(pattern: str) -> None:
    found = matcher({"type": "array"}, pattern)
    assert all(allows(found, text) == text.isascii() for text in ("[1,2]", "[\u00a01]"))
    for wrong in ("x?", "[^ ]", ".*", "[ -~]"):
        with pytest.raises(GrammarError, match="nothing but white space of JSON"):
            matcher({}, wrong)


def test_alternatives_that_exclude_each_other_are_compared_through_references() -> None:
    """As pydantic writes discriminated unions."""
    kinds = [{"type": "object", "properties": {"k": {"const": k}}, "required": ["k"]} for k in (1, "a")]
    defs = {"A": kinds[0], "B": kinds[1]}
    refs = [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]
    found = matcher({"$defs": defs, "oneOf": refs, "discriminator": {"propertyName": "k"}})
    assert [allows(found, text) for text in ('{"k":1}', '{"k":"a"}', '{"k":2}')] == [True, True, False]
    with pytest.raises(GrammarError, match="oneOf"):
        matcher({"$defs": {**defs, "B": {**kinds[1], "required": []}}, "oneOf": refs})
