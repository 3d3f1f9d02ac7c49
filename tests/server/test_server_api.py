from __future__ import annotations

import asyncio
import json
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny_model as tiny
from msgspec.structs import replace
from pydantic import BaseModel
from server_worlds import JSON, Api, MakeApi

from skipjoin.config import ConfigError, EngineConfig, ServerConfig
from skipjoin.config.access import with_keys_of_files
from skipjoin.core.request import NO_TARGET, FinishReason, RequestOptions, ServiceClass, Target
from skipjoin.sampling import SamplingParams
from skipjoin.server.api.app import build_app
from skipjoin.server.api.chat_body import ChatRequest
from skipjoin.server.api.conversation import CalledFunction, Message, TextPart, Tool, ToolCall
from skipjoin.server.api.dialects.messages_body import MessagesRequest
from skipjoin.server.api.dialects.ollama_body import OllamaChatRequest
from skipjoin.server.api.dialects.responses_body import ResponsesRequest
from skipjoin.server.api.errors import DEATH_GRACE_S
from skipjoin.server.api.fields import NO_EFFECT
from skipjoin.server.api.protocol import CompletionRequest
from skipjoin.server.api.service import Service
from skipjoin.server.engines.engine_client import EngineClient
from skipjoin.server.engines.engine_handle import EngineHandle, EngineStartError
from skipjoin.server.engines.messages import Refused
from skipjoin.server.metrics import Metrics
from support.waiting import until

pytestmark = pytest.mark.anyio

NOT_CACHED = {"prompt_tokens_details": {"cached_tokens": 0}}


