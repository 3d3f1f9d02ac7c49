from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from test_message_reader import Read, read

from skipjoin.formats.grammar import CallSchema, Marks, after_reasoning, calls_grammar
from skipjoin.formats.table import FORMATS, GLM, LLAMA, QWEN_CODER, OutputFormat
from skipjoin.structured_output import GrammarError, StructuredOutput

WITH_CALLS = [row for row in FORMATS if row.calls is not None]
STRICT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTIONS = [CallSchema("f", STRICT, is_strict=True), CallSchema("g", {"type": "object", "if": {}})]
OBJECT = StructuredOutput.json({"type": "object"})
F, G, BAD = ("f", '{"a": 1}'), ("g", "{}"), ("f", '{"a": 1, "b": 1}')

Accepts = Callable[[StructuredOutput, str], bool]


class Bytes:
    bos_token_id, eos_token_id = None, 256

    def __init__(self, marks: tuple[str, ...]) -> None:
        self.ids = {mark: 257 + number for number, mark in enumerate(marks)}
        self.special_token_ids = [256, *self.ids.values()]
        self.tokens = [
            *(bytes([byte]) for byte in range(256)),
            *(b"\xff" + mark.encode() for mark in ("<eos>", *marks)),
        ]

    def __call__(self, text: str) -> list[int]:
        if not self.ids:
            return list(text.encode())
        pieces = re.split(f"({'|'.join(map(re.escape, sorted(self.ids, key=len, reverse=True)))})", text)
        return [token for piece in pieces for token in ([self.ids[piece]] if piece in self.ids else piece.encode())]


@pytest.fixture(params=WITH_CALLS, ids=lambda row: row.name)
def row(request: pytest.FixtureRequest) -> OutputFormat:
    return request.param


@pytest.fixture(params=[True, False], ids=["tokens", "texts"])
def vocabulary(request: pytest.FixtureRequest, row: OutputFormat) -> Bytes:
    """Vocabularies in which the marks are special tokens, and in which they are text."""
    return Bytes(row.markers if request.param else ())


@pytest.fixture
def marks(row: OutputFormat, vocabulary: Bytes) -> Marks:
    return Marks(row, vocabulary.ids.get)


