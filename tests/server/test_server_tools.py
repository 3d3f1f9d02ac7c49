"""Tools and reasoning over HTTP. The model is an echo: its output is the last message, up to <end>."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import tiny_model as tiny
from server_worlds import JSON, Api
from test_server_api import error_of, events

from skipjoin.config import ServerConfig

pytestmark = pytest.mark.anyio

# The last message comes first, so that the scripted engine repeats it.
ECHO = (
    "{{ messages[-1].content }}<eos>{% for message in messages %}<|user|>{{ message | tojson }}{% endfor %}"
    "{{ tools | tojson }}{{ enable_thinking }}{# <tool_call> <think> </think> #}"
)
ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
NOW = {"type": "function", "function": {"name": "now"}}
CALLS = (
    "<think>\nTwo calls.\n</think>\n\nLet me see.\n<tool_call>\n"
    '{"name": "add", "arguments": {"a": 1, "b": "x}"}}\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n'
    "</tool_call>"
)


@pytest.fixture(scope="module")
def echo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.write_tokenizer(tmp_path_factory.mktemp("echo"))
    (folder / "chat_template.jinja").write_text(ECHO)
    return folder


@pytest.fixture
async def echo(echo_folder: Path) -> AsyncIterator[Api]:
    api = Api(echo_folder, ServerConfig(), context=4096)
    async with api.http:
        yield api
        assert api.is_clean()
    api.service.close()


def prompt_of(api: Api) -> str:
    return api.service.tokenizer.decode(api.engine.added[-1].prompt, skip_special_tokens=False)


async def say(api: Api, text: str, **fields: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    return await api.chat(**{"messages": messages, "max_tokens": None, "tools": [ADD, NOW], **fields})


def joined(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Add up a stream as clients do."""
    message: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for event in found:
        (choice,) = event["choices"]
        delta = choice["delta"]
        for name in ("content", "reasoning_content", "reasoning"):
            if name in delta:
                message[name] = message.get(name, "") + delta[name]
        numbers = [call["index"] for call in delta.get("tool_calls", ())]
        assert len(numbers) == len(set(numbers))
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(calls):
                assert call["type"] == "function"
                calls.append({"id": call["id"], "type": "function", "function": {**call["function"]}})
            else:
                assert set(call) == {"index", "function"}
                assert set(call["function"]) == {"arguments"}
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        message["finish_reason"] = choice["finish_reason"]
    message["calls"] = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return message


async def test_calls_and_reasoning_are_split(echo: Api) -> None:
    (choice,) = (await say(echo, CALLS)).json()["choices"]
    message = choice["message"]
    assert message["content"] == "Let me see."
    assert message["reasoning_content"] == message["reasoning"] == "Two calls."
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["add", "now"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": 1, "b": "x}"}
    assert all(call["type"] == "function" and "index" not in call for call in message["tool_calls"])
    assert choice["finish_reason"] == "tool_calls"
    assert '"name": "add"' in prompt_of(echo)


async def test_stream_adds_up_to_the_whole_message(echo: Api) -> None:
    found = joined(events(await say(echo, CALLS, stream=True))[:-1])
    (choice,) = (await say(echo, CALLS)).json()["choices"]
    message = choice["message"]
    whole = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    assert found == {
        "content": message["content"],
        "reasoning_content": message["reasoning_content"],
        "reasoning": message["reasoning"],
        "finish_reason": "tool_calls",
        "calls": whole,
    }


async def test_arguments_are_streamed_before_the_call_is_complete(echo: Api) -> None:
    text = '<tool_call>\n{"name": "add", "arguments": {"text": "' + "long " * 20 + '"}}\n</tool_call>'
    found = events(await say(echo, text, stream=True))[:-1]
    assert sum("tool_calls" in event["choices"][0]["delta"] for event in found) > 50


@pytest.mark.parametrize(
    ("text", "fields", "expected"),
    [
        ("<tool_call>\n{broken\n</tool_call>", {}, ("<tool_call>\n{broken\n</tool_call>", None, "stop")),
        ('<tool_call>\n{"name": "ad', {}, ('<tool_call>\n{"name": "ad', None, "stop")),
        (CALLS, {"tool_choice": "none"}, (CALLS.partition("\n\n")[2], None, "stop")),
        (CALLS, {"tools": None}, (CALLS.partition("\n\n")[2], None, "stop")),
        (CALLS, {"max_tokens": 95}, ("Let me see.", [("add", '{"a": 1, "b":')], "length")),
        ("plain", {}, ("plain", None, "stop")),
    ],
    ids=["broken", "cut before the arguments", "none", "without tools", "cut in the arguments", "plain"],
)
async def test_what_is_no_call_is_content(
    echo: Api, text: str, fields: dict[str, Any], expected: tuple[str, list[Any] | None, str]
) -> None:
    (choice,) = (await say(echo, text, **fields)).json()["choices"]
    found = choice["message"].get("tool_calls")
    calls = found and [(call["function"]["name"], call["function"]["arguments"]) for call in found]
    assert (choice["message"]["content"], calls, choice["finish_reason"]) == expected


