"""The clients of OpenAI and Anthropic against a real server of `tally`, which calls a few tools."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from pydantic import BaseModel
from server_worlds import ServerProcess

if TYPE_CHECKING:
    import anthropic

PAGES = Path(__file__).resolve().parents[2] / "docs"
QUESTION = "What is the weather in Oslo?"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "get_weather", "description": "Weather of a city.", "parameters": CITY}
RESULT = "Rain, 4 degrees."
# Anthropic's client has no such argument.
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    found = ServerProcess(["model", "tally", "api_keys=right"])
    yield found
    found.stop()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="right", max_retries=0, timeout=60) as found:
        yield found


@pytest.fixture(scope="module")
def library() -> ModuleType:
    """Return Anthropic's library, whose import would delay the collection of all tests by a second."""
    import anthropic  # noqa: PLC0415

    return anthropic


@pytest.fixture(scope="module")
def claude(server: ServerProcess, library: ModuleType) -> Iterator[anthropic.Anthropic]:
    with library.Anthropic(base_url=server.url, api_key="right", max_retries=0, timeout=60) as found:
        yield found


def chat_loop(client: openai.OpenAI) -> tuple[str, str, str, int]:
    tool: Any = {
        "type": "function",
        "function": {name: WEATHER[name] for name in ("name", "description", "parameters")},
    }
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    first = client.chat.completions.create(model="tally", messages=messages, tools=[tool], temperature=0)
    message = first.choices[0].message
    (call,) = message.tool_calls
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    last = client.chat.completions.create(model="tally", messages=messages, tools=[tool], temperature=0)
    assert last.usage
    return call.function.name, call.function.arguments, last.choices[0].message.content, last.usage.prompt_tokens


def test_tool_loops_end_with_the_same_answer(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    expected = chat_loop(client)
    asked: dict[str, Any] = {"model": "tally", "tools": [WEATHER], "temperature": 0}
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    with client.responses.stream(input=items, **asked) as stream:
        first = stream.get_final_response()
    (call,) = (item for item in first.output if item.type == "function_call")
    items += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}]
    last = client.responses.create(input=items, **asked)
    assert (call.name, call.arguments, last.output_text, last.usage.input_tokens) == expected
    assert first.usage.output_tokens > 0
    with client.responses.stream(input=items, **asked) as stream:
        again = stream.get_final_response()
    assert again.output_text == last.output_text
    assert again.usage.input_tokens_details.cached_tokens > 0

    tool = {"name": WEATHER["name"], "description": WEATHER["description"], "input_schema": CITY}
    talk: dict[str, Any] = {"model": "tally", "tools": [tool], "max_tokens": 200, "extra_body": GREEDY}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    with claude.messages.stream(messages=messages, **talk) as events:
        message = events.get_final_message()
    assert message.stop_reason == "tool_use"
    (use,) = (block for block in message.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": RESULT}
    messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    counted = claude.messages.count_tokens(model="tally", messages=messages, tools=[tool])
    done = claude.messages.create(messages=messages, **talk)
    (text,) = done.content
    assert (use.name, json.dumps(use.input), text.text, counted.input_tokens) == expected
    assert counted.input_tokens == done.usage.input_tokens + done.usage.cache_read_input_tokens
    with claude.messages.stream(messages=messages, **talk) as events:
        assert events.get_final_text() == text.text
        assert events.get_final_message().usage.output_tokens == done.usage.output_tokens


def test_tool_runner_of_anthropic_finishes(claude: anthropic.Anthropic, library: ModuleType) -> None:
    @library.beta_tool
    def get_weather(city: str) -> str:
        """Weather of a city.

        Args:
            city: Its name.
        """
        return f"{RESULT} In {city}."

    messages: Any = [{"role": "user", "content": QUESTION}]
    runner = claude.beta.messages.tool_runner(model="tally", max_tokens=200, tools=[get_weather], messages=messages)
    assert [message.stop_reason for message in runner] == ["tool_use", "end_turn"]


class Answer(BaseModel):
    number: int


def test_structured_output_and_forced_calls(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    parsed = client.responses.parse(model="tally", input="What is 2 plus 3?", text_format=Answer, max_output_tokens=100)
    assert isinstance(parsed.output_parsed, Answer)
    schema = {"type": "json_schema", "schema": Answer.model_json_schema()}
    messages: Any = [{"role": "user", "content": "What is 2 plus 3?"}]
    written = claude.messages.create(
        model="tally", messages=messages, max_tokens=100, output_config={"format": schema}  # type: ignore[typeddict-item]
    )  # fmt: skip
    assert Answer.model_validate_json(written.content[0].text)
    tool: Any = {"name": "note", "input_schema": CITY}
    forced = claude.messages.create(
        model="tally", messages=messages, tools=[tool], max_tokens=100, tool_choice={"type": "tool", "name": "note"}
    )
    assert [block.name for block in forced.content if block.type == "tool_use"] == ["note"]
    assert set(forced.content[-1].input) == {"city"}


def test_errors_become_the_right_exceptions(
    client: openai.OpenAI, claude: anthropic.Anthropic, library: ModuleType, server: ServerProcess
) -> None:
    messages: Any = [{"role": "user", "content": "x"}]
    with pytest.raises(library.NotFoundError, match="does not exist"):
        claude.messages.create(model="gpt", messages=messages, max_tokens=1)
    with pytest.raises(library.BadRequestError, match="temperature"):
        claude.messages.create(model="tally", messages=messages, max_tokens=1, extra_body={"temperature": 3})
    with (
        library.Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as other,
        pytest.raises(library.AuthenticationError, match="x-api-key"),
    ):
        other.messages.create(model="tally", messages=messages, max_tokens=1)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="tally", input="x", previous_response_id="resp_1")
    assert refused.value.param == "previous_response_id"


def test_closed_streams_are_aborted(client: openai.OpenAI, claude: anthropic.Anthropic, server: ServerProcess) -> None:
    server_has: Any = {"Authorization": "Bearer right"}
    asked: dict[str, Any] = {"model": "tally", "extra_body": {"ignore_eos": True}}
    events = client.responses.create(input="Count to 100.", stream=True, **asked)
    assert next(iter(events)).type == "response.created"
    events.close()
    messages: Any = [{"role": "user", "content": "Count to 100."}]
    with claude.messages.stream(messages=messages, max_tokens=1000, **asked) as stream:
        next(iter(stream))
    for _ in range(200):
        load = httpx.get(f"{server.url}/load", headers=server_has).json()
        if load["server_load"] == load["running"] == load["waiting"] == 0:
            break
    assert load["kv_cache_usage"] == 0


def test_agent_of_the_guide_runs_and_its_calls_are_one_program(server: ServerProcess) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (PAGES / "api.md").read_text(), re.DOTALL)
    code = code.replace("http://127.0.0.1:8000", server.url).replace('api_key="none"', 'api_key="right"')
    names: dict[str, Any] = {}
    exec(compile(code, "api.md", "exec"), names)
    assert "4 degrees" in names["answer"].content
    assert [type(message).__name__ for message in names["messages"]] == ["dict", "ChatCompletionMessage", "dict"]
    raw = names["client"].chat.completions.with_raw_response
    request_id = raw.create(model="tally", messages=names["messages"], max_tokens=1).headers["x-request-id"]
    found = httpx.get(f"{server.url}/debug/requests/{request_id}", headers={"authorization": "Bearer right"}).json()
    assert found["choices"][0]["program"] == "weather-1"
