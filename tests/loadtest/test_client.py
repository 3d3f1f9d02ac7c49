from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from collections.abc import Sequence
from itertools import cycle, pairwise
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from skipjoin.config import ConfigError
from skipjoin.core.request import ServiceClass
from skipjoin.core.request import Target as RequestTarget
from skipjoin.loadtest import client as client_module
from skipjoin.loadtest.client import Client, ClientRun
from skipjoin.loadtest.http_answer import Answer
from skipjoin.loadtest.http_request import Bodies
from skipjoin.loadtest.runs import figures
from skipjoin.loadtest.targets import Target, parse_extra, parse_prompt_ids
from skipjoin.observe.record import Slo
from skipjoin.routes import MESSAGES, RESPONSES, Route
from skipjoin.workload.prefixes import PromptParts
from skipjoin.workload.request import WorkloadRequest
from support.openai_stub import DONE, OpenAiStub, complete, event, stream, token, usage, whole


def jobs(count: int, *, gap_s: float = 0.002, tokens: int = 3) -> list[WorkloadRequest]:
    return [
        WorkloadRequest(number * gap_s, 5, tokens, service.value, number % 2, service=service)
        for number, service in zip(range(count), cycle(ServiceClass))
    ]


def go(
    url: str, jobs: Sequence[WorkloadRequest], *, timeout_s: float | None = None, **target: Any
) -> tuple[ClientRun, float]:
    async def run() -> tuple[ClientRun, float]:
        async with Client(Target(base_url=url, model="stub", **target), timeout_s=timeout_s) as client:
            started = ClientRun(client, jobs, Bodies(client.target, "0"))
            return started, await started.go()

    return asyncio.run(run())


def kinds(run: ClientRun) -> dict[str, int]:
    return dict(Counter(exchange.failure.kind if exchange.failure else "finished" for exchange in run.exchanges))


def test_a_response_has_the_times_of_its_tokens() -> None:
    answer = Answer()
    role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    for now, data in enumerate(
        (
            b": a comment\n\n",
            event(choices=[role]),
            event(choices=[{**role, "delta": {"content": "a"}}]),
            event(choices=[{**role, "delta": {"content": "b"}, "finish_reason": "length"}]),
            usage(2),
            DONE,
        )
    ):
        answer.feed(data, float(now))
    assert (answer.first_token, answer.last_token, answer.ended) == (2.0, 3.0, 5.0)
    assert (answer.prompt_tokens, answer.output_tokens, answer.finish_reason) == (7, 2, "length")
    assert answer.problem(2, may_stop=False) is None


def test_answers_of_other_formats_have_the_same_figures() -> None:
    counts = {"input_tokens": 7, "output_tokens": 2}
    streams: dict[Route, list[dict[str, Any]]] = {
        RESPONSES: [
            {"type": "response.created", "response": {"status": "in_progress", "usage": None}},
            {"type": "response.output_text.delta", "delta": "a"},
            {"type": "response.reasoning_text.delta", "delta": "b"},
            {"type": "response.incomplete", "response": {"status": "incomplete", "usage": counts}},
        ],
        MESSAGES: [
            {"type": "message_start", "message": {"usage": {"input_tokens": 3, "cache_read_input_tokens": 4}}},
            {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}},
            {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "b"}},
            {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": {"output_tokens": 2}},
            {"type": "message_stop"},
        ],
    }
    for route, events in streams.items():
        answer = Answer(route)
        for now, data in enumerate(events):
            assert answer.problem(2, may_stop=False) is not None
            answer.feed(b"event: " + data["type"].encode() + b"\n" + event(**data), float(now))
        answer.close(9.0)
        assert answer.problem(2, may_stop=False) is None
        assert (answer.text, answer.first_token, answer.last_token, answer.ended) == ("ab", 1.0, 2.0, len(events) - 1.0)
        assert (answer.prompt_tokens, answer.output_tokens, answer.finish_reason) == (7, 2, "length")
        failed, message = Answer(route), {"message": "engine died"}
        failed.feed(event(type="error", **message if route is RESPONSES else {"error": message}), 1.0)
        assert failed.problem(2, may_stop=False) == ("error_event", "engine died")