async def test_reasoning_can_be_left_out_and_its_cost_is_counted(echo: Api) -> None:
    body = (await say(echo, "<think>a</think>b", include_reasoning=False)).json()
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "b", "refusal": None}
    assert body["usage"]["completion_tokens"] == len("<think>a</think>b") + 1


async def test_logprobs_cover_all_tokens(echo: Api) -> None:
    found = events(await say(echo, CALLS, stream=True, logprobs=True))[:-1]
    tokens = [entry["token"] for event in found for entry in (event["choices"][0]["logprobs"] or {}).get("content", ())]
    assert "".join(tokens) == CALLS + "<eos>"


async def test_conversation_with_calls_reaches_the_template(echo: Api) -> None:
    calls = [{"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
    messages = [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": None, "tool_calls": calls, "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
        {"role": "assistant", "tool_calls": [{**calls[0], "function": {"name": "add", "arguments": "{cut"}}]},
        {"role": "user", "content": "so"},
    ]
    assert (await echo.chat(messages=messages, tools=[ADD])).status_code == 200
    text = prompt_of(echo)
    assert '"arguments": {"a": 1}' in text
    assert '"arguments": "{cut"' in text
    assert '{"role": "tool", "content": "2", "tool_call_id": "call_1"}' in text
    assert '"reasoning_content": "hm"' in text


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"reasoning_effort": "none"}, "False"),
        ({"reasoning_effort": "high"}, "True"),
        ({"reasoning": {"effort": "none", "exclude": True}}, "False"),
        ({"reasoning": {"enabled": True}}, "True"),
        ({"thinking": {"type": "disabled"}}, "False"),
        ({"thinking": {"type": "enabled", "clear_thinking": False}}, "True"),
        ({"enable_thinking": False}, "False"),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, "False"),
        ({"chat_template_kwargs": {"thinking": True}}, ""),
    ],
    ids=str,
)
async def test_reasoning_is_switched_by_the_template(echo: Api, fields: dict[str, Any], shown: str) -> None:
    assert (await say(echo, "x", **fields)).status_code == 200
    assert prompt_of(echo).endswith("]" + shown)


async def test_unknown_template_variables_are_refused(echo: Api) -> None:
    for name in ("no_such", "messages", "tools"):
        error = error_of(await say(echo, "x", chat_template_kwargs={name: 1}), 400)
        assert error["param"] == f"chat_template_kwargs.{name}"
        assert "enable_thinking" in error["message"]


async def test_allowed_tools_limit_the_calls_and_not_the_prompt(echo: Api) -> None:
    def choice(mode: str, *names: str) -> dict[str, Any]:
        named = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}

    for mode in ("auto", "required"):
        assert (await say(echo, "x", tool_choice=choice(mode, "now"))).status_code == 200
        structured = echo.engine.added[-1].params.structured_outputs
        assert '"now\\"' in structured.text
        assert '"add\\"' not in structured.text
        assert ("mixed" in structured.text) == (mode == "auto")
        assert '"name": "add"' in prompt_of(echo)
    assert (await say(echo, "x", tool_choice=choice("auto", "now", "add"))).status_code == 200
    assert echo.engine.added[-1].params.structured_outputs is None
    assert "got 'f'" in error_of(await say(echo, "x", tool_choice=choice("auto", "f")), 400)["message"]
    assert error_of(await say(echo, "x", tool_choice=choice("none", "now")), 400)["param"].startswith("tool_choice")


async def test_hostile_tools_are_refused(echo: Api) -> None:
    deep = '{"a":' * 5000 + "1" + "}" * 5000
    tool = '{"type":"function","function":{"name":"f","parameters":PARAMETERS}}'
    head = '{"messages":[{"role":"user","content":"x"}],"tools":['
    bodies = {
        "JSON": head + tool.replace("PARAMETERS", deep) + "]}",
        "bytes": head + tool.replace("PARAMETERS", json.dumps({"a": ["b"] * 200_000})) + "]}",
        "1024": head + ",".join(["{}"] * 5000) + "]}",
    }
    for named, body in bodies.items():
        error = error_of(await echo.http.post("/v1/chat/completions", content=body, headers=JSON), 400)
        assert named in error["message"]