def events(response: httpx.Response) -> list[Any]:
    """Return a stream's events as parsed JSON, and "[DONE]" as a string."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    found = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [text if text == "[DONE]" else json.loads(text) for text in found]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


@pytest.fixture(scope="module")
async def refusing_api(tokenizer_folder: Path) -> AsyncIterator[Api]:
    shared = Api(tokenizer_folder, ServerConfig())
    async with shared.http:
        yield shared
    shared.service.close()


@pytest.fixture
def refusing(refusing_api: Api) -> Iterator[Api]:
    """Return an API that tests of refused requests share, because each takes 50 ms to make its routes."""
    yield refusing_api
    assert refusing_api.is_clean()
    assert not refusing_api.engine.added


# -- completions ------------------------------------------------------------------------------------------------


async def test_completion_response_fields(api: Api) -> None:
    body = (await api.complete(max_tokens=8)).json()
    assert body["object"] == "text_completion"
    assert body["model"] == "tiny"
    assert body["choices"] == [{"index": 0, "text": "abcdefab", "logprobs": None, "finish_reason": "length"}]
    assert 0 < body["usage"].pop("queue_time") < 10
    assert body["usage"] == {"prompt_tokens": 6, "completion_tokens": 8, "total_tokens": 14} | NOT_CACHED


async def test_default_max_tokens_is_16_or_remaining_context(api: Api) -> None:
    assert (await api.complete()).json()["usage"]["completion_tokens"] == 16
    body = (await api.complete(prompt="x" * (tiny.CONTEXT - 3))).json()
    assert body["usage"]["completion_tokens"] == 3


async def test_streamed_text_matches_whole_response(api: Api) -> None:
    found = events(await api.complete(max_tokens=8, stream=True))
    assert found[-1] == "[DONE]"
    assert "".join(event["choices"][0]["text"] for event in found[:-1]) == "abcdefab"
    assert [event["choices"][0]["finish_reason"] for event in found[:-1]][-1] == "length"
    assert all("usage" not in event for event in found[:-1])


async def test_stream_usage_comes_in_event_without_choices(api: Api) -> None:
    found = events(await api.complete(max_tokens=4, stream=True, stream_options={"include_usage": True}))
    assert found[-2]["choices"] == []
    assert 0 < found[-2]["usage"].pop("queue_time") < 10
    assert found[-2]["usage"] == {"prompt_tokens": 6, "completion_tokens": 4, "total_tokens": 10} | NOT_CACHED
    assert all(event["usage"] is None for event in found[:-2])


async def test_continuous_usage_increases(api: Api) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = events(await api.complete(max_tokens=4, stream=True, stream_options=options))
    counts = [event["usage"]["completion_tokens"] for event in found[:-1]]
    assert counts == sorted(counts)
    assert counts[0] == 1
    assert counts[-1] == 4


async def test_choices_are_numbered_prompt_by_prompt(api: Api) -> None:
    body = (await api.complete(prompt=["ab", "xyz"], n=2, max_tokens=3, seed=7)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in body["choices"]] == ["aba", "aba", "xyz", "xyz"]
    assert body["usage"]["prompt_tokens"] == 5
    assert [add.params.seed for add in api.engine.added] == [7, 8, 7, 8]


async def test_seeds_wrap_at_int64_bound(api: Api) -> None:
    await api.complete(n=2, seed=2**63 - 1)
    assert [add.params.seed for add in api.engine.added] == [2**63 - 1, -(2**63)]


async def test_streamed_choices_are_identified_by_index(api: Api) -> None:
    found = events(await api.complete(prompt=["ab", "xy"], max_tokens=4, stream=True))[:-1]
    texts = ["", ""]
    for event in found:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["abab", "xyxy"]


async def test_prompts_may_be_token_ids(api: Api) -> None:
    ids = api.service.tokenizer.encode("hey")
    assert (await api.complete(prompt=ids, max_tokens=3)).json()["choices"][0]["text"] == "hey"
    body = (await api.complete(prompt=[ids, ids[:1]], max_tokens=3)).json()
    assert [choice["text"] for choice in body["choices"]] == ["hey", "hhh"]


async def test_echo_with_logprobs_scores_the_prompt(api: Api) -> None:
    """lm-evaluation-harness asks for one generated token after the scored prompt."""
    ids = api.service.tokenizer.encode("abc")
    choice = (await api.complete(prompt=ids, echo=True, logprobs=1, max_tokens=1)).json()["choices"][0]
    assert choice["text"] == "abca"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c", "a"]
    assert logprobs["token_logprobs"] == [None, -0.25, -0.25, -0.5]
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    assert logprobs["top_logprobs"][0] is None
    assert len(logprobs["top_logprobs"][1]) == 2  # the most likely token and the actual one
    assert logprobs["top_logprobs"][1]["b"] == -0.25


async def test_echo_with_zero_max_tokens_only_scores(api: Api) -> None:
    choice = (await api.complete(prompt="abc", echo=True, logprobs=1, max_tokens=0)).json()["choices"][0]
    assert choice["text"] == "abc"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert error_of(await api.complete(max_tokens=0), 400)["param"] == "max_tokens"


async def test_echo_comes_first_in_stream(api: Api) -> None:
    found = events(await api.complete(prompt="abc", echo=True, max_tokens=2, stream=True))
    assert "".join(event["choices"][0]["text"] for event in found[:-1]) == "abcab"


# -- finish reasons ---------------------------------------------------------------------------------------------


async def test_stop_string_truncates_text_and_aborts_request(api: Api) -> None:
    body = (await api.complete(stop=["de"], max_tokens=100)).json()
    assert body["choices"][0]["text"] == "abc"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 5
    assert api.engine.aborted == [api.engine.added[0].id]


async def test_partial_stop_string_is_held_back(api: Api) -> None:
    found = events(await api.complete(stop="cdX", max_tokens=6, stream=True))
    texts = [event["choices"][0]["text"] for event in found[:-1]]
    assert texts == ["a", "b", "cde", "f"]
    found = events(await api.complete(stop="fa", max_tokens=50, stream=True, include_stop_str_in_output=True))
    assert "".join(event["choices"][0]["text"] for event in found[:-1]) == "abcdefa"


async def test_min_tokens_delays_stop_strings(api: Api) -> None:
    body = (await api.complete(stop="b", min_tokens=4, max_tokens=20)).json()
    assert body["choices"][0]["text"] == "abcdefa"


async def test_eos_is_hidden_by_default(api: Api) -> None:
    prompt = [*api.service.tokenizer.encode("ab"), tiny.EOS]
    choice = (await api.complete(prompt=prompt, max_tokens=9)).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")
    body = (await api.complete(prompt=prompt, max_tokens=9, ignore_eos=True, skip_special_tokens=False)).json()
    assert body["choices"][0]["text"] == "ab<eos>ab<eos>ab<eos>"


async def test_stop_tokens_are_shown_only_on_request(api: Api) -> None:
    (token,) = api.service.tokenizer.encode("c")
    assert (await api.complete(stop_token_ids=[token])).json()["choices"][0]["text"] == "ab"
    body = (await api.complete(stop_token_ids=[token], include_stop_str_in_output=True)).json()
    assert body["choices"][0]["text"] == "abc"


async def test_multibyte_characters_are_never_split(api: Api) -> None:
    found = events(await api.complete(prompt="é€😀", max_tokens=9, stream=True))
    # The first token is half a character; its event has no text and is not delayed.
    assert [event["choices"][0]["text"] for event in found[:-1]] == ["", "é", "€", "😀"]


async def test_deadline_expired_in_queue_is_408(api: Api) -> None:
    api.engine.paused = True
    task = asyncio.create_task(api.complete(deadline_ms=5000))
    await until(lambda: api.engine.live)
    assert 4 < (api.engine.added[0].options.deadline_s or 0) <= 5
    api.engine.end_all(FinishReason.DEADLINE)
    response = await task
    error = error_of(response, 408)
    assert error["code"] == "deadline_exceeded"
    assert response.headers["x-should-retry"] == "false"


async def test_deadline_ends_a_stream_with_an_error_event(api: Api) -> None:
    api.engine.paused = True
    task = asyncio.create_task(api.complete(stream=True))
    await until(lambda: api.engine.live)
    api.engine.end_all(FinishReason.DEADLINE)
    found = events(await task)
    assert found[-1]["error"]["code"] == "deadline_exceeded"


async def test_failed_request_is_500_with_reason(api: Api) -> None:
    api.engine.paused = True
    tasks = [asyncio.create_task(api.complete(n=2)), asyncio.create_task(api.chat(stream=True))]
    await until(lambda: len(api.engine.live) == 3)
    api.engine.end_all(FinishReason.ERROR, "no memory: lower something")
    whole, streamed = [await task for task in tasks]
    error = error_of(whole, 500)
    assert (error["type"], error["code"]) == ("server_error", "request_failed")
    assert error["message"] == "no memory: lower something"
    assert whole.headers["x-should-retry"] == "false"
    assert streamed.status_code == 200
    assert events(streamed)[-1]["error"] == error
    assert api.is_clean()


async def test_deadline_from_header_body_and_default(make_api: MakeApi) -> None:
    async with make_api(default_deadline_s=9.0) as api:
        await api.complete()
        await api.http.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-deadline-ms": "3000"})
        await api.complete(slo={"deadline_ms": 2000})
        assert [round(add.options.deadline_s or 0) for add in api.engine.added] == [9, 3, 2]
        bad = await api.http.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-deadline-ms": "-1"})
        assert error_of(bad, 400)["param"] == "x-request-deadline-ms"


async def test_slo_from_body_header_and_default(make_api: MakeApi) -> None:
    """For each objective the body overrides the header, which overrides the server's default."""
    headers = {"x-slo-ttft-ms": "150", "x-slo-tpot-ms": "12.5"}
    async with make_api(slo_ttft_ms=90, slo_jct_ms=7000) as api:
        for given in ({}, headers, {"x-slo-jct-ms": "3e3"}, {**headers, "x-llm-d-slo-ttft-ms": "120"}):
            await api.http.post("/v1/completions", json={"prompt": "a", "slo": {"tpot_ms": 5}}, headers=given)
        assert [add.options.target for add in api.engine.added] == [
            Target(0.09, 0.005, 7.0),
            Target(0.15, 0.005, 7.0),
            Target(0.09, 0.005, 3.0),
            Target(0.12, 0.005, 7.0),
        ]
    async with make_api() as api:
        await check_slo_precedence(api, headers)


async def check_slo_precedence(api: Api, headers: dict[str, str]) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}]}
    await api.complete()
    for slo in ({}, {"ttft_ms": 40, "jct_ms": 2500.5}):
        for path, content in (("completions", {"prompt": "a"}), ("chat/completions", chat)):
            body = {**content, "max_tokens": 2, "slo": slo}
            assert (await api.http.post(f"/v1/{path}", json=body, headers=headers)).status_code == 200
    none, first, second, third, fourth = (add.options.target for add in api.engine.added)
    assert none == NO_TARGET
    assert first == second == Target(ttft_s=0.15, tpot_s=0.0125)
    assert third == fourth == Target(ttft_s=0.04, tpot_s=0.0125, jct_s=2.5005)
    for header in (*headers, "x-slo-jct-ms"):
        for text in ("0", "-1", "nan", "inf", "soon", "1e12", "", "\u0661"):
            bad = await api.http.post("/v1/completions", json={"prompt": "a"}, headers={header: text.encode()})
            error = error_of(bad, 400)
            assert error["param"] == header
            assert f"{header} must be a number in (0, 604800000]" in error["message"]