@given(
    text=st.text(min_size=1, max_size=20),
    cuts=st.lists(st.integers(0, 400), max_size=8),
    newline=st.sampled_from([b"\n", b"\r\n"]),
    unterminated=st.booleans(),
)
def test_streams_may_be_split_at_any_byte(text: str, cuts: list[int], newline: bytes, unterminated: bool) -> None:
    choice = {"index": 0, "text": f'"error" [DONE] "completion_tokens" {text}', "finish_reason": None}
    data = (event(choices=[choice]) * 2 + usage(2) + DONE).replace(b"\n", newline)
    data = data.rstrip() if unterminated else data
    answer = Answer()
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for number, (start, end) in enumerate(pairwise(edges)):
        answer.feed(data[start:end], float(number))
    answer.close(float(len(edges)))
    assert answer.problem(2, may_stop=False) is None
    assert answer.output_tokens == 2


@pytest.mark.parametrize(
    ("data", "kind", "message"),
    [
        (token() * 3 + usage(3), "truncated", "without [DONE]"),
        (token() * 2 + token("stop") + usage(2) + DONE, "truncated", "2 tokens of 3"),
        (token() * 3 + DONE, "no_usage", "include_usage"),
        (b'data: {"choices": [}\n\n' + DONE, "malformed", "choices"),
        (b'data: {"choices": [{"text": "\xff"}]}\n\n' + DONE, "malformed", "decode"),
        (usage(3) + DONE, "malformed", "held a token"),
        (token() + event(error={"message": "engine died", "code": "engine_dead"}), "error_event", "engine died"),
        (token() + event(error="no words"), "error_event", "no words"),
    ],
)
def test_invalid_responses_are_errors_with_a_kind(data: bytes, kind: str, message: str) -> None:
    answer = Answer()
    answer.feed(data, 1.0)
    found = answer.problem(3, may_stop=False)
    assert found.kind == kind
    assert message in found.detail


def test_a_response_may_stop_early_only_without_ignore_eos() -> None:
    async def stop(stub: OpenAiStub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await stream(request, token("stop"), usage(1), DONE)

    with OpenAiStub(stop) as stub:
        assert kinds(go(stub.url, jobs(1))[0]) == {"truncated": 1}
        assert "ignore_eos" in stub.bodies[-1]
        run, _ = go(stub.url, jobs(1), extra={"ignore_eos": None})
        assert "ignore_eos" not in stub.bodies[-1]
    assert kinds(run) == {"finished": 1}
    assert run.exchanges[0].facts.reason == "stop"


def test_bodies_depend_on_the_seed_and_share_no_prefix() -> None:
    target = Target(base_url="http://host:1/v1/", model="m", prompt_ids=(10, 40))
    one, same, other = (
        [json.loads(bodies.make(job)) for job in jobs(20)] for bodies in map(target_bodies(target), "001")
    )
    assert one == same
    assert one != other
    assert all(len(body["prompt"]) == 5 and set(body["prompt"]) <= set(range(10, 41)) for body in one)
    assert all(before["prompt"][0] != after["prompt"][0] for before, after in pairwise(one))
    assert [(body.get("priority"), body.get("service_tier")) for body in one[:2]] == [(None, None), (1, "flex")]
    assert {body["max_tokens"] for body in one} == {3}
    assert target.url == "http://host:1/v1/completions"


def test_bodies_contain_the_options_of_trace_rows() -> None:
    job = jobs(1)[0]._replace(deadline_s=2.5, target=RequestTarget(ttft_s=0.25, jct_s=9.0))
    target = Target(base_url="http://host:1", model="m")
    plain, requested = (json.loads(Bodies(target, "0").make(sent)) for sent in (jobs(1)[0], job))
    assert {name: requested[name] for name in requested.keys() - plain.keys()} == {
        "deadline_ms": 2500,
        "slo": {"ttft_ms": 250, "jct_ms": 9000},
    }


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_prompts_share_the_prefixes_of_their_jobs(endpoint: str) -> None:
    target = Target(base_url="http://host:1", model="m", endpoint=endpoint, prompt_ids=(0, 999))
    names = [(1, 2), (1, 3), (), (1, 2)]
    workload = [WorkloadRequest(0.0, 9, 3, "default", 0, parts=PromptParts(parts, 3)) for parts in names]
    bodies = Bodies(target, "0")
    sent = [json.loads(bodies.make(job)) for job in workload]
    prompts = [body["messages"][0]["content"].split() if endpoint == "chat" else body["prompt"] for body in sent]
    one, other, alone, again = prompts
    assert {len(prompt) for prompt in prompts} == {9}
    assert (one[:6], one[:3]) == (again[:6], other[:3])
    assert one[6:] != again[6:]
    assert one[:6] != other[:6]
    assert alone[0] != one[0]


def target_bodies(target: Target) -> Any:
    return lambda seed: Bodies(target, seed)


def test_chat_bodies_have_the_same_length_and_extra_fields_override() -> None:
    target = Target(base_url="http://host:1", endpoint="chat", model="m", extra={"temperature": 1, "ignore_eos": None})
    body = json.loads(Bodies(target, "0").make(jobs(1)[0]))
    assert len(body["messages"][0]["content"].split()) == 5
    assert body["temperature"] == 1
    assert "ignore_eos" not in body
    assert target.url == "http://host:1/v1/chat/completions"


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_outputs_of_trace_prompts_may_have_any_length(endpoint: str) -> None:
    """No length is requested, so a stop completes the response. With `ignore_eos` the trace's length is required."""

    async def stop(stub: OpenAiStub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await stream(request, token(), token("stop"), usage(2), DONE)

    workload = [WorkloadRequest(0.0, 5, 30, "default", 0, 4, "Count to 3")]
    with OpenAiStub(stop) as stub:
        run, _ = go(stub.url, workload, endpoint=endpoint)
        strict, _ = go(stub.url, workload, endpoint=endpoint, extra={"ignore_eos": True})
    free, fixed = stub.bodies
    sent = free["messages"][0]["content"] if endpoint == "chat" else free["prompt"]
    assert sent == "Count to 3"
    assert not {"max_tokens", "ignore_eos"} & set(free)
    assert (fixed["max_tokens"], fixed["ignore_eos"]) == (30, True)
    assert (kinds(run), kinds(strict)) == ({"finished": 1}, {"truncated": 1})
    line = run.exchanges[0].as_json()
    assert (line["row"], line["output"], line["output_tokens"]) == (4, "xx", 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Target(base_url="localhost:8000"), "base_url must be like http://"),
        (lambda: Target(base_url="http://host:99999"), "base_url must be like http://"),
        (lambda: Target(base_url="http://host", endpoint="chats"), "did you mean chat?"),
        (lambda: Target(base_url="http://host", prompt_ids=(5, 5)), "prompt_ids must be LOW-HIGH with"),
        (lambda: parse_prompt_ids("100"), "prompt_ids must be LOW-HIGH"),
        (lambda: parse_extra("[1]"), "extra_body must be a JSON object"),
        (lambda: parse_extra("{"), "extra_body must be a JSON object"),
    ],
)
def test_invalid_settings_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        make()
    assert message in str(error.value)


