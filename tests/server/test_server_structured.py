from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest
from server_worlds import Api, MakeApi
from test_server_stalls import stall_of

from skipjoin.core.request import FinishReason
from skipjoin.model.grammar_check import GrammarCheck
from skipjoin.server.engines.messages import StepOutputs
from skipjoin.structured_output import MAX_GRAMMAR_BYTES, StructuredOutput
from support.pace import STALL_S
from support.waiting import until

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
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, StructuredOutput.json(TEXT)),
    ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, StructuredOutput.json(TEXT)),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, StructuredOutput.json("{}")),
    ({"structured_outputs": {"json": SCHEMA, "regex": None}}, StructuredOutput.json(TEXT)),
    ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}}, StructuredOutput.json(TEXT, " ?")),
    (
        {"structured_outputs": {"json_object": True, "disable_any_whitespace": True, "disable_fallback": True}},
        StructuredOutput.json({"type": "object"}),
    ),
    ({"guided_json": TEXT}, StructuredOutput.json(TEXT)),
    ({"guided_regex": "a+"}, StructuredOutput(kind="regex", text="a+")),
    ({"guided_choice": ["é", "b"]}, StructuredOutput(kind="choice", text='["é","b"]')),
    ({"guided_grammar": 'start: "a"'}, StructuredOutput(kind="grammar", text='start: "a"')),
]


BAD = [
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {"const": 1}}}}},
        '"not"',
    ),
    ({"structured_outputs": {"json": {"$ref": "https://example.com/a.json"}}}, "does not fetch resources"),
    ({"structured_outputs": {"json": {"$ref": "#"}}}, "no value ends"),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": "x*"}}, "nothing but white space of JSON"),
    (
        {"structured_outputs": {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}},
        "must be null with disable_any_whitespace",
    ),
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
    process = api.service._grammars._process.process
    for _ in range(20):
        assert (await api.chat(structured_outputs=bomb)).status_code == 400
    process.kill()  # a new process starts for the next unknown constraint
    assert (await api.chat(structured_outputs=bomb)).status_code == 400
    assert (await api.chat(guided_regex="x")).status_code == 200
    assert (await api.chat(structured_outputs={"json": DEEP})).status_code == 400


class HeldCompiler:
    """Compiler that finishes a constraint when the test lets it. It records the texts of all constraints in order."""

    def __init__(self, check: GrammarCheck) -> None:
        self.texts: list[str] = []
        self.steps = threading.Semaphore(0)
        check._error_of = self._error_of  # type: ignore[method-assign]

    def _error_of(self, structured: StructuredOutput) -> str:
        self.texts.append(structured.text)
        assert self.steps.acquire(timeout=60)
        return ""


def regexes(whose: str, count: int) -> list[dict[str, str]]:
    return [{"guided_regex": f"{whose}{number}"} for number in range(count)]


def asked(api: Api, key: str, fields: dict[str, Any]) -> asyncio.Task[httpx.Response]:
    body, headers = {"prompt": "x", "max_tokens": 2, **fields}, {"Authorization": f"Bearer {key}"}
    return asyncio.create_task(api.http.post("/v1/completions", json=body, headers=headers))


async def test_keys_compile_in_turn(make_api: MakeApi) -> None:
    """24 constraints of one key delay another key's by one. Compiled ones wait for none."""
    async with make_api(api_keys=("one", "other")) as api:
        assert api.service._grammars is not None
        known = {"guided_regex": "known"}
        assert (await asked(api, "other", known)).status_code == 200
        compiler = HeldCompiler(api.service._grammars)
        many = [asked(api, "one", fields) for fields in regexes("a", 24)]
        await until(lambda: compiler.texts == ["a0"])
        other = asked(api, "other", {"guided_regex": "b"})
        assert (await asked(api, "other", known)).status_code == 200
        compiler.steps.release(3)
        assert (await other).status_code == 200
        assert compiler.texts[1:3] in (["b", "a1"], ["a1", "b"])
        compiler.steps.release(24)
        assert {answer.status_code for answer in await asyncio.gather(*many)} == {200}


async def test_constraints_of_disconnected_clients_are_not_compiled(make_api: MakeApi) -> None:
    async with make_api() as api:
        assert api.service._grammars is not None
        compiler = HeldCompiler(api.service._grammars)
        first = asyncio.create_task(api.complete(max_tokens=2, guided_regex="a"))
        await until(lambda: compiler.texts == ["a"])
        gone = asyncio.Event()
        abandoned = [asyncio.create_task(abandon(api, {"prompt": "x", **fields}, gone)) for fields in regexes("b", 20)]
        await until(lambda: api.service.admission.requests == 21)
        gone.set()
        assert await asyncio.gather(*abandoned) == [499] * 20
        assert api.service.admission.requests == 1
        compiler.steps.release(22)
        assert (await first).status_code == 200
        assert (await api.complete(max_tokens=2, guided_regex="c")).status_code == 200
        assert compiler.texts == ["a", "c"]


async def abandon(api: Api, body: dict[str, Any], gone: asyncio.Event) -> int:
    """Send a request whose client disconnects at an event, and return the status that is not sent."""
    messages = [{"type": "http.request", "body": json.dumps(body).encode()}]
    sent: list[Any] = []

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "http_version": "1.1"}
    scope |= {"headers": [(b"host", b"localhost"), (b"content-type", b"application/json")], "scheme": "http"}
    await api.app(scope | {"client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80)}, receive, send)
    return int(sent[0]["status"])


async def test_a_key_does_not_learn_what_others_compile(make_api: MakeApi) -> None:
    """Each key's first use of a constraint compiles it, and its second does not."""
    async with make_api(api_keys=("one", "other")) as api:
        assert api.service._grammars is not None
        compiler = HeldCompiler(api.service._grammars)
        compiler.steps.release(10)
        for key in ("one", "one", "other", "other"):
            assert (await asked(api, key, {"guided_regex": "a"})).status_code == 200
        assert compiler.texts == ["a", "a"]
        salts = {added.options.cache_salt for added in api.engine.added}
        assert len(salts) == 2  # the engine's compiled grammars are separate by salt


async def test_constraints_that_exceed_limits_later_are_the_clients_fault(api: Api) -> None:
    """The status is 400 before a stream begins, and an event ends a stream that has begun."""
    api.engine.paused = True
    for is_stream in (False, True):
        answer = asyncio.create_task(api.complete(max_tokens=5, stream=is_stream, guided_regex="a+"))
        await until(lambda: api.engine.live)
        (number,) = api.engine.live
        api.engine.live.clear()
        ended, errors = [(number, FinishReason.ERROR.value)], {number: "too big"}
        api.engine.tell(StepOutputs(ended=ended, errors=errors, refused=[number]))
        text = (await answer).text
        assert answer.result().status_code == (200 if is_stream else 400)
        error = json.loads(text.removeprefix("data: "))["error"]
        expected = {"type": "invalid_request_error", "code": "grammar_too_expensive", "message": "too big"}
        assert {name: error[name] for name in expected} == expected