@pytest.mark.parametrize(
    ("asked", "served", "options"),
    [
        (None, "default", RequestOptions(target=Target(0.09, 0.03, 7.0))),
        ("auto", "default", RequestOptions(target=Target(0.09, 0.03, 7.0))),
        ("default", "default", RequestOptions(target=Target(0.09, 0.03, 7.0))),
        ("priority", "priority", RequestOptions(is_urgent=True, target=Target(0.045, 0.01, 7.0))),
        ("flex", "flex", RequestOptions(service=ServiceClass.BEST_EFFORT, target=Target(jct_s=7.0))),
    ],
)
async def test_service_tier_sets_class_and_slo_and_is_returned(
    make_api: MakeApi, asked: str | None, served: str, options: RequestOptions
) -> None:
    defaults = {
        "slo_ttft_ms": 90,
        "slo_tpot_ms": 30,
        "slo_jct_ms": 7000,
        "priority_tpot_ms": 10,
        "priority_tier": "all",
    }
    tier = {} if asked is None else {"service_tier": asked}
    async with make_api(**defaults) as api:
        for post, is_returned in ((api.chat, True), (api.complete, asked is not None)):
            found = [(await post(**tier)).json(), *events(await post(**tier, n=2, stream=True))[:-1]]
            assert [event.get("service_tier") for event in found] == [served if is_returned else None] * len(found)
        assert [add.options for add in api.engine.added] == [options] * 6


async def test_flex_request_ignores_latency_slo_headers(api: Api) -> None:
    async def post(value: str) -> httpx.Response:
        headers = {"x-slo-ttft-ms": value, "x-slo-tpot-ms": "9", "x-slo-jct-ms": "4000"}
        body = {"prompt": "a", "service_tier": "flex"}
        return await api.http.post("/v1/completions", json=body, headers=headers)

    assert (await post("9")).status_code == 200
    expected = RequestOptions(service=ServiceClass.BEST_EFFORT, target=Target(jct_s=4.0))
    assert [add.options for add in api.engine.added] == [expected]
    assert error_of(await post("nan"), 400)["param"] == "x-slo-ttft-ms"


@pytest.mark.parametrize("name", ["ttft", "tpot"])
async def test_slo_must_be_within_configured_bounds(make_api: MakeApi, name: str) -> None:
    async def statuses(api: Api, value: float) -> list[int]:
        header = {f"x-slo-{name}-ms": str(value)}
        by_header = await api.http.post("/v1/completions", json={"prompt": "a"}, headers=header)
        by_body = await api.complete(slo={f"{name}_ms": value})
        for response, field in ((by_header, f"x-slo-{name}-ms"), (by_body, f"slo.{name}_ms")):
            if response.status_code == 400:
                error = error_of(response, 400)
                assert error["param"] == field
                assert error["message"] == f"{field} must be a number in [50, 2000]"
        return [by_header.status_code, by_body.status_code]

    async with make_api(**{f"min_slo_{name}_ms": 50.0, f"max_slo_{name}_ms": 2000.0, f"slo_{name}_ms": 9.0}) as api:
        assert (await api.complete()).status_code == 200  # the default may be out of bounds
        found = [await statuses(api, value) for value in (49.9, 50, 2000, 2000.1)]
    assert found == [[400] * 2, [200] * 2, [200] * 2, [400] * 2]
    async with make_api() as api:
        assert await statuses(api, 1) == [200, 200]


async def test_engine_death_fails_all_requests(make_api: MakeApi) -> None:
    async with make_api() as api:
        api.engine.paused = True
        whole, stream = asyncio.create_task(api.complete()), asyncio.create_task(api.complete(stream=True))
        await until(lambda: len(api.engine.live) == 2)
        api.engine.live.clear()
        api.engine.client.died()
        assert error_of(await whole, 503)["code"] == "engine_dead"
        # The first retry of a client comes after this server has exited.
        assert int((await whole).headers["retry-after"]) > DEATH_GRACE_S
        assert events(await stream)[-1]["error"]["code"] == "engine_dead"
        for path in ("/health", "/ready"):
            error_of(await api.http.get(path), 503)
        error_of(await api.complete(), 503)
        assert (await api.http.get("/live")).status_code == 200
        assert api.is_clean()


async def test_rejection_by_engine_is_400(api: Api) -> None:
    api.engine.paused = True
    task = asyncio.create_task(api.complete())
    await until(lambda: api.engine.live)
    (request_id,) = api.engine.live
    api.engine.live.clear()
    api.engine.tell(Refused(request_id, "max_tokens", "it cannot fit"))
    assert error_of(await task, 400)["param"] == "max_tokens"


# -- chat -------------------------------------------------------------------------------------------------------


async def test_chat_response_and_template(api: Api) -> None:
    body = (await api.chat()).json()
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "hello", "refusal": None}
    prompt = api.engine.added[0].prompt
    text = api.service.tokenizer.decode(prompt, skip_special_tokens=False)
    assert text == "<|user|>hello<|assistant|>"


async def test_chat_accepts_developer_role_content_parts_and_returned_messages(api: Api) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "assistant", "content": None, "refusal": "d"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "e"}]},
        {"role": "assistant", "content": None, "reasoning": "cut"},
        {"role": "user", "content": []},
    ]
    assert (await api.chat(messages=messages)).status_code == 200
    text = api.service.tokenizer.decode(api.engine.added[0].prompt, skip_special_tokens=False)
    turns = "<|assistant|>c<|assistant|>d<|assistant|>e<|assistant|><|user|><|assistant|>"
    assert text == f"<|system|>be brief<|user|>ab{turns}"


async def test_chat_stream_begins_with_the_role(api: Api) -> None:
    found = events(await api.chat(stream=True, n=2))[:-1]
    seen: dict[int, list[dict[str, str]]] = {0: [], 1: []}
    for event in found:
        assert event["object"] == "chat.completion.chunk"
        for choice in event["choices"]:
            seen[choice["index"]].append(choice["delta"])
    for deltas in seen.values():
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(delta.get("content", "") for delta in deltas) == "hello"


async def test_chat_logprobs(api: Api) -> None:
    body = (await api.chat(logprobs=True, top_logprobs=2, max_tokens=2)).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["<|user|>", "h"]
    assert content[1]["bytes"] == [104]
    assert [len(entry["top_logprobs"]) for entry in content] == [2, 2]
    assert error_of(await api.chat(top_logprobs=2), 400)["param"] == "top_logprobs"


async def test_chat_without_max_tokens_may_fill_context(api: Api) -> None:
    body = (await api.chat(max_tokens=None, ignore_eos=True)).json()
    assert body["usage"]["total_tokens"] == tiny.CONTEXT
    body = (await api.chat(max_tokens=7, max_completion_tokens=3, ignore_eos=True)).json()
    assert body["usage"]["completion_tokens"] == 3


# -- rejected requests ------------------------------------------------------------------------------------------