async def test_openai_client_streams_calls_and_sends_them_back(echo: Api) -> None:
    client = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=echo.http, max_retries=0)
    asked: list[Any] = [{"role": "user", "content": CALLS}]
    async with client.chat.completions.stream(model="tiny", messages=asked, tools=[ADD, NOW]) as stream:  # type: ignore[list-item]
        seen = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert seen.count("tool_calls.function.arguments.done") == 2
    message = final.choices[0].message
    assert final.choices[0].finish_reason == "tool_calls"
    assert [call.function.name for call in message.tool_calls or ()] == ["add", "now"]
    assert json.loads((message.tool_calls or [])[0].function.arguments) == {"a": 1, "b": "x}"}

    results = [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in message.tool_calls or ()]
    again = [*asked, message, *results, {"role": "user", "content": "It is 3."}]
    answer = await client.chat.completions.create(model="tiny", messages=again, tools=[ADD, NOW])  # type: ignore[list-item]
    assert answer.choices[0].message.content == "It is 3."
    assert (message.tool_calls or [])[0].id in prompt_of(echo)


PLAIN = "{{ messages[-1].content }}<eos>{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
RESULTS = [
    {"role": "user", "content": "add"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "now"}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "12:00"},
    {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "12:01"}]},
]


def api_of(folder: Path, template: str, **settings: Any) -> Api:
    tiny.write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(template)
    return Api(folder, ServerConfig(**settings), context=4096)


@pytest.mark.parametrize("first", ["system", "user", "no system"])
async def test_any_model_has_tools_in_a_format_of_the_prompt(tmp_path: Path, first: str) -> None:
    refusal = "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}" if first == "no system" else ""
    api = api_of(tmp_path, PLAIN.replace("<|{{", refusal + "<|{{"), tool_format="json")
    async with api.http:
        for fields in (
            {},
            {"tool_choice": "required"},
            {"tool_choice": {"type": "function", "function": {"name": "now"}}},
        ):
            system = [{"role": "system", "content": "Be short."}] if first == "system" else []
            call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
            before = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
            messages = [*system, *before, {"role": "user", "content": call}]
            (choice,) = (await say(api, call, messages=messages, **fields)).json()["choices"]
            assert choice["finish_reason"] == "tool_calls"
            assert choice["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
            assert api.engine.added[-1].params.structured_outputs is not None
            where = {"system": "<|system|>Be short.\n\n", "user": "<|system|>", "no system": "<|user|>"}[first]
            assert where + "You can call these functions" in prompt_of(api)
            assert '{"name": "add", "description": "Add.", "parameters": {"type": "object"}}' in prompt_of(api)
        for tools in ([ADD], None):
            assert (await say(api, "", messages=RESULTS, tools=tools)).status_code == 200
            results = "<tool_response>\n12:00\n</tool_response>\n<tool_response>\n12:01\n</tool_response>"
            assert f"<|assistant|>{call}<|user|>{results}" in prompt_of(api)
    api.service.close()


@pytest.mark.parametrize(("template", "param"), [(PLAIN, "messages"), (PLAIN + "{{ tools }}", "tools")])
async def test_refused_tools_name_the_format_that_works(tmp_path: Path, template: str, param: str) -> None:
    api = api_of(tmp_path, template)
    async with api.http:
        for choice in ("auto", "required"):
            error = error_of(await say(api, "", messages=RESULTS, tool_choice=choice), 400)
            assert error["param"] == param
            assert "--tool-format json" in error["message"]
    api.service.close()


async def test_stop_strings_leave_reasoning_and_calls_whole(echo: Api) -> None:
    text = '<think>x STOP</think>a <tool_call>\n{"name": "add", "arguments": {"b": "STOP"}}\n</tool_call> b STOP c'
    (choice,) = (await say(echo, text, stop=["STOP"])).json()["choices"]
    message = choice["message"]
    assert (message["reasoning"], message["content"]) == ("x STOP", "a b ")
    assert message["tool_calls"][0]["function"]["arguments"] == '{"b": "STOP"}'
    assert choice["finish_reason"] == "tool_calls"
    streamed = joined(events(await say(echo, text, stop=["STOP"], stream=True))[:-1])
    assert (streamed["reasoning"], streamed["content"], len(streamed["calls"])) == ("x STOP", "a b ", 1)
