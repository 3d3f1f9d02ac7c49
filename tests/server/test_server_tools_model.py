from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import tiny_model as tiny
from server_worlds import ServerProcess

TEMPLATE = tiny.TEMPLATE.replace("message['content']", "(message['content'] or '')") + (
    "{% if tools %}{% endif %}{{ '<think>\n' if enable_thinking else '<think>\n\n</think>\n\n' }}{# <tool_call> #}"
)


def function(name: str, schema: dict[str, Any], *, strict: bool = False) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}


def record(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
TOOLS = [function("add", record(a=DIGIT, b={"enum": ["x", "y"]})), function("now", record())]
ADD = {"type": "function", "function": {"name": "add"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tiny.write_model(tmp_path_factory.mktemp("tools"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    found = ServerProcess(["model", str(folder)])
    yield found
    found.stop()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as found:
        yield found


def ask(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hello"}]
    return {"model": "x", "messages": messages, "tools": TOOLS, "max_tokens": 200, "seed": 1, **fields}


def check(name: str, arguments: str) -> None:
    found = json.loads(arguments)
    if name == "now":
        assert found == {}
    else:
        assert found["b"] in ("x", "y")
        assert found["a"] in range(10)


def named(server: ServerProcess) -> str:
    return str(httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"])


@pytest.mark.parametrize("seed", range(2))
def test_required_and_named_calls_are_enforced(client: openai.OpenAI, server: ServerProcess, seed: int) -> None:
    model = named(server)
    answer = client.chat.completions.create(**ask(model=model, tool_choice="required", seed=seed))
    (choice,) = answer.choices
    calls = choice.message.tool_calls or []
    # Random weights may call again and again.
    assert choice.finish_reason == "tool_calls" or len(calls) > 1
    for call in calls[: None if choice.finish_reason == "tool_calls" else -1]:
        check(call.function.name, call.function.arguments)
    single = client.chat.completions.create(**ask(model=model, tool_choice=ADD, seed=seed)).choices[0]
    assert single.finish_reason == "tool_calls"
    (call,) = single.message.tool_calls or []
    assert call.function.name == "add"
    check(call.function.name, call.function.arguments)


def test_streamed_calls_are_those_of_the_whole_answer(client: openai.OpenAI, server: ServerProcess) -> None:
    fields = ask(model=named(server), tool_choice=ADD, parallel_tool_calls=False)
    whole = client.chat.completions.create(**fields).choices[0].message
    with client.chat.completions.stream(**fields) as stream:
        streamed = stream.get_final_completion().choices[0].message
    (one,), (other,) = whole.tool_calls or [], streamed.tool_calls or []
    assert (one.function.name, one.function.arguments) == (other.function.name, other.function.arguments)
    assert whole.content is None
    assert not streamed.content


def test_constraints_begin_after_the_reasoning(server: ServerProcess) -> None:
    fields = {
        "chat_template_kwargs": {"enable_thinking": True},
        "max_tokens": 40,
        "response_format": {"type": "json_object"},
    }
    body = ask(model=named(server), tools=None, **fields)
    (choice,) = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()["choices"]
    assert choice["message"]["content"] == ""
    assert len(choice["message"]["reasoning_content"]) > 10
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("tools", "fields", "param", "message"),
    [
        (
            [TOOLS[0], function("f", record(a={"not": {"type": "string"}}), strict=True)],
            {},
            "tools.1.function.parameters",
            "not",
        ),
        ([function(f"f{number}", {}) for number in range(1000)], {"tool_choice": "required"}, "tools", "65536 bytes"),
        ([function("f", {"$ref": "http://localhost/x"}, strict=True)], {}, "tools.0.function.parameters", "not fetch"),
    ],
    ids=["keyword", "1,000 tools", "remote reference"],
)
def test_calls_that_cannot_be_enforced_are_refused(
    server: ServerProcess, tools: list[Any], fields: dict[str, Any], param: str, message: str
) -> None:
    begin = time.monotonic()
    answer = httpx.post(
        f"{server.url}/v1/chat/completions", json=ask(model=named(server), tools=tools, **fields), timeout=60
    )
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["param"] == param
    assert message in error["message"]
    assert time.monotonic() - begin < 30
    server.wait_idle()


def test_unenforceable_keywords_of_other_functions_are_ignored(client: openai.OpenAI, server: ServerProcess) -> None:
    tools = [function("f", record(a={"enum": [1]}) | {"if": {"type": "string"}})]
    fields = ask(model=named(server), tools=tools, tool_choice="required", parallel_tool_calls=False)
    (call,) = client.chat.completions.create(**fields).choices[0].message.tool_calls or []
    assert call.function.arguments == '{"a": 1}'