BAD_COMPLETIONS = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt.0"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 3}, "prompt"),
    ({"prompt": [tiny.VOCAB]}, "prompt"),
    ({"prompt": [-1]}, "prompt.0"),
    ({"prompt": [1, "a"]}, "prompt.1"),
    ({"prompt": "x" * tiny.CONTEXT}, "prompt"),
    ({"prompt": ["x"] * 257}, "prompt"),
    ({"max_tokens": tiny.CONTEXT}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 5.5}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": 10**6}, "n"),
    ({"best_of": 2}, "best_of"),
    ({"seed": 2**63}, "seed"),
    ({"stop": [""]}, "stop.0"),
    ({"stop": "x" * 513}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop_token_ids": [tiny.VOCAB]}, "stop_token_ids"),
    ({"logprobs": 21}, "logprobs"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"logit_bias": {str(tiny.VOCAB): 1}}, "logit_bias"),
    ({"logit_bias": {str(token): 1 for token in range(301)}}, "logit_bias"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"min_tokens": 17}, "min_tokens"),
    ({"priority": 2**63}, "priority"),
    ({"priority": -(2**63)}, "priority"),
    ({"priority": -1}, "priority"),
    ({"deadline_ms": 0}, "deadline_ms"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * 257}, "cache_salt"),
    ({"slo": {"ttft_ms": 0}}, "slo.ttft_ms"),
    ({"slo": {"jct_ms": 7 * 86_400_000 + 1}}, "slo.jct_ms"),
    ({"slo": {"tpot_s": 1}}, "slo.tpot_s"),
    ({"slo": {"deadline_ms": 0.5}}, "slo.deadline_ms"),
    ({"slo": {"deadline_ms": 5}, "deadline_ms": 5}, "slo"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"suffix": "end"}, "suffix"),
    ({"response_format": {"type": "json"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs"),
    ({"service_tier": "scale"}, "service_tier"),
    ({"service_tier": "fast"}, "service_tier"),
    ({"service_tier": "flex", "slo": {"ttft_ms": 9}}, "slo.ttft_ms"),
    ({"service_tier": "flex", "slo": {"tpot_ms": 9}}, "slo.tpot_ms"),
    ({"user": "x" * 513}, "user"),
    ({"guided_regex": 1}, "guided_regex"),
    ({"guided_json": 1}, "guided_json"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"logit_bias": {"05": 1}}, "logit_bias.05"),
    ({"guided_choice": []}, "guided_choice"),
    ({"no_such_field": 1}, "no_such_field"),
]
BAD_CHATS = [
    ({"add_special_tokens": True}, "add_special_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
    ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages.0.tool_call_id"),
    ({"messages": [{"role": "function", "content": "3", "name": "add"}]}, "messages.0.role"),
    ({"messages": [{"role": "assistant", "content": "", "function_call": {"name": "a"}}]}, "messages.0.function_call"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
    ({"messages": [{"role": "user", "content": "x" * tiny.CONTEXT}]}, "messages"),
    ({"max_completion_tokens": tiny.CONTEXT}, "max_completion_tokens"),
    ({"tools": [{"type": "function"}]}, "tools.0.function"),
    ({"tools": [{"type": "function", "function": {"name": "add"}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": 'a"b'}}]}, "tools.0.function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a"}}] * 2}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(1025)]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "a"}}}, "tool_choice"),
    ({"reasoning_effort": "lots"}, "reasoning_effort"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"prompt": "x"}, "prompt"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_COMPLETIONS, ids=str)
async def test_invalid_completion_error_names_field(refusing: Api, fields: dict[str, Any], param: str) -> None:
    error = error_of(await refusing.complete(**fields), 400)
    assert error["param"] == param
    assert param.split(".", maxsplit=1)[0] in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(("fields", "param"), BAD_CHATS, ids=str)
async def test_invalid_chat_error_names_field(refusing: Api, fields: dict[str, Any], param: str) -> None:
    error = error_of(await refusing.chat(**fields), 400)
    assert error["param"] == param


CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "", "tool_call_id": "1"},
    ],
    ids=["call", "result"],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_calls_need_a_template_with_tools(refusing: Api, path: str, message: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "add"}, message]}
    error = error_of(await refusing.http.post(path, json=body), 400)
    assert error["param"] == "messages"
    assert "chat template has no support for tools" in error["message"]


NEUTRAL: list[dict[str, Any]] = [
    {"n": 1, "best_of": 1, "suffix": None, "logprobs": None, "repetition_penalty": 1.0, "stop": None},
    {"response_format": {"type": "text"}, "service_tier": "auto", "user": "u", "metadata": {"a": "b"}},
    {"logit_bias": {}, "seed": None, "stream_options": None, "use_beam_search": False, "temperature": 0},
    {"top_k": -1, "min_p": 0.0, "priority": 0, "stop": [], "stop_token_ids": [], "length_penalty": 1},
    {"seed": 42.0, "max_tokens": 5.0, "n": 1.0, "top_k": -1.0, "logprobs": 2.0, "priority": -0.0, "min_tokens": 1e0},
    {"early_stopping": False, "bad_words": [], "kv_transfer_params": None, "prompt_cache_options": {"mode": "auto"}},
]
MARKED = {"cache_control": {"type": "ephemeral"}}
NEUTRAL_CHATS: list[dict[str, Any]] = [
    {"tools": [], "tool_choice": "none", "functions": None, "parallel_tool_calls": True, "store": False},
    {"tools": None, "tool_choice": "auto", "modalities": ["text"], "logprobs": False, "reasoning_effort": None},
    {"chat_template_kwargs": {"enable_thinking": False}, "max_completion_tokens": 5, "reasoning_effort": "high"},
    {"store": True, "verbosity": "low", "safety_identifier": "a", "prompt_cache_key": "b", "metadata": {"a": "b"}},
    {"add_special_tokens": False, "echo": False},
    {"logprobs": False, "top_logprobs": 0},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "null"}}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "Page[int]", "schema": {"type": "null"}}}},
    {"prediction": {"type": "content", "content": "x"}, "prompt_cache_retention": "24h", "priority": 7},
    {"messages": [{"role": "user", "content": "a", "type": "text"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"} | MARKED]} | MARKED]} | MARKED,
    {
        "messages": [
            {"role": "user", "content": "a", "name": None},
            {
                "role": "assistant",
                "content": "b",
                "refusal": None,
                "annotations": [{"type": "url_citation"}],
                "id": "m",
            },
            {"role": "assistant", "content": "c", "tool_calls": [], "provider_specific_fields": {"refusal": None}},
            {"role": "assistant", "content": "c", "reasoning_content": "d", "thinking_blocks": [{"thinking": "d"}]},
            {"role": "user", "content": "a"},
        ]
    },
]


@pytest.mark.parametrize("fields", NEUTRAL, ids=str)
async def test_neutral_values_are_accepted(api: Api, fields: dict[str, Any]) -> None:
    assert (await api.complete(**fields)).status_code == 200


@pytest.mark.parametrize("fields", NEUTRAL_CHATS, ids=str)
async def test_neutral_chat_values_are_accepted(api: Api, fields: dict[str, Any]) -> None:
    assert (await api.chat(**fields)).status_code == 200


async def test_fields_that_would_change_the_output_are_refused(api: Api) -> None:
    turn = {"role": "user", "content": "a"}
    for fields, param in (
        ({"messages": [turn | {"type": "image"}]}, "messages.0.type"),
        ({"messages": [{"role": "assistant", "content": "a", "prefix": True}]}, "messages.0.prefix"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"early_stopping": True}, "early_stopping"),
    ):
        assert error_of(await api.chat(**fields), 400)["param"] == param


def test_fields_without_effect_are_documented() -> None:
    """Each field is named in the page, and its schema says that it has no effect."""
    page = (Path(__file__).resolve().parents[2] / "docs/api.md").read_text()
    models: list[type[BaseModel]] = [ChatRequest, CompletionRequest, Message, TextPart, ToolCall, CalledFunction, Tool]
    models += [ResponsesRequest, MessagesRequest, OllamaChatRequest]
    fields = {name for model in models for name, field in model.model_fields.items() if field.description == NO_EFFECT}
    assert {"cache_control", "prompt_cache_options", "annotations"} <= fields
    assert [name for name in sorted(fields) if f"`{name}`" not in page] == []
    assert NO_EFFECT in json.dumps(ChatRequest.model_json_schema())


async def test_seed_of_minus_one_is_no_seed(api: Api) -> None:
    for seed, expected in ((-1, None), (None, None), (-2, -2), (7, 7)):
        assert (await api.complete(seed=seed, n=2)).status_code == 200
        given = [request.params.seed for request in list(api.engine.added)[-2:]]
        assert (given == [expected, given[1]]) if expected is not None else -1 not in given
    assert SamplingParams(seed=-1).seed is None
    assert [SamplingParams(seed=-3).with_seed_of(copy).seed for copy in range(4)] == [-3, -2, 0, 1]


# -- beyond the context or the vocabulary ------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_context_overflow_has_the_words_of_openai(api: Api, stream: bool) -> None:
    most = tiny.CONTEXT
    begin = f"This model's maximum context length is {most} tokens. However, "
    long, chat = "x" * 600, [{"role": "user", "content": "x" * 600}]
    for found, param, text in (
        (api.complete(prompt=long, stream=stream), "prompt", "your prompt resulted in 600 tokens. Please reduce the "),
        (api.complete(prompt=[5] * 600, stream=stream), "prompt", "your prompt resulted in 600 tokens. Please reduce"),
        (
            api.chat(messages=chat, stream=stream),
            "messages",
            "your messages resulted in 602 tokens. Please reduce the ",
        ),
        (
            api.complete(prompt="abc", max_tokens=most, stream=stream),
            "max_tokens",
            f"you requested {most + 3} tokens (3 in the prompt, {most} in the completion). Please reduce the length of "
            f"the prompt or completion: max_tokens must be at most {most - 3}, got {most}",
        ),
        (
            api.chat(messages=[{"role": "user", "content": "abc"}], max_completion_tokens=most, stream=stream),
            "max_completion_tokens",
            f"you requested {most + 5} tokens (5 in the messages, {most} in the completion). Please reduce the length",
        ),
    ):
        error = error_of(await found, 400)
        assert (error["code"], error["param"], error["type"]) == (
            "context_length_exceeded", param, "invalid_request_error",
        )  # fmt: skip
        assert error["message"].startswith(begin + text)
        # LangChain 1 with openai 3.57, whose errors have no code in their text.
        assert ("prompt is too long" in error["message"]) == (param in ("prompt", "messages"))
    assert not api.engine.added


async def test_prompt_beyond_queue_and_context_is_a_context_overflow(make_api: MakeApi) -> None:
    async with make_api(max_queued_tokens=600) as api:
        error = error_of(await api.complete(prompt="x" * 4000), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        assert "your prompt resulted in about 1000 tokens" in error["message"]
        error = error_of(await api.complete(prompt=["x" * 400] * 8), 400)
        assert (error["code"], error["param"]) == (None, "prompt")


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_that_the_model_does_not_have_are_refused(api: Api, stream: bool) -> None:
    """The tokenizer has three special tokens more than the model, and the chat template writes two of them."""
    api.service._info = replace(api.service.info, vocab_size=tiny.EOS + 1)
    known = f"must be token ids in [0, {tiny.EOS}], got "
    for found, param, text in (
        (api.chat(stream=stream), "messages", f"{tiny.EOS + 3} ('<|assistant|>', which its tokenizer knows"),
        (api.complete(prompt="a<|user|>", stream=stream), "prompt", f"{tiny.EOS + 2} ('<|user|>', which"),
        (api.complete(prompt=[5, tiny.EOS + 1], stream=stream), "prompt", f"{tiny.EOS + 1} ('<|system|>'"),
        (api.complete(prompt=[[5], [9999]], stream=stream), "prompt", "9999"),
        (api.complete(stop_token_ids=[tiny.EOS + 1], stream=stream), "stop_token_ids", f"{tiny.EOS + 1}"),
        (api.complete(logit_bias={"300": 1}, stream=stream), "logit_bias", "300"),
    ):
        error = error_of(await found, 400)
        assert (error["param"], error["message"].partition(text)[0]) == (param, f"{param} {known}")
    assert error_of(await api.complete(prompt=[-1], stream=stream), 400)["param"] == "prompt.0"
    ids = (await api.http.post("/tokenize", json={"prompt": "<|user|>"})).json()["tokens"]
    assert (await api.http.post("/detokenize", json={"tokens": ids})).json()["prompt"] == "<|user|>"
    assert not api.engine.added
    api.service._info = replace(api.service.info, vocab_size=tiny.VOCAB + 64)  # a padded vocabulary
    assert (await api.complete(prompt=[5, tiny.VOCAB + 1], echo=True)).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"prompt": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        b'{"prompt": "a", "metadata": ' + b'{"a":' * 20_000 + b"1" + b"}" * 20_000 + b"}",
        b'{"prompt": "a", "max_tokens": 1.5}',
        b'{"prompt": "a", "max_tokens": true}',
        b'{"prompt": "a", "max_tokens": "1"}',
        b'{"prompt": "a", "max_tokens": 1e300}',
    ],
    ids=range(16),
)
async def test_malformed_bodies_are_400(refusing: Api, body: bytes) -> None:
    error_of(await refusing.http.post("/v1/completions", content=body, headers=JSON), 400)


