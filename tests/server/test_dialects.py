"""Responses and messages over an echo: the output is the last message, up to <eos>."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import tiny_model as tiny
from server_worlds import Api, MakeApi, end_next
from test_server_tools import ADD, CALLS, ECHO, NOW

from skipjoin.config import ServerConfig

pytestmark = pytest.mark.anyio

RESPONSES, MESSAGES, CHAT = "/v1/responses", "/v1/messages", "/v1/chat/completions"
FUNCTIONS = [tool["function"] for tool in (ADD, NOW)]
FLAT = [{"type": "function", **function} for function in FUNCTIONS]
INPUTS = [
    {"input_schema": function.get("parameters", {}), **{k: v for k, v in function.items() if k != "parameters"}}
    for function in FUNCTIONS
]


@pytest.fixture(scope="module")
async def echo(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Api]:
    folder = tiny.write_tokenizer(tmp_path_factory.mktemp("dialects"))
    (folder / "chat_template.jinja").write_text(ECHO)
    api = Api(folder, ServerConfig(), context=4096)
    async with api.http:
        yield api
        assert api.is_clean()
    api.service.close()


async def post(api: Api, path: str, **body: Any) -> dict[str, Any]:
    answer = await api.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def stream(api: Api, path: str, **body: Any) -> list[dict[str, Any]]:
    text = (await api.http.post(path, json=body | {"stream": True})).text
    found = re.findall(r"^event: (\S+)\ndata: (\{.*)\n\n", text, re.MULTILINE)
    events = [json.loads(data) for _, data in found]
    assert [name for name, _ in found] == [event["type"] for event in events]
    assert text.count("\n\n") == len(events)
    return events


def without_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [without_ids(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    hidden = ("id", "call_id", "item_id", "created_at", "completed_at")
    return {name: without_ids(one) for name, one in value.items() if name not in hidden}


def parts_of_chat(answer: dict[str, Any]) -> tuple[Any, ...]:
    message = answer["choices"][0]["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return message.get("reasoning_content"), message["content"], calls, answer["usage"]["completion_tokens"]


def parts_of_response(answer: dict[str, Any]) -> tuple[Any, ...]:
    reasoning, message, *calls = answer["output"]
    named = [(call["name"], call["arguments"]) for call in calls]
    texts = (item["content"][0]["text"] for item in (reasoning, message))
    return *texts, named, answer["usage"]["output_tokens"]


def parts_of_message(answer: dict[str, Any]) -> tuple[Any, ...]:
    thinking, text, *calls = answer["content"]
    named = [(call["name"], json.dumps(call["input"])) for call in calls]
    return thinking["thinking"], text["text"], named, answer["usage"]["output_tokens"]


# The same conversation in three formats, whose last message is echoed.
CONVERSATION: dict[str, dict[str, Any]] = {
    CHAT: {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Add."},
            {
                "role": "assistant",
                "content": "So.",
                "reasoning_content": "Hm.",
                "tool_calls": [
                    {"id": f"c{at}", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
                    for at in range(2)
                ],
            },
            {"role": "tool", "tool_call_id": "c0", "content": "one"},
            {"role": "tool", "tool_call_id": "c1", "content": "two"},
            {"role": "user", "content": CALLS},
        ],
        "tools": [ADD, NOW],
    },
    RESPONSES: {
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": "Add."},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "message", "role": "assistant", "content": "So.", "id": "msg_1", "status": "completed"},
            *(
                {"type": "function_call", "call_id": f"c{at}", "name": "add", "arguments": '{"a": 1}'}
                for at in range(2)
            ),
            {"type": "function_call_output", "call_id": "c0", "output": "one"},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "two"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": CALLS}]},
        ],
        "tools": FLAT,
    },
    MESSAGES: {
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "Add."},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": ""},
                    {"type": "text", "text": "So."},
                    *({"type": "tool_use", "id": f"c{at}", "name": "add", "input": {"a": 1}} for at in range(2)),
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c0", "content": "one"},
                    {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "two"}]},
                    {"type": "text", "text": CALLS},
                ],
            },
        ],
        "tools": INPUTS,
    },
}
READ: dict[str, Callable[[dict[str, Any]], tuple[Any, ...]]] = {
    CHAT: parts_of_chat,
    RESPONSES: parts_of_response,
    MESSAGES: parts_of_message,
}


async def test_a_conversation_is_the_same_in_all_formats(echo: Api) -> None:
    found = {}
    for path, body in CONVERSATION.items():
        answer = await post(echo, path, **body)
        found[path] = (echo.engine.added[-1].prompt, READ[path](answer))
    assert found[CHAT] == found[RESPONSES] == found[MESSAGES]
    _, (reasoning, text, calls, _) = found[CHAT]
    assert (reasoning, text) == ("Two calls.", "Let me see.")
    assert [name for name, _ in calls] == ["add", "now"]
    counted = await post(echo, f"{MESSAGES}/count_tokens", **CONVERSATION[MESSAGES])
    assert counted == {"input_tokens": len(found[CHAT][0])}


async def test_stream_of_a_response_ends_with_the_whole_one(echo: Api) -> None:
    body = CONVERSATION[RESPONSES] | {"top_logprobs": 1}
    whole, events = await post(echo, RESPONSES, **body), await stream(echo, RESPONSES, **body)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    names = [event["type"].removeprefix("response.") for event in events]
    assert names[:2] == ["created", "in_progress"]
    assert names[-1] == "completed"
    items: list[list[str]] = [[] for _ in whole["output"]]
    deltas = ["" for _ in whole["output"]]
    scored = []
    for name, event in zip(names[2:-1], events[2:-1], strict=True):
        item = items[event["output_index"]]
        if not item or item[-1] != name:
            item.append(name)
        if name.endswith("delta"):
            deltas[event["output_index"]] += event["delta"]
            scored += event.get("logprobs", [])
    added, done = ["output_item.added", "content_part.added"], ["content_part.done", "output_item.done"]
    call = ["function_call_arguments.delta", "function_call_arguments.done"]
    assert items == [
        [*added, "reasoning_text.delta", "reasoning_text.done", *done],
        [*added, "output_text.delta", "output_text.done", *done],
        *[[added[0], *call, done[1]]] * 2,
    ]
    text = whole["output"][1]["content"][0]
    assert deltas == ["Two calls.", text["text"], *(call["arguments"] for call in whole["output"][2:])]
    assert "".join(score["token"] for score in scored) == text["text"]
    assert scored == text["logprobs"]
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": len("Two calls.")}


async def test_stream_of_a_message_adds_up_to_the_whole_one(echo: Api) -> None:
    body = CONVERSATION[MESSAGES]
    whole, events = await post(echo, MESSAGES, **body), await stream(echo, MESSAGES, **body)
    names = [event["type"] for event in events]
    assert names[:2] == ["message_start", "ping"]
    assert names[-2:] == ["message_delta", "message_stop"]
    message, blocks = events[0]["message"], []
    for event in events[2:-2]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"] | {"text": ""})
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            (text,) = (value for name, value in event["delta"].items() if name != "type")
            blocks[-1]["text"] += text
    shown = [
        {"thinking": block.get("thinking"), "text": block.get("text"), "tool_use": block.get("input")}[block["type"]]
        for block in whole["content"]
    ]
    assert [json.loads(block["text"]) if block["type"] == "tool_use" else block["text"] for block in blocks] == shown
    assert [block["type"] for block in blocks] == [content["type"] for content in whole["content"]]
    usage = message["usage"] | events[-2]["usage"]
    assert without_ids(message | events[-2]["delta"] | {"usage": usage, "content": []}) == without_ids(
        whole | {"content": []}
    )
    assert (whole["stop_reason"], whole["usage"]["output_tokens_details"]) == ("tool_use", {"thinking_tokens": 10})


async def test_ends_have_the_names_of_each_format(echo: Api) -> None:
    messages = [{"role": "user", "content": "One, two, three."}]
    for body, expected in (
        ({}, ("end_turn", None)),
        ({"max_tokens": 3}, ("max_tokens", None)),
        ({"stop_sequences": ["three", "two"]}, ("stop_sequence", "two")),
    ):
        answer = await post(echo, MESSAGES, messages=messages, **body)
        assert (answer["stop_reason"], answer["stop_sequence"]) == expected
    # Claude Code asks for 32,000 tokens of any model. The context ends the answer, as in Anthropic's API and Ollama.
    long = [{"role": "user", "content": "x" * 2000}]
    cut = await post(echo, MESSAGES, messages=long, max_tokens=32_000)
    assert (cut["stop_reason"], sum(cut["usage"][name] for name in ("input_tokens", "output_tokens"))) == (
        "model_context_window_exceeded",
        4096,
    )
    (*_, cut) = await lines(echo, "/api/chat", messages=long, options={"num_predict": 32_000})
    assert (cut["done_reason"], cut["prompt_eval_count"] + cut["eval_count"]) == ("length", 4096)
    events = await stream(echo, RESPONSES, input="One, two, three.", max_output_tokens=3)
    response = events[-1]["response"]
    assert events[-1]["type"] == "response.incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["incomplete"]
    assert events[-2]["item"]["status"] == "incomplete"
    for path, field in ((MESSAGES, "content"), (RESPONSES, "output")):
        asked = {"messages": [{"role": "user", "content": "<eos>"}]} if path == MESSAGES else {"input": "<eos>"}
        assert len((await post(echo, path, **asked))[field]) == 1  # an empty text


async def test_prefill_is_continued(echo: Api) -> None:
    messages = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "One, "}]
    echoed = await post(echo, MESSAGES, messages=messages)
    # The template shows the last message at the end of its list of messages.
    prompt = echo.service.tokenizer.decode(echo.engine.added[-1].prompt, skip_special_tokens=False)
    assert prompt.endswith('"content": "One, ')
    assert echoed["content"][0]["text"] == "One, "
    body = {"messages": messages, "continue_final_message": True}
    await post(echo, CHAT, **body)
    assert echo.service.tokenizer.decode(echo.engine.added[-1].prompt, skip_special_tokens=False) == prompt
    await post(echo, MESSAGES, messages=[messages[0], {"role": "assistant", "content": " "}])  # nothing to continue
    for wrong in ({"add_generation_prompt": True}, {"messages": messages[:1]}):
        refused = (await echo.http.post(CHAT, json=body | wrong)).json()["error"]
        assert refused["param"] == "continue_final_message"


async def test_truncation_drops_the_oldest_turns_and_keeps_rules_and_results(echo: Api) -> None:
    call = {"type": "function_call", "call_id": "a", "name": "add", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "a", "output": "9"}
    turns = [{"role": "user", "content": f"{n} {'x' * 1500}"} for n in range(4)]
    items = [{"role": "developer", "content": "Rules."}, *turns[:3], call, result, turns[3]]
    refused = await echo.http.post(RESPONSES, json={"input": items, "tools": FLAT})
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert refused.json()["error"]["message"].endswith('truncation: "auto" leaves out the oldest turns')
    answer = await post(echo, RESPONSES, input=items, tools=FLAT, truncation="auto", max_output_tokens=16)
    assert answer["truncation"] == "auto"
    prompt = echo.service.tokenizer.decode(echo.engine.added[-1].prompt, skip_special_tokens=False)
    kept = prompt.partition("<eos>")[2]
    assert "Rules." in kept
    assert [f'"{n} xx' in kept for n in range(4)] == [False, False, False, True]
    assert ("tool_calls" in kept, '"9"' in kept) == (True, True)  # both or neither


WEB = {"type": "web_search"}
SPACE = {"type": "namespace", "name": "crm", "description": "Sums.", "tools": FLAT[:1]}


async def test_functions_of_a_namespace_are_called_by_both_names(echo: Api) -> None:
    """The request of Codex 0.171, which offers a hosted tool and the tools of its plugins beside its own."""
    call = '<tool_call>{"name": "crm__add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    fields: dict[str, Any] = {"tools": [WEB, *FLAT, SPACE], "reasoning": {"effort": "high", "summary": "auto"}}
    answer = await post(echo, RESPONSES, input=call, **fields)
    (item,) = answer["output"]
    assert (item["namespace"], item["name"], item["arguments"]) == ("crm", "add", '{"a": 1, "b": 2}')
    assert [tool["type"] for tool in answer["tools"]] == ["function", "function", "namespace"]
    events = await stream(echo, RESPONSES, input=call, **fields)
    (done,) = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert done["name"] == "add"
    # The client sends the call with its result, and the model reads the name that it called.
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "3"}
    await post(echo, RESPONSES, input=[{"role": "user", "content": "Add."}, item, result], **fields)
    prompt = echo.service.tokenizer.decode(echo.engine.added[-1].prompt, skip_special_tokens=False)
    assert "crm__add" in prompt.replace(" ", "")

    bad = SPACE | {"tools": [FLAT[0] | {"parameters": {"type": "object", "minProperties": "x"}, "strict": True}]}
    refused = await echo.http.post(RESPONSES, json={"input": "x", "tools": [WEB, bad]})
    assert refused.json()["error"]["param"] == "tools.1.tools.0.parameters"
    twice = await echo.http.post(RESPONSES, json={"input": "x", "tools": [SPACE, FLAT[0] | {"name": "crm__add"}]})
    assert "unique" in twice.json()["error"]["message"]


async def test_custom_tools_take_a_text(echo: Api) -> None:
    patch = {"type": "custom", "name": "patch", "description": "Edits.", "format": {"type": "text"}}
    called = '<tool_call>\n{"name": "patch", "arguments": {"input": "a\\n\\"b\\""}}\n</tool_call>'
    fields = {"input": called, "tools": [patch]}
    answer = await post(echo, RESPONSES, **fields)
    call = answer["output"][-1]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "patch", 'a\n"b"')
    events = await stream(echo, RESPONSES, **fields)
    assert without_ids(events[-1]["response"]["output"]) == without_ids(answer["output"])
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == call["input"]
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "done"}
    await post(echo, RESPONSES, tools=[patch], input=[call, result])
    prompt = echo.service.tokenizer.decode(echo.engine.added[-1].prompt, skip_special_tokens=False)
    assert '"input":' in prompt
    assert '"done"' in prompt
    digits = {"type": "grammar", "syntax": "regex", "definition": "[0-9]+"}
    await post(echo, RESPONSES, input=called, tools=[patch | {"format": digits}])
    structured = echo.engine.added[-1].params.structured_outputs
    assert "[0-9]+" in str(structured)
    refused = await echo.http.post(
        RESPONSES, json=fields | {"tools": [patch | {"format": digits | {"syntax": "lark"}}]}
    )
    assert refused.json()["error"]["message"].startswith("tools.0.format.syntax: this server does not support it")
    wrong = digits | {"definition": "["}
    refused = await echo.http.post(RESPONSES, json=fields | {"tools": [patch | {"format": wrong}]})
    assert refused.json()["error"]["param"] in ("tools", "tools.0.format")


async def test_input_tokens_are_counted_as_usage_does(echo: Api) -> None:
    answer = await post(echo, RESPONSES, **CONVERSATION[RESPONSES])
    counted = await post(echo, f"{RESPONSES}/input_tokens", **CONVERSATION[RESPONSES])
    assert counted == {"object": "response.input_tokens", "input_tokens": answer["usage"]["input_tokens"]}


async def test_hosted_tools_of_messages_are_left_out_beside_others(echo: Api) -> None:
    turns = [{"role": "user", "content": "Add."}]
    searching = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}, *INPUTS]
    plain = await post(echo, MESSAGES, messages=turns, tools=INPUTS)
    both = await post(echo, MESSAGES, messages=turns, tools=searching)
    assert without_ids(both) == without_ids(plain)


IMAGE = {"type": "input_image", "image_url": "x"}
PICTURE = {"type": "image", "source": {}}
RESULT: dict[str, Any] = {"type": "tool_result", "tool_use_id": "a", "content": [PICTURE]}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"store": True}, "store", "without --store-responses; send the whole conversation"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation"),
        ({"conversation": "conv_1"}, "conversation", "only null"),
        ({"background": True}, "background", "use a batch"),
        ({"truncation": "none"}, "truncation", "'auto' or 'disabled'"),
        ({"truncation": "auto", "input": "a" * 9000}, "input", "maximum context length"),
        ({"tools": [WEB]}, "tools", "no tools of the type web_search"),
        ({"tools": [{"type": "computer"}]}, "tools.0", "no tools of the type computer"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input.0", "must be an item of the type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0", "with store: false"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input.0.content.0", "got input_image"),
        ({"input": [{"role": "user", "content": "a", "x": 1}]}, "input.0.x", "unknown or unsupported"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "must name one of the tools"),
        ({"tool_choice": "required"}, "tool_choice", "required needs tools"),
        ({"max_output_tokens": 9000}, "max_output_tokens", "at most"),
        ({"input": "a" * 9000}, "input", "maximum context length"),
        ({"input": [{}] * 9000}, "input.8192", "at most 4096 items"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format", "schema must not be null"),
        ({"response_format": {"type": "text"}}, "response_format", "use text.format"),
        ({"include": ["file_search_call.results"]}, "include.0", "encrypted_content"),
    ],
    ids=str,
)
async def test_what_responses_lack_is_refused(echo: Api, fields: dict[str, Any], param: str, message: str) -> None:
    answer = await echo.http.post(RESPONSES, json={"input": "x"} | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert message in error["message"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools: this server runs no tools"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0: this server runs no tools"),
        ({"messages": [{"role": "user", "content": [PICTURE]}]}, "messages.0.content.0: blocks of the type image"),
        (
            {"messages": [{"role": "user", "content": [RESULT]}]},
            "0.content.0.content.0: blocks of the type image",
        ),
        ({"messages": [{"role": "assistant", "content": [RESULT | {"content": ""}]}]}, "only messages of the user"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice: must name one of the tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: any needs tools"),
        ({"stop": "x"}, "stop: this server does not support it: only null: use stop_sequences"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "a" * 9000}]}, "maximum context length"),
        ({"messages": [{}] * 9000}, "messages.8192: there must be at most 4096"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"maxtokens": 3}, "unknown or unsupported field 'maxtokens': did you mean 'max_tokens'?"),
    ],
    ids=str,
)
async def test_what_messages_lack_is_refused(echo: Api, fields: dict[str, Any], message: str) -> None:
    answer = await echo.http.post(MESSAGES, json={"messages": [{"role": "user", "content": "x"}]} | fields)
    assert answer.status_code == 400
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert message in answer.json()["error"]["message"]


async def test_large_conversations_pass_the_check_of_structure(echo: Api) -> None:
    """More than 128 KiB, which are too long for the model alone."""
    long = "long " * 40_000
    plain = {"messages": [{"role": "user", "content": "Add."}, {"role": "tool", "content": "Add.", "tool_name": "f"}]}
    bodies = {**CONVERSATION, "/api/chat": plain}
    for path, field in ((RESPONSES, "input"), (MESSAGES, "messages"), ("/api/chat", "messages")):
        body = json.loads(json.dumps(bodies[path]).replace("Add.", long))
        error = (await echo.http.post(path, json=body)).json()["error"]
        error = error if isinstance(error, str) else error["message"]
        assert "maximum context length" in error, error
        assert f"{field} must have at most" in error


async def test_errors_of_messages_have_their_status_and_type(make_api: MakeApi) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    async with make_api(max_queued_requests=1, api_keys=("right", "other")) as api:
        for headers, status in (
            ({}, 401),
            ({"x-api-key": "wrong"}, 401),
            ({"x-api-key": "right", "authorization": "Bearer other"}, 401),
            ({"x-api-key": "right", "authorization": "Bearer right", "anthropic-version": "2023-06-01"}, 200),
        ):
            answer = await api.http.post(MESSAGES, json=body, headers=headers)
            assert answer.status_code == status
        assert answer.json()["content"][0]["text"] != ""
    async with make_api(max_queued_requests=1) as api:
        (slot,) = api.service.admission.reserve([1])
        full = await api.http.post(MESSAGES, json=body)
        slot.ended()
        assert (full.status_code, full.json()["error"]["type"]) == (529, "overloaded_error")
        assert int(full.headers["retry-after"]) >= 1
        missing = await api.http.post(MESSAGES, json=body | {"model": "none"})
        assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_failure_in_a_stream_is_its_last_event(make_api: MakeApi, path: str) -> None:
    body: dict[str, Any] = (
        {"input": "hello"} if path == RESPONSES else {"messages": [{"role": "user", "content": "hello"}]}
    )
    async with make_api() as api:
        api.engine.paused = True
        ending = asyncio.create_task(end_next(api, "no memory"))
        text = (await api.http.post(path, json=body | {"stream": True})).text
        await ending
        last = json.loads(text.strip().splitlines()[-1].removeprefix("data: "))
        if path == RESPONSES:
            assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
            assert last["response"]["error"] == {"code": "request_failed", "message": "no memory"}
        else:
            assert last == {"type": "error", "error": {"type": "api_error", "message": "no memory"}}
        assert api.is_clean()


async def lines(api: Api, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = await api.http.post(path, json=body)
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


async def test_ollama_has_the_same_conversation_in_lines(echo: Api) -> None:
    await post(echo, CHAT, **CONVERSATION[CHAT])
    prompt = echo.engine.added[-1].prompt
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Add."},
        {
            "role": "assistant",
            "content": "So.",
            "thinking": "Hm.",
            "tool_calls": [call | {"id": "c0"}, call | {"id": "c1"}],
        },
        {"role": "tool", "tool_name": "add", "content": "one"},
        {"role": "tool", "content": "two"},
        {"role": "user", "content": CALLS},
    ]
    asked = {
        "model": "tiny:latest",
        "messages": messages,
        "tools": [ADD, NOW],
        "options": {"num_ctx": 8, "num_predict": -1.0, "f16_kv": True},
        "truncate": True,
        "shift": False,
    }
    whole = await post(echo, "/api/chat", **asked, stream=False)
    assert echo.engine.added[-1].prompt == prompt
    message = whole["message"]
    assert (message["thinking"], message["content"]) == ("Two calls.", "Let me see.")
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == [{"a": 1, "b": "x}"}, {}]
    *found, last = await lines(echo, "/api/chat", **asked)
    assert {line["done"] for line in found} == {False}
    for name in ("thinking", "content"):
        assert "".join(line["message"].get(name, "") for line in found) == message[name]
    assert [call for line in found for call in line["message"].get("tool_calls", ())] == message["tool_calls"]
    for body in (last, whole):
        assert (body["done"], body["done_reason"], body["prompt_eval_count"]) == (True, "stop", len(prompt))
    asked = {"prompt": "One, two.", "options": {"num_predict": 3, "stop": "x"}, "logprobs": True}
    generated = await lines(echo, "/api/generate", **asked)
    assert "".join(line["response"] for line in generated) == "One"
    assert [scored["token"] for line in generated for scored in line["logprobs"]] == list("One")
    assert generated[-1]["done_reason"] == "length"
    # Ollama's Python client ends a line also at these.
    separated = await lines(echo, "/api/generate", prompt="a\u2028b\u2029c\x85d")
    assert "".join(line["response"] for line in separated) == "a\u2028b\u2029c\x85d"


async def test_raw_prompts_of_ollama_have_no_template(echo: Api) -> None:
    answer = await post(echo, "/api/generate", prompt="ab<think>c", raw=True, stream=False, options={"num_predict": 9})
    assert echo.engine.added[-1].prompt == echo.service.tokenizer.encode("ab<think>c")
    assert (answer["response"], answer.get("thinking")) == ("ab<think>", None)


async def test_windows_of_penalties_in_ollamas_format(echo: Api) -> None:
    """A window without a penalty changes nothing, and an empty one turns penalties off."""
    for given, penalties in (
        ({"repeat_last_n": 64}, (1, 0, 0)),
        ({"repeat_last_n": 64, "repeat_penalty": 1.0, "frequency_penalty": 0}, (1, 0, 0)),
        ({"repeat_last_n": -1, "repeat_penalty": 1.5, "presence_penalty": 0.5}, (1.5, 0.5, 0)),
        ({"repeat_last_n": 0, "repeat_penalty": 1.5, "frequency_penalty": 0.5}, (1, 0, 0)),
    ):
        await post(echo, "/api/generate", prompt="ab", stream=False, options=given | {"num_predict": 2})
        params = echo.engine.added[-1].params
        assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == penalties


async def test_clients_of_ollama_load_the_model_ahead(echo: Api) -> None:
    before = len(echo.engine.added)
    for body in ({"messages": []}, {}, {"messages": None, "keep_alive": "5m"}):
        found = await post(echo, "/api/chat", **body)
        assert (found["done"], found["done_reason"], found["message"]["content"]) == (True, "load", "")
    for body in ({}, {"prompt": "", "stream": False, "keep_alive": -1}, {"prompt": None}):
        found = await post(echo, "/api/generate", **body)
        assert (found["done"], found["done_reason"], found["response"]) == (True, "load", "")
    assert len(echo.engine.added) == before
    assert (await echo.http.post("/api/chat", json={"model": "other"})).status_code == 404


async def test_clients_of_ollama_find_the_model(echo: Api) -> None:
    (model,) = (await echo.http.get("/api/tags")).json()["models"]
    shown = await post(echo, "/api/show", model=model["name"])
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["model_info"]["skipjoin.context_length"] == 4096
    assert (await echo.http.get("/api/version")).json()["version"]
    for body, message in (
        ({"model": "other"}, "the model 'other' does not exist"),
        ({"options": {"mirostat": 2}}, "options.mirostat: this server does not support it"),
        ({"options": {"repeat_last_n": 64, "repeat_penalty": 1.1}}, "options.repeat_last_n: this server does not"),
        ({"options": {"presence_penalty": 1, "repeat_last_n": 64}}, "options.repeat_last_n: this server does not"),
        ({"prompt": "a" * 9000}, "maximum context length"),
        ({"format": "xml"}, "format: Input should be '' or 'json'"),
        ({"format": 5}, 'format: must be "json" or a JSON schema'),
        ({"think": 5}, 'think: must be true, false, "low", "medium" or "high"'),
    ):
        refused = await echo.http.post("/api/generate", json={"prompt": "x"} | body)
        assert refused.status_code in (400, 404)
        assert message in refused.json()["error"]
