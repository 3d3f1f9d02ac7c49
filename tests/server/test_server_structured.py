"""Structured outputs over HTTP: notations, limits, and constraints that cannot be enforced."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from server_worlds import Api
from test_server_stalls import stall_of

from skipjoin.structured_output import MAX_GRAMMAR_BYTES, StructuredOutput
from support.pace import STALL_S

pytestmark = pytest.mark.anyio

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
NAMED = {"name": "answer", "schema": SCHEMA, "strict": True}
DEEP: dict[str, Any] = {}
for _ in range(500):
    DEEP = {"type": "array", "items": DEEP}
WIDE = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(20_000)}}


def nested(rule: str) -> str:
    return "start: r0\n" + "\n".join(f"r{i}: {rule.replace('next', f'r{i + 1}')}" for i in range(2000)) + '\nr2000: "a"'


GOOD: list[tuple[dict[str, Any], StructuredOutput | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, StructuredOutput.json({"type": "object"})),
    ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, StructuredOutput.json(TEXT)),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, StructuredOutput.json("{}")),
    ({"structured_outputs": {"json": SCHEMA, "regex": None}}, StructuredOutput.json(TEXT)),
    ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}}, StructuredOutput.json(TEXT, " ?")),
    ({"structured_outputs": {"json_object": True}}, StructuredOutput.json({"type": "object"})),
    ({"guided_json": TEXT}, StructuredOutput.json(TEXT)),
    ({"guided_regex": "a+"}, StructuredOutput(kind="regex", text="a+")),
    ({"guided_choice": ["é", "b"]}, StructuredOutput(kind="choice", text='["é","b"]')),
    ({"guided_grammar": 'start: "a"'}, StructuredOutput(kind="grammar", text='start: "a"')),
]


BAD = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}}, '"not"'),
    ({"structured_outputs": {"json": {"$ref": "https://example.com/a.json"}}}, "does not fetch resources"),
    ({"structured_outputs": {"json": {"$ref": "#"}}}, "cannot be enforced"),
    ({"structured_outputs": {"json": json.dumps(DEEP)}}, "recursion limit"),
    ({"structured_outputs": {"json": WIDE}}, "must have at most"),
    ({"structured_outputs": {"json": "[1, 2"}}, "must be a JSON schema"),
    ({"structured_outputs": {"json": {"pattern": "(?=a)", "type": "string"}}}, "look-around"),
    ({"structured_outputs": {"regex": "(" * 1000 + "a" + ")" * 1000}}, "cannot be enforced"),
    ({"structured_outputs": {"grammar": nested("next")}}, "nested too deeply"),
    ({"structured_outputs": {"grammar": nested("next next").replace("r", "R").replace("staRt", "start")}}, " "),
    (
        {"structured_outputs": {"json": {"type": "string", "allOf": [{"pattern": f".*a{i}.*"} for i in range(30)]}}},
        "100 ms of processor time",
    ),
    ({"guided_regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, f"at most {MAX_GRAMMAR_BYTES} bytes"),
    ({"guided_choice": ["x"] * 1025}, "1 to 1024 strings"),
]


async def test_all_notations_reach_the_engine(api: Api) -> None:
    for fields, expected in GOOD:
        for call in (api.complete, api.chat):
            answer = await call(max_tokens=2, **fields)
            assert answer.status_code == 200, answer.text
            assert api.engine.added[-1].params.structured_outputs == expected


async def test_constraints_that_cannot_be_enforced_are_refused(api: Api) -> None:
    """The loop does not stall meanwhile, and the next constraint compiles."""
    answers: list[httpx.Response] = []

    async def ask() -> None:
        answers.append(await api.chat(**fields))

    for fields, part in BAD:
        (field,) = fields
        assert await stall_of(ask) < STALL_S
        assert answers[-1].status_code == 400, answers[-1].text
        error = answers[-1].json()["error"]
        assert error["param"] == field
        assert error["message"].startswith(f"{field} ")
        assert part in error["message"]
    assert not api.engine.added
    assert (await api.chat(guided_regex="a|b")).status_code == 200


async def test_outcomes_of_compiling_are_remembered(api: Api) -> None:
    bomb = {"grammar": nested("next")}
    await api.chat(structured_outputs=bomb)
    assert api.service._grammars is not None
    process = api.service._grammars._process
    assert process is not None
    for _ in range(20):
        assert (await api.chat(structured_outputs=bomb)).status_code == 400
    process.kill()  # a new process starts for the next unknown constraint
    assert (await api.chat(structured_outputs=bomb)).status_code == 400
    assert (await api.chat(guided_regex="x")).status_code == 200
    assert (await api.chat(structured_outputs={"json": DEEP})).status_code == 400
