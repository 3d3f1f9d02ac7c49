"""Endpoints without HTTP: jobs are prepared, run, aborted and rejected without requests or responses."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import pytest
import tiny_model as tiny
from pydantic import create_model
from server_worlds import Api, MakeApi, end_next

from skipjoin import routes
from skipjoin.core.request import FinishReason, RequestOptions
from skipjoin.sampling import Parameter, ParameterError, SamplingParams, parameters_of
from skipjoin.server.api.chat import ChatEndpoint
from skipjoin.server.api.completions import CompletionEndpoint
from skipjoin.server.api.dialects.messages import MessagesEndpoint
from skipjoin.server.api.dialects.ollama import OllamaGenerateEndpoint
from skipjoin.server.api.dialects.responses import ResponsesEndpoint
from skipjoin.server.api.errors import ApiError
from skipjoin.server.api.fields import Body, sampling_fields
from skipjoin.server.api.generation import Endpoint
from skipjoin.server.api.jobs import Origin
from skipjoin.server.api.pooled import EmbeddingEndpoint
from skipjoin.server.api.protocol import CompletionRequest

pytestmark = pytest.mark.anyio

PAGE = Path(__file__).parents[2] / "docs" / "add-an-endpoint.md"

# Every endpoint, with a body that asks for several choices where it can.
CASES: list[tuple[type[Endpoint[Any]], dict[str, Any]]] = [
    (CompletionEndpoint, {"prompt": ["abcdef", "xyz"], "n": 2, "max_tokens": 8, "seed": 4}),
    (ChatEndpoint, {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "n": 2, "logprobs": True}),
    (ResponsesEndpoint, {"input": "hello", "max_output_tokens": 8, "top_logprobs": 1}),
    (MessagesEndpoint, {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}),
    (OllamaGenerateEndpoint, {"prompt": "hello", "options": {"num_predict": 8}, "stream": False}),
]
for_each = pytest.mark.parametrize(("kind", "fields"), CASES)


def body_of(kind: type[Endpoint[Any]], fields: dict[str, Any]) -> Any:
    return kind.body_type.model_validate(fields)


def without_id(data: bytes) -> Any:
    changing = re.compile(r"id|created|created_at|completed_at|\w+_duration|queue_time")
    return json.loads(data, object_pairs_hook=lambda pairs: {k: v for k, v in pairs if not changing.fullmatch(k)})


@for_each
async def test_job_response_matches_http_response(api: Api, kind: type[Endpoint[Any]], fields: Any) -> None:
    endpoint = kind(api.service)
    expected = await api.http.post(endpoint.route.path, json=fields)
    async with endpoint.run(await endpoint.prepare(body_of(kind, fields), Origin())) as run:
        assert without_id(await run.whole()) == without_id(expected.content)


@for_each
async def test_job_deltas_add_up_to_the_whole_response(api: Api, kind: type[Endpoint[Any]], fields: Any) -> None:
    endpoint = kind(api.service)
    body = body_of(kind, fields)
    async with endpoint.run(await endpoint.prepare(body, Origin())) as run:
        whole = await run.whole()
    job = await endpoint.prepare(body, Origin())
    texts = dict.fromkeys(job.choices, "")
    async with endpoint.run(job) as run:
        async for deltas in run:
            for choice, text in deltas.items():
                texts[choice] += text
        assert run.is_finished
    assert all(texts.values())
    assert without_id(job.format.whole(texts, run.usage())) == without_id(whole)


@for_each
async def test_request_options_reach_engine_unchanged(api: Api, kind: type[Endpoint[Any]], fields: Any) -> None:
    endpoint = kind(api.service)
    options = RequestOptions(priority=-7)
    async with endpoint.run(await endpoint.prepare(body_of(kind, fields), Origin(options=options))) as run:
        await run.whole()
    assert {add.options for add in api.engine.added} == {options}


@for_each
async def test_job_releases_everything_however_it_ends(
    make_api: MakeApi, kind: type[Endpoint[Any]], fields: Any
) -> None:
    async with make_api() as api:
        endpoint = kind(api.service)
        body = body_of(kind, fields)
        job = await endpoint.prepare(body, Origin())
        assert api.service.admission.requests == len(job.choices)
        job.close()  # it never ran
        assert api.is_clean()

        async with endpoint.run(await endpoint.prepare(body, Origin())) as run:
            await anext(run)  # leave before the end
        assert api.is_clean()
        assert not api.engine.live

        ends: list[tuple[Callable[[], None], type[Exception], str]] = [
            (lambda: api.engine.end_all(FinishReason.DEADLINE), ApiError, "deadline"),
            (lambda: api.engine.end_all(FinishReason.ERROR, "no memory"), ApiError, "no memory"),
            (lambda: run.fail(KeyError("cancelled")), KeyError, "cancelled"),
        ]
        api.engine.paused = True
        for end, error, text in ends:
            async with endpoint.run(await endpoint.prepare(body, Origin())) as run:
                asyncio.get_running_loop().call_soon(end)
                with pytest.raises(error, match=text):
                    await run.whole()
            assert api.is_clean()

        late = await endpoint.prepare(body, Origin(options=RequestOptions(deadline_s=1.0), arrived=0.0))
        with pytest.raises(ApiError, match="deadline"):
            async with endpoint.run(late):
                raise AssertionError("an expired job runs")
        assert api.is_clean()


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"prompt": "x" * tiny.CONTEXT}, 400, "prompt"),
        ({"prompt": ["ab", [tiny.VOCAB]]}, 400, "prompt.1"),
        ({"prompt": [tiny.VOCAB]}, 400, "prompt"),
        ({"prompt": "ab", "max_tokens": tiny.CONTEXT}, 400, "max_tokens"),
        ({"prompt": "ab", "model": "other"}, 404, None),
        ({"prompt": "ab", "n": 5}, 400, "n"),
        ({"prompt": "ab", "n": 4}, 429, None),
    ],
    ids=str,
)
async def test_rejected_job_holds_nothing(make_api: MakeApi, fields: Any, status: int, param: str | None) -> None:
    async with make_api(max_queued_requests=4) as api:
        endpoint, parse = CompletionEndpoint(api.service), api.service.parse
        taken = await endpoint.prepare(body_of(CompletionEndpoint, {"prompt": "a"}), Origin())
        with pytest.raises(ApiError) as refused:
            await endpoint.prepare(await parse(json.dumps(fields).encode(), endpoint.body_type), Origin())
        assert (refused.value.status, refused.value.param) == (status, param)
        taken.close()
        assert api.is_clean()


async def test_endpoint_of_the_guide_is_one_file(make_api: MakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the file of `docs/add-an-endpoint.md`, and use its endpoint over HTTP."""
    code = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)[0]
    module = ModuleType("generate")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(code, PAGE.name, "exec"), vars(module))
    monkeypatch.setitem(routes.ROUTES, module.GENERATE.key, module.GENERATE)

    fields: dict[str, Any] = {"text": "Count", "n": 2, "max_tokens": 8, "seed": 3}
    async with make_api(api_keys=("right",)) as api:
        assert (await api.http.post("/generate", json=fields)).json()["problem"].startswith("this server needs")
        api.http.headers["Authorization"] = "Bearer right"
        whole = (await api.http.post("/generate", json=fields)).json()
        assert (sorted(whole["texts"]), whole["usage"]["completion_tokens"]) == (["0", "1"], 16)
        streamed = await api.http.post("/generate", json=fields | {"stream": True})
        events = re.findall(r"^event: (\w+)\ndata: (\{.*)$", streamed.text, re.MULTILINE)
        assert [events[0][0], events[-1][0], {name for name, _ in events[1:-1]}] == ["begin", "end", {"text"}]
        assert [json.loads(events[at][1])["usage"]["completion_tokens"] for at in (0, -1)] == [0, 16]
        texts = dict.fromkeys(whole["texts"], "")
        for _, data in events:
            for choice, text in json.loads(data)["texts"].items():
                texts[choice] += text
        assert texts == whole["texts"]
        assert "[DONE]" not in streamed.text
        refused = await api.http.post("/generate", json=fields | {"txet": "Count"})
        assert (refused.status_code, refused.json()["field"]) == (400, "txet")
        long = await api.http.post("/generate", json=fields | {"text": "ab" * 100_000})  # its size is no error
        assert long.json()["problem"].startswith("This model's maximum context length")
        assert "/generate" in (await api.http.get("/openapi.json")).json()["paths"]
        api.engine.paused = True
        ending = asyncio.create_task(end_next(api, "no memory"))
        failed = await api.http.post("/generate", json=fields | {"stream": True})
        await ending
        assert failed.text.endswith('event: error\ndata: {"problem":"no memory","field":null}\n\n')
        assert api.is_clean()