@pytest.mark.parametrize("code", ["utf-8-sig", "utf-16"])
async def test_byte_order_marks_are_named(api: Api, code: str) -> None:
    refused = await api.http.post("/v1/completions", content='{"prompt": "a"}'.encode(code), headers=JSON)
    assert "byte-order mark" in error_of(refused, 400)["message"]


async def test_unknown_paths_methods_and_models(api: Api) -> None:
    assert error_of(await api.http.get("/nothing"), 404)["code"] == "not_found"
    assert error_of(await api.http.get("/health/"), 404)["code"] == "not_found"
    for path in ("/health", "/v1/models", "/"):  # probes and agents ask for the head only
        assert ((await api.http.head(path)).status_code, (await api.http.get(path)).status_code) == (200, 200)
    assert (await api.http.head("/debug/events")).status_code == 405
    assert error_of(await api.http.get("/v1/completions"), 405)["code"] == "method_not_allowed"
    refused = await api.http.put("/v1/responses/x")
    assert refused.headers["allow"] == "DELETE, GET, HEAD"
    assert "use DELETE, GET, HEAD" in error_of(refused, 405)["message"]
    assert "as in /v1/requests/ID." in error_of(await api.http.get("/v1/requests"), 404)["message"]
    for method, path in (("GET", "/v1/models"), ("GET", "/debug/requests"), ("DELETE", "/v1/requests")):
        # An id is never empty.
        error = error_of(await api.http.request(method, f"{path}/"), 404)
        assert error["message"].startswith(f"no such path: {method} {path}/, did you mean {path}?")
    refused = await api.http.post("/v1/responses/compact", json={"model": "tiny", "input": "a"})
    assert "does not offer POST /v1/responses/compact" in error_of(refused, 404)["message"]
    for method, path, status in (("GET", "/api/pull", 404), ("POST", "/api/create", 404), ("GET", "/api/chat", 405)):
        refused = await api.http.request(method, path)
        assert (refused.status_code, type(refused.json()["error"])) == (status, str)
    assert (await api.http.post("/v1/messages/batches")).json()["type"] == "error"
    for response in (await api.complete(model="gpt"), await api.http.get("/v1/models/gpt")):
        error = error_of(response, 404)
        assert (error["code"], error["type"]) == ("model_not_found", "not_found_error")