@pytest.fixture
def accepts(vocabulary: Bytes) -> Accepts:
    tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=len(vocabulary.tokens), eos_token=[256])

    def check(grammar: StructuredOutput, text: str) -> bool:
        matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar.text), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = vocabulary(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return check


def written(row: OutputFormat, *calls: tuple[str, str]) -> str:
    texts = [
        row.calls.before + name + row.calls.middle + arguments_of(row, arguments) + row.calls.after
        for name, arguments in calls
    ]
    return row.calls.begin + (row.calls.between or "").join(texts) + row.calls.end


def arguments_of(row: OutputFormat, arguments: str) -> str:
    if (tags := row.calls.tags) is None:
        return arguments
    values = json.loads(arguments).items()
    texts = ((key, value if isinstance(value, str) else json.dumps(value)) for key, value in values)
    return "".join(tags.open + key + tags.middle + text + tags.close for key, text in texts)


def reasoning(row: OutputFormat) -> str:
    return row.think.open + "hm <b>" + row.think.close + row.after_think if row.think else ""


def test_there_must_be_a_call(row: OutputFormat, marks: Marks, accepts: Accepts) -> None:
    grammar = calls_grammar(row, marks, FUNCTIONS, is_parallel=True, is_thinking=False, must_call=True)
    one, two = written(row, F), written(row, F, G)
    assert read(row, [one]) == Read("", "", [F])
    for text in (one, reasoning(row) + one, reasoning(row) + "\n\n" + one):
        assert accepts(grammar, text)
    is_parallel = row.calls is not None and row.calls.between is not None
    assert accepts(grammar, two) == is_parallel
    for text in (written(row, BAD), "", "x", "x" + one, reasoning(row) + "x", one + "x"):
        assert not accepts(grammar, text)
    if is_parallel:
        assert read(row, [two]) == Read("", "", [F, G])
        single = calls_grammar(row, marks, FUNCTIONS, is_parallel=False, is_thinking=False, must_call=True)
        assert accepts(single, one)
        assert not accepts(single, two)


def test_arguments_are_objects_whatever_else_a_schema_allows(row: OutputFormat, marks: Marks, accepts: Accepts) -> None:
    if row.calls is None or row.calls.tags is not None:
        pytest.skip("arguments between tags have names")

    def grammar(schema: dict[str, Any]) -> StructuredOutput:
        functions = [CallSchema("f", schema, is_strict=False)]
        return calls_grammar(row, marks, functions, is_parallel=False, is_thinking=False, must_call=True)

    call = written(row, ("f", "{}"))
    for schema in ({"description": "Anything."}, {"type": ["object", "null"]}):
        assert accepts(grammar(schema), call)
        assert not accepts(grammar(schema), call.replace("{}", "null"))
    with pytest.raises(GrammarError, match='parameters of the type object: those of f are of "string"'):
        grammar({"type": "string"})


def test_there_may_be_a_call(row: OutputFormat, marks: Marks, accepts: Accepts) -> None:
    grammar = calls_grammar(row, marks, FUNCTIONS, is_parallel=True, is_thinking=False)
    text = row.answer + "hello <b> {"
    for message in (text, written(row, F)):
        assert accepts(grammar, message)
        assert accepts(grammar, reasoning(row) + message)
    assert not accepts(grammar, written(row, BAD))
    assert not accepts(grammar, reasoning(row) + written(row, BAD))


def test_constraints_begin_after_the_reasoning(row: OutputFormat, marks: Marks, accepts: Accepts) -> None:
    if row.think is None:
        pytest.skip("the format has no reasoning")
    rest = "{" + row.think.close + row.after_think
    for is_thinking, start in ((False, row.think.open + rest), (True, rest)):
        grammar = after_reasoning(row, marks, StructuredOutput.of({"regex": "a/b|c"}), is_thinking=is_thinking)
        assert accepts(grammar, start + row.answer + "a/b")
        assert not accepts(grammar, start + row.answer + "ab")
        assert accepts(grammar, row.answer + "c") != is_thinking
        calls = calls_grammar(row, marks, FUNCTIONS, is_parallel=True, is_thinking=is_thinking, must_call=True)
        assert accepts(calls, start + written(row, F))
        assert not accepts(calls, start)


def test_answers_are_constrained_beside_calls(row: OutputFormat, marks: Marks, accepts: Accepts) -> None:
    def grammar() -> StructuredOutput:
        return calls_grammar(row, marks, FUNCTIONS, is_parallel=True, is_thinking=False, answer=OBJECT)

    if row is LLAMA:
        with pytest.raises(GrammarError, match="must be null with tools"):
            grammar()
        return
    for text in (row.answer + '{"x":1}', written(row, F), reasoning(row) + row.answer + "{}"):
        assert accepts(grammar(), text)
    for text in (written(row, BAD), row.answer + "x"):
        assert not accepts(grammar(), text)


@pytest.mark.parametrize("row", [QWEN_CODER, GLM], indirect=True, ids=lambda row: row.name)
def test_arguments_between_tags_follow_their_schema(row: OutputFormat, marks: Marks, accepts: Accepts) -> None:
    text, level = {"type": "string"}, {"enum": ["low", 2]}
    numbers = {"type": "array", "items": {"$ref": "#/$defs/digit"}, "maxItems": 2}
    properties = {"text": text, "level": level, "numbers": numbers}
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    schema = {"type": "object", "properties": properties, "required": ["text"], "$defs": {"digit": digit}}
    grammar = calls_grammar(
        row, marks, [CallSchema("f", schema, is_strict=True)], is_parallel=False, is_thinking=False, must_call=True
    )
    for good in ({"text": '<b> "a"\n', "level": 2}, {"text": "", "level": "low", "numbers": [1, 2]}, {"text": "3"}):
        call = ("f", json.dumps(good))
        assert accepts(grammar, written(row, call))
        assert read(row, [written(row, call)], schemas={"f": schema}) == Read("", "", [call])
    for bad in ({"level": 2}, {"text": "", "level": 3}, {"text": "", "numbers": [1, 22]}, {"text": "", "x": 1}):
        assert not accepts(grammar, written(row, ("f", json.dumps(bad))))
    for given in ({"type": "string", "pattern": "a"}, {"anyOf": [text]}):
        strict = CallSchema("f", {"type": "object", "properties": {"a": given}}, is_strict=True)
        with pytest.raises(GrammarError, match="no JSON strings"):
            calls_grammar(row, marks, [strict], is_parallel=False, is_thinking=False, must_call=True)