def test_every_row_names_a_handler_and_bodies_that_exist() -> None:
    for route in routes.ROUTES.values():
        handler = routes.resolved(route.handler)
        assert callable(handler)
        if route.frames is not None:
            assert handler.route is route
        elif route.method == "POST" and route.body is not None:
            assert issubclass(routes.resolved(route.body), Body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Salted(SamplingParams):
    salt: Annotated[int, Parameter("Changes nothing.", low=1, high=9, means=((-1, 1),))] = 3


async def test_sampling_parameter_is_one_row(make_api: MakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    known = parameters_of(SamplingParams)
    added = {name: field for name, field in sampling_fields(Salted).items() if name not in known}
    monkeypatch.setattr(CompletionEndpoint, "body_type", create_model("Request", __base__=CompletionRequest, **added))
    monkeypatch.setattr("skipjoin.server.api.service.SamplingParams", Salted)
    async with make_api() as api:
        for given, expected in ({}, 3), ({"salt": 5}, 5), ({"salt": -1}, 1):
            assert (await api.complete(**given)).status_code == 200
            params = api.engine.added[-1].params
            assert isinstance(params, Salted)
            assert params.salt == expected
        refused = await api.complete(salt=10)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "salt")
        assert "salt" in (await api.http.get("/openapi.json")).text
    with pytest.raises(ParameterError, match=r"salt must be in \[1, 9\], got 10"):
        Salted(salt=10)


def test_defaults_of_parameters_are_valid_and_their_own_fields_exist() -> None:
    kinds = [*(kind for kind, _ in CASES), EmbeddingEndpoint]
    for name, row in parameters_of(SamplingParams).items():
        SamplingParams(**{name: deepcopy(row.default)})
        for field in row.parameter.own:
            assert any(field in kind.body_type.model_fields for kind in kinds), name