async def test_internal_errors_do_not_leak_details(make_api: MakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    async with make_api() as api:

        def broken(*_: Any) -> None:
            raise RuntimeError("secret at 0x7fffdead")

        monkeypatch.setattr(api.service, "check_prompt", broken)
        response = await api.complete()
        assert error_of(response, 500)["code"] == "internal_error"
        assert "secret" not in response.text
        assert response.headers["x-request-id"]
        assert api.is_clean()


# -- the queue --------------------------------------------------------------------------------------------------


async def test_request_cap_returns_429_with_retry_after(make_api: MakeApi) -> None:
    async with make_api(max_queued_requests=3) as api:
        api.engine.paused = True
        running = [asyncio.create_task(api.complete(n=n)) for n in (1, 2)]
        await until(lambda: len(api.engine.live) == 3)
        response = await api.complete()
        assert error_of(response, 429)["code"] == "queue_full"
        assert 1 <= int(response.headers["retry-after"]) <= 60
        assert error_of(await api.complete(n=4), 400)["param"] == "n"
        api.engine.paused = False
        assert [response.status_code for response in await asyncio.gather(*running)] == [200, 200]
        assert (await api.complete(n=3)).status_code == 200
        assert api.is_clean()


async def test_token_cap_counts_waiting_requests_only(make_api: MakeApi) -> None:
    async with make_api(max_queued_tokens=100) as api:
        api.engine.paused = True
        task = asyncio.create_task(api.complete(prompt=[1] * 60, max_tokens=3))
        await until(lambda: api.engine.live)
        error_of(await api.complete(prompt=[1] * 60), 429)
        assert error_of(await api.complete(prompt=[1] * 101), 400)["param"] == "prompt"
        error_of(await api.complete(prompt="z" * 60), 429)  # 60 tokens; the estimate of four bytes per token is too low
        api.engine.step()  # the first request now runs and no longer waits
        second = asyncio.create_task(api.complete(prompt=[1] * 60))
        await until(lambda: len(api.engine.live) == 2)
        api.engine.paused = False
        assert {response.status_code for response in await asyncio.gather(task, second)} == {200}
        assert api.is_clean()


async def test_disconnect_during_tokenization_leaves_nothing(
    make_api: MakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either the client disconnects, which is seen when its job starts, or the server cancels the request."""
    async with make_api() as api:
        began, go = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()
        api.engine.paused = True

        def slow_encode(*args: Any) -> list[int]:
            loop.call_soon_threadsafe(began.set)
            assert go.wait(10)
            return [5] * 20

        monkeypatch.setattr(api.service.tokenizer, "encode", slow_encode)
        body = json.dumps({"prompt": "ab" * 5000, "max_tokens": 100}).encode()
        head = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": head, "query_string": b""}
        scope |= {"http_version": "1.1", "scheme": "http", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80)}
        for is_cancelled in (True, False):
            messages = [{"type": "http.request", "body": body}, {"type": "http.disconnect"}]
            sent: list[Any] = []

            async def receive(messages: list[Any] = messages) -> Any:
                return messages.pop(0)

            async def send(message: Any, sent: list[Any] = sent) -> None:
                sent.append(message)

            began.clear()
            go.clear()
            task = asyncio.create_task(api.app(dict(scope), receive, send))
            await began.wait()
            assert api.service.admission.requests == 1
            if is_cancelled:
                task.cancel()
                await asyncio.wait([task])
                assert api.is_clean()
            go.set()
            await asyncio.wait([task])
            assert [message["status"] for message in sent if "status" in message] == ([] if is_cancelled else [499])
            assert api.is_clean()
        assert api.engine.aborted == [add.id for add in api.engine.added]


async def test_drain_rejects_new_requests_and_finishes_running_ones(make_api: MakeApi) -> None:
    async with make_api() as api:
        api.engine.paused = True
        task = asyncio.create_task(api.complete())
        await until(lambda: api.engine.live)
        api.service.drain()
        assert error_of(await api.http.get("/ready"), 503)["code"] == "not_ready"
        assert (await api.http.get("/health")).status_code == 200
        assert error_of(await api.complete(), 503)["code"] == "shutting_down"
        api.engine.paused = False
        assert (await task).status_code == 200


# -- other routes and settings ----------------------------------------------------------------------------------


async def test_request_ids_are_sanitized_echoed_and_unique(api: Api) -> None:
    async def post(request_id: str) -> httpx.Response:
        return await api.http.post("/v1/completions", json={"prompt": "ab"}, headers={"x-request-id": request_id})

    responses = await asyncio.gather(*(post("same-id") for _ in range(4)))
    assert [response.headers["x-request-id"] for response in responses] == ["same-id"] * 4
    assert len({response.json()["id"] for response in responses}) == 4
    assert (await post("a b<c>" + "x" * 500)).headers["x-request-id"] == "abc" + "x" * 125
    assert len((await api.http.get("/nothing")).headers["x-request-id"]) == 32


async def test_priority_must_be_within_configured_range(make_api: MakeApi) -> None:
    async with make_api(priority_range="-5:-2") as api:
        for priority in (-5, -2, 0, None):
            assert (await api.complete(priority=priority)).status_code == 200
        assert [add.options.priority for add in api.engine.added] == [-5, -2, 0, 0]
        for priority in (-6, -1, 1):
            error = error_of(await api.complete(priority=priority), 400)
            assert error["param"] == "priority"
            assert (
                f"must be 0 or an integer in [-5, -2] on this server (--priority-range), got {priority}"
                in error["message"]
            )


async def test_api_keys_have_their_own_priority_range_and_tiers(make_api: MakeApi, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(
        "all\n[priority-range=0:5 priority-tier=none]\nlow\n[priority-range=0:0]\nnone\n[priority-range=-9:-9]\nnine"
    )
    config = with_keys_of_files(ServerConfig(api_key_file=str(file), priority_range="-1:0", priority_tier="all"))
    settings = {name: getattr(config, name) for name in ("api_keys", "key_rights", "priority_range", "priority_tier")}
    server, own = "on this server (--priority-range)", "with this API key"
    async with make_api(**settings) as api:

        def complete(key: str, **body: Any) -> Awaitable[httpx.Response]:
            headers = {"Authorization": f"Bearer {key}"}
            return api.http.post("/v1/completions", json={"prompt": "a", **body}, headers=headers)

        for key, priority, reason in (
            ("all", -1, None),
            ("all", 1, f"must be 0 or an integer in [-1, 0] {server}, got 1"),
            ("low", 5, None),
            ("low", -1, f"must be 0 or an integer in [0, 5] {own}, got -1"),
            ("none", 0, None),
            ("none", -1, f"must be 0 or null {own}, got -1"),
            ("nine", -9, None),
            ("nine", -8, f"must be 0 or an integer in [-9, -9] {own}, got -8"),
        ):
            answer = await complete(key, priority=priority)
            if reason is None:
                assert answer.status_code == 200
                assert api.engine.added[-1].options.priority == priority
            else:
                error = error_of(answer, 400)
                assert (error["param"], error["message"]) == ("priority", f"priority {reason}")
        for key in ("all", "none"):
            assert (await complete(key, service_tier="priority")).status_code == 200
        error = error_of(await complete("low", service_tier="priority"), 400)
        assert error["param"] == "service_tier"
        assert error["message"].endswith("this API key has no tier priority (--priority-tier)")


@pytest.mark.parametrize(
    ("name", "reason"), [("short", "code 1"), ("long" * 25, "set TMPDIR to a folder with a shorter")]
)
async def test_engine_handle_leaves_no_folder(monkeypatch: pytest.MonkeyPatch, name: str, reason: str) -> None:
    with tempfile.TemporaryDirectory(prefix=name) as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        handle = EngineHandle(EngineClient(Metrics()), command=("false",))
        assert not list(Path(folder).iterdir())
        with pytest.raises(EngineStartError, match=reason):
            await handle.start(EngineConfig())
        await handle.stop()
        assert not list(Path(folder).iterdir())


async def test_engine_can_be_killed_during_process_creation() -> None:
    handle = EngineHandle(EngineClient(Metrics()), command=("sleep", "60"))
    starting = asyncio.create_task(handle.start(EngineConfig()))
    await asyncio.sleep(0)
    handle.kill()
    with pytest.raises(EngineStartError, match="SIGKILL"):
        await asyncio.wait_for(starting, 30)
    await handle.stop()


async def test_priority_tier_is_disabled_by_default(api: Api) -> None:
    for post in (api.chat, api.complete):
        error = error_of(await post(service_tier="priority"), 400)
        assert error["param"] == "service_tier"
        assert (
            "must be auto, default, flex or null: this server has no tier priority (--priority-tier)"
            in error["message"]
        )
    assert not api.engine.added
    with pytest.raises(
        ConfigError, match="priority_ttft_ms is for requests of service_tier priority: set priority_tier"
    ):
        ServerConfig(priority_ttft_ms=5)


async def test_fair_by_key_identifies_clients_by_api_key(make_api: MakeApi) -> None:
    async with make_api(api_keys=("one", "other"), fair_by="key") as api:
        for key in ("one", "other", "one"):
            await api.http.post("/v1/completions", json={"prompt": "a"}, headers={"Authorization": f"Bearer {key}"})
        first, second, third = (add.options.client for add in api.engine.added)
        assert first == third != second
        assert not {first, second} & {"", "one", "other"}


async def test_sampling_parameters_reach_engine(api: Api) -> None:
    await api.complete(temperature=0.5, top_k=4, logit_bias={"3": -2}, stop_token_ids=[7])
    add = api.engine.added[0]
    assert (add.params.temperature, add.params.top_k) == (0.5, 4)
    assert add.params.logit_bias == {3: -2}
    assert add.params.stop_token_ids == (7,)


async def test_omitted_sampling_parameters_use_model_defaults(api: Api) -> None:
    defaults = {"temperature": 0.5, "top_k": 20}
    api.service.open(api.ready, api.service.tokenizer, sampling_defaults=defaults)
    for body in ({}, {"temperature": 2, "top_k": -1}, {"temperature": None, "top_k": 3}):
        await api.complete(**body)
    params = [add.params for add in api.engine.added]
    assert [(parameter.temperature, parameter.top_k) for parameter in params] == [(0.5, 20), (2, 0), (0.5, 3)]


async def test_models_version_and_load_endpoints(api: Api) -> None:
    listed = (await api.http.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert listed["data"][0] == (await api.http.get("/v1/models/tiny")).json()
    assert listed["data"][0]["max_model_len"] == tiny.CONTEXT
    assert set((await api.http.get("/version")).json()) == {"version"}
    assert (await api.http.get("/load")).json()["server_load"] == 0


async def test_served_model_name_may_contain_slashes(make_api: MakeApi) -> None:
    async with make_api(served_model_name="org/model") as api:
        assert (await api.http.get("/v1/models/org/model")).json()["id"] == "org/model"
        assert (await api.complete(model="org/model")).json()["model"] == "org/model"


@pytest.mark.parametrize(
    ("given", "folder", "shown", "names"),
    [
        ("./llama", "llama", "llama", ("./llama", "llama")),
        ("/models/llama/", "/models/llama", "llama", ("/models/llama/", "llama")),
        ("llama", "llama", "llama", ("llama",)),
        ("org/llama", "/cache/snapshots/0f3c", "org/llama", ("org/llama",)),
    ],
)
async def test_model_is_named_by_its_folder_and_answers_to_the_given_path(
    api: Api, given: str, folder: str, shown: str, names: tuple[str, ...]
) -> None:
    api.service.open(replace(api.ready, model=given, folder=folder), api.service.tokenizer)
    assert (await api.http.get("/v1/models")).json()["data"][0]["id"] == shown
    for name in {*names, "llama", "0f3c"}:
        response = await api.complete(model=name, max_tokens=1)
        assert response.status_code == (200 if name in names else 404)
        assert response.status_code == 404 or response.json()["model"] == shown
        if "/" not in name:
            assert (await api.http.get(f"/v1/models/{name}")).status_code == response.status_code


async def test_tokenize_and_detokenize(api: Api) -> None:
    body = (await api.http.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})).json()
    assert body["count"] == 3
    assert body["max_model_len"] == tiny.CONTEXT
    assert body["token_strs"][0] == "h"
    text = (await api.http.post("/detokenize", json={"tokens": body["tokens"]})).json()
    assert text == {"prompt": "hé"}
    refused = await api.http.post("/tokenize", json={"prompt": [{"role": "user", "content": "h"}]})
    assert refused.json()["error"]["message"] == "prompt: must be a text; send a conversation as messages"
    chat = (await api.http.post("/tokenize", json={"messages": [{"role": "user", "content": "h"}]})).json()
    assert chat["count"] == 3
    assert error_of(await api.http.post("/tokenize", json={}), 400)["param"] == "prompt"
    assert error_of(await api.http.post("/detokenize", json={"tokens": [tiny.VOCAB]}), 400)["param"] == "tokens"


async def test_tokenizer_info_has_what_evaluations_tokenize_with(api: Api) -> None:
    info = (await api.http.get("/tokenizer_info")).json()
    assert info["model_max_length"] == tiny.CONTEXT
    assert "messages" in info["chat_template"]
    tokens = {name: text for name, text in info.items() if name.endswith("_token")}
    assert "eos_token" in tokens
    for text in tokens.values():
        body = {"prompt": text, "add_special_tokens": False}
        assert (await api.http.post("/tokenize", json=body)).json()["count"] == 1


async def test_endpoints_return_503_until_engine_is_ready() -> None:
    metrics = Metrics()
    service = Service(ServerConfig(), EngineClient(metrics), metrics)
    transport = httpx.ASGITransport(build_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        for path in ("/health", "/ready", "/v1/models", "/load"):
            assert error_of(await http.get(path), 503)["code"] == "starting"
        for path in ("/api/tags", "/api/ps"):  # which name the model, too
            assert (await http.get(path)).status_code == 503
        assert (await http.post("/api/show", json={"model": "some"})).status_code == 503
        assert error_of(await http.post("/v1/completions", json={"prompt": "a"}), 503)["code"] == "starting"
        assert (await http.get("/live")).status_code == 200
    service.close()


# -- unknown fields and paths ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "similar"),
    [
        ({"temprature": 1}, "temprature", "temperature"),
        ({"slo": {"tpt_ms": 1}}, "slo.tpt_ms", "tpot_ms"),
        ({"messages": [{"role": "user", "contents": "a", "content": "a"}]}, "messages.0.contents", "content"),
        (
            {"messages": [{"role": "user", "content": "a", "cache_controls": 1}]},
            "messages.0.cache_controls",
            "cache_control",
        ),
        ({"zzz": "x" * 9000}, "zzz", None),
        ({"max_token": 1, "metadata": {"a": "x" * 500, "b": "x" * 9000}}, "max_token", "max_tokens"),
    ],
    ids=["top", "nested", "in a list", "almost known", "nothing similar", "in a large body"],
)
async def test_unknown_fields_are_refused_with_a_suggestion(
    refusing: Api, fields: dict[str, Any], param: str, similar: str | None
) -> None:
    error = error_of(await refusing.chat(**fields), 400)
    assert (error["param"], error["code"]) == (param, "unknown_parameter")
    assert error["message"].endswith(f"did you mean {similar!r}?" if similar else repr(param))


@pytest.mark.parametrize(
    ("path", "body", "param", "hint"),
    [
        ("/v1/chat/completions", {"prompt": "a"}, "prompt", "send a prompt to /v1/completions"),
        ("/v1/completions", {"messages": [], "prompt": "a"}, "messages", "send messages to /v1/chat/completions"),
        ("/v1/completions", {"messages": []}, "messages", "send messages to /v1/chat/completions"),
        ("/v1/responses", {"messages": []}, "messages", "send messages to /v1/chat/completions"),
        ("/v1/completions", {"prompt": "a", "extra_body": {}}, "extra_body", "stand beside the others"),
    ],
)
async def test_fields_of_another_endpoint_are_told_where_they_belong(
    refusing: Api, path: str, body: dict[str, Any], param: str, hint: str
) -> None:
    error = error_of(await refusing.http.post(path, json=body), 400)
    assert (error["param"], error["code"]) == (param, "unknown_parameter")
    assert error["message"].endswith(hint)


async def test_unknown_fields_may_pass_with_one_line_in_the_log(
    make_api: MakeApi, caplog: pytest.LogCaptureFixture
) -> None:
    async with make_api(unknown_fields="warn") as api:
        messages = [{"role": "user", "content": [{"type": "text", "text": "a", "spacing": {}}], "extra": 1}]
        for filler in ("", "x" * 9000, ""):
            answer = await api.chat(messages=messages, zzz=filler, max_tokens=1)
            assert answer.status_code == 200
        assert sorted(record.args[0] for record in caplog.records if record.args) == [
            "messages.*.content.*.spacing",
            "messages.*.extra",
            "zzz",
        ]
        assert error_of(await api.chat(temperature=3, zzz=1), 400)["param"] == "temperature"
        assert error_of(await api.chat(**{f"z{number}": 1 for number in range(40)}), 400)["code"] == "unknown_parameter"


@pytest.mark.parametrize(
    ("path", "hint"), [("/chat/completions", "/v1/chat/completions"), ("/v1/model", "/v1/models"), ("/nothing", None)]
)
async def test_unknown_path_lists_the_routes(refusing: Api, path: str, hint: str | None) -> None:
    message = error_of(await refusing.http.get(path), 404)["message"]
    assert "/v1/completions" in message
    assert "/metrics" in message
    assert ("did you mean" in message) == (hint is not None)
    assert f"did you mean {hint}?" in message or hint is None


async def test_fair_by_user_identifies_clients_by_the_field(make_api: MakeApi) -> None:
    async with make_api(fair_by="user", api_keys=("one", "other")) as api:
        clients = []
        for key, user in (("one", "a"), ("one", "b"), ("other", "a"), ("one", None), ("one", "a")):
            headers = {"Authorization": f"Bearer {key}"}
            body = {"prompt": "ab", "max_tokens": 1, "user": user}
            assert (await api.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
            clients.append(api.engine.added[-1].options.client)
    assert len(set(clients)) == 4
    assert clients[0] == clients[-1]