def test_times_count_from_the_due_time() -> None:
    with OpenAiStub() as stub:
        run, seconds = go(stub.url, jobs(20))
    for exchange in run.exchanges:
        facts = exchange.facts
        assert facts.arrival == exchange.job.at
        assert exchange.sent is not None
        assert facts.first_token is not None
        assert facts.last_token is not None
        assert facts.ended is not None
        assert exchange.job.at <= exchange.sent <= facts.first_token <= facts.last_token <= facts.ended <= seconds
        assert (facts.prompt_tokens, facts.output_tokens, facts.reason) == (7, 3, "length")


def test_calls_of_a_program_follow_each_other_under_its_name() -> None:
    asked: list[tuple[str | None, int]] = []

    async def note(stub: OpenAiStub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        asked.append((request.headers.get("x-program-id"), body["priority"]))
        return await complete(stub, request, body)

    names = ["a", "a", "b", "", "a"]
    calls = [
        job._replace(program=name, pause_s=0.05 if name == "a" and number else None, priority=number + 1)
        for number, (job, name) in enumerate(zip(jobs(5), names, strict=True))
    ]
    with OpenAiStub(note) as stub:
        run, seconds = go(stub.url, calls)
    assert {number: name for name, number in asked} == {number: name or None for number, name in enumerate(names, 1)}
    first, second, *_, third = [exchange.facts for exchange in run.exchanges]
    for before, after in ((first, second), (second, third)):
        assert before.ended is not None
        assert before.ended + 0.05 <= after.arrival < before.ended + 1.0
    programs = figures(run.exchanges, seconds, Slo())["programs"]
    assert (programs["ended"], programs["calls"], programs["recomputed_tokens"]) == (2, 4, None)
    assert programs["completion_s"]["p99"] > 0.1


def test_requests_are_sent_although_the_server_answers_none() -> None:
    """The server responds after the last request; a closed-loop client would wait forever."""

    async def hold(stub: OpenAiStub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        while len(stub.bodies) < 150:
            await asyncio.sleep(0.01)
        return await complete(stub, request, body)

    with OpenAiStub(hold) as stub:
        run, _ = go(stub.url, jobs(150))
    assert kinds(run) == {"finished": 150}
    last_due = run.exchanges[-1].job.at
    assert all((exchange.facts.first_token or 0.0) >= last_due for exchange in run.exchanges)


async def misbehave(stub: OpenAiStub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Respond with a different failure for each last digit of the request's number."""
    kind = body["prompt"][0] % 10
    if kind in (1, 2):
        return web.json_response({"error": {"message": "the queue is full"}}, status=429)
    if kind == 3:
        return web.Response(body=b'{"error": {"message": "oops \xff"}}', status=500)
    if kind == 4:
        return await stream(request, token(), event(error={"message": "died"}))
    if kind == 5:
        return await stream(request, token(), usage(1))
    if kind == 6:
        response = await stream(request, token())
        request.transport.abort()
        return response
    if kind == 7:
        response = await stream(request, token())
        await asyncio.Event().wait()
        return response
    if kind == 8:
        return await stream(request, *whole(2))
    return await complete(stub, request, body)


def test_every_request_is_counted_whatever_the_server_does() -> None:
    with OpenAiStub(misbehave) as stub:
        run, seconds = go(stub.url, jobs(200, gap_s=0.001), timeout_s=3.0, prompt_ids=(100, 299))
    expected = {
        "finished": 40,
        "http_429": 40,
        "http_500": 20,
        "error_event": 20,
        "truncated": 40,
        "reset": 20,
        "timeout": 20,
    }
    assert kinds(run) == expected
    assert len(stub.bodies) == 200  # no request was sent twice
    record = figures(run.exchanges, seconds, Slo(jct_s=100.0))
    counts = {"submitted": 200, "finished": 40, "unfinished": 0, "rejected": 40, "errors": 120}
    assert record["requests"] == counts
    assert record["client"]["errors_by_kind"] == {kind: n for kind, n in expected.items() if kind != "finished"}
    assert record["slo"]["jct_attained"] == 0.2  # over the real-time requests
    # The failures with odd numbers are those of best-effort requests.
    assert record["classes"]["best-effort"]["requests"] == {**counts, "submitted": 100, "finished": 20, "rejected": 20,
                                                            "errors": 60}  # fmt: skip
    assert record["classes"]["real-time"]["slo"]["jct_attained"] == 0.2
    assert record["classes"]["best-effort"]["slo"]["jct_attained"] is None
    tiers = {(body["prompt"][0] % 2, body.get("service_tier")) for body in stub.bodies}
    assert tiers == {(0, None), (1, "flex")}


def test_figures_that_a_client_cannot_measure_are_null() -> None:
    with OpenAiStub() as stub:
        run, seconds = go(stub.url, jobs(4))
    record = figures(run.exchanges, seconds, Slo())
    hidden = ("breakdown_s", "wait_s", "kv", "steps", "batch_mean", "forward", "groups", "series")
    assert [record[name] for name in hidden] == [None] * len(hidden)
    assert set(record["queue_s"].values()) == {None}
    assert record["quantiles"]["queue_s"] == []
    assert len(record["quantiles"]["ttft_s"]) == 101
    assert record["client"]["lag_max_s"] >= record["client"]["lag_p99_s"] >= 0


def test_every_request_is_counted_when_the_server_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_FAILING_S", 1.0)

    async def die(stub: OpenAiStub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if len(stub.bodies) == 10:
            stub.die()
        return await complete(stub, request, body)

    with OpenAiStub(die) as stub:
        run, seconds = go(stub.url, [*jobs(1000, gap_s=0.01), WorkloadRequest(3600.0, 5, 3, "default", 0)])
    found = kinds(run)
    assert run.gone
    assert found.pop("finished") <= 10
    assert found.pop("not_sent") >= 1
    assert found["refused"] >= 3
    assert set(found) <= {"refused", "reset", "abandoned"}
    record = figures(run.exchanges, seconds, Slo())
    assert record["requests"]["submitted"] == 1001
    assert record["requests"]["finished"] + record["requests"]["errors"] == 1001


def test_requests_to_an_unreachable_server_are_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://localhost:{taken.getsockname()[1]}"
    run, _ = go(url, jobs(3))
    assert kinds(run) == {"refused": 3}
    assert not run.gone  # the outage was too short
