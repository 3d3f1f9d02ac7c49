"""Embeddings, ranks and scores over HTTP and in batches, over a scripted engine."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import openai
import pytest
import tiny_model as tiny
from msgspec.structs import replace
from server_worlds import DIMENSIONS, Api, MakeApi, scripted_vector
from test_batches_runner import World, open_world  # noqa: F401 (a fixture)

from skipjoin.core.request import FinishReason, ServiceClass
from skipjoin.pooling import Task
from skipjoin.server.api.pooled_bodies import MAX_INPUTS

pytestmark = pytest.mark.anyio
EMBEDDINGS, RERANK, SCORE = "/v1/embeddings", "/v1/rerank", "/score"


def made_for(api: Api, task: Task) -> Api:
    api.service._info = replace(api.ready, task=task, dimensions=DIMENSIONS if task is Task.EMBED else 1)
    return api


@pytest.fixture
def open_api(make_api: MakeApi) -> Callable[..., AbstractAsyncContextManager[Api]]:
    @asynccontextmanager
    async def make(task: Task = Task.EMBED, **settings: Any) -> Any:
        async with make_api(**settings) as api:
            yield made_for(api, task)
            assert api.is_clean()

    return make


async def test_official_client_gets_the_engines_floats(open_api: Any) -> None:
    async with open_api() as api:
        client = openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="any", http_client=api.http, max_retries=0)
        texts = ["ab", "cab" * 30, "b"]
        answer = await client.embeddings.create(model="tiny", input=texts)  # the client asks for base64
        expected = [list(struct.unpack(f"<{DIMENSIONS}f", scripted_vector(add))) for add in api.engine.added]
        assert [row.embedding for row in answer.data] == expected
        assert [row.index for row in answer.data] == [0, 1, 2]
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens, answer.model) == (93, 93, "tiny")
        floats = await client.embeddings.create(model="tiny", input=texts, encoding_format="float")
        assert [row.embedding for row in floats.data] == expected
        ids = [[int(byte) for byte in api.engine.added[at].prompt] for at in range(3)]
        for given, count in (ids, 3), (ids[1], 1):
            found = await client.embeddings.create(model="tiny", input=given, dimensions=5)  # type: ignore[arg-type]
            assert [row.embedding for row in found.data] == [
                vector[:5] for vector in (expected if count == 3 else expected[1:2])
            ]
        assert {add.params.max_tokens for add in api.engine.added} == {1}


async def test_ollamas_format_has_the_same_floats(open_api: Any) -> None:
    async with open_api() as api:
        texts = {"model": "tiny:latest", "input": ["ab", "cab"], "options": {"num_ctx": 8}, "keep_alive": "5m"}
        found = (await api.http.post("/api/embed", content=json.dumps(texts))).json()
        same = (await api.http.post(EMBEDDINGS, json={"input": ["ab", "cab"]})).json()
        assert found["embeddings"] == [row["embedding"] for row in same["data"]]
        assert (found["model"], found["prompt_eval_count"]) == ("tiny", 5)
        older = {"model": "tiny", "prompt": "cab", "keep_alive": "5m"}
        assert (await api.http.post("/api/embeddings", json=older)).json() == {"embedding": found["embeddings"][1]}
        for length, status in (3, 200), (2 * tiny.CONTEXT, 400):
            answer = await api.http.post("/api/embed", json={"input": "ab " * length, "truncate": True})
            assert answer.status_code == status
            assert (status == 200) or "maximum context length" in answer.json()["error"]
        refused = await api.http.post("/api/embeddings", json={"prompt": "ab " * 2 * tiny.CONTEXT})
        assert "maximum context length" in refused.json()["error"]
        (running,) = (await api.http.get("/api/ps")).json()["models"]
        assert (running["name"], running["context_length"]) == ("tiny", tiny.CONTEXT)


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
async def test_rerank_sorts_documents(open_api: Any, path: str) -> None:
    body = {"model": "tiny", "query": "aab", "documents": ["ccc", {"text": "aba"}, "abb"], "top_n": 2}
    async with open_api() as api:
        answer = (await api.http.post(path, json=body)).json()
        # Cosines of shares of letters, which aba has as the query.
        assert [(result["index"], result["document"]["text"]) for result in answer["results"]] == [
            (1, "aba"),
            (2, "abb"),
        ]
        scores = [result["relevance_score"] for result in answer["results"]]
        assert scores == pytest.approx([1.0, 0.8], abs=1e-6)
        assert answer["usage"] == {"prompt_tokens": 12, "total_tokens": 12}


async def test_a_model_of_scores_reads_pairs(open_api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_api(Task.SCORE) as api:
        both = api.service.tokenizer.encode
        monkeypatch.setattr(
            api.service.tokenizer,
            "encode_pair",
            lambda one, two, most, asks: (both(one) + both(two), len(one)),
            raising=True,
        )
        pairs = {"text_1": ["a", "bcd"], "text_2": ["bcd", "a"]}
        answer = (await api.http.post(SCORE, json=pairs)).json()
        assert [row["score"] for row in answer["data"]] == [0.25, 0.75]
        many = (await api.http.post("/v1/score", json={"text_1": "a", "text_2": ["b", "bcd"]})).json()
        assert [row["score"] for row in many["data"]] == [0.5, 0.25]
        ranked = await api.http.post(RERANK, json={"query": "a", "documents": ["bcd", "b"], "return_documents": False})
        assert ranked.json()["results"] == [{"index": 1, "relevance_score": 0.5}, {"index": 0, "relevance_score": 0.25}]
        refused = await api.http.post(EMBEDDINGS, json={"input": "a"})
        assert "scores pairs of texts" in refused.json()["error"]["message"]


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (EMBEDDINGS, {"input": ""}, "input", "at least 1 character"),
    (EMBEDDINGS, {"input": ["a", ""]}, "input.1", "at least 1 character"),
    (EMBEDDINGS, {"input": []}, "input", "at least 1 item"),
    (EMBEDDINGS, {"input": ["a"] * (MAX_INPUTS + 1)}, "input", f"at most {MAX_INPUTS}"),
    (EMBEDDINGS, {"input": [["a"]]}, "input.0.0", "valid integer"),
    (EMBEDDINGS, {"input": [tiny.VOCAB]}, "input", rf"must be token ids in [0, {tiny.VOCAB - 1}], got {tiny.VOCAB}"),
    (EMBEDDINGS, {"input": "a" * (tiny.CONTEXT + 1)}, "input", f"at most {tiny.CONTEXT} tokens, special tokens incl"),
    (EMBEDDINGS, {"input": "a" * 10_000}, "input", f"maximum context length is {tiny.CONTEXT} tokens"),
    (EMBEDDINGS, {"input": "a", "dimensions": DIMENSIONS + 1}, "dimensions", f"in [1, {DIMENSIONS}], got"),
    (EMBEDDINGS, {"input": "a", "encoding_format": "hex"}, "encoding_format", "'float' or 'base64'"),
    (EMBEDDINGS, {"input": "a", "stream": True}, "stream", "unknown"),
    (RERANK, {"query": "a", "documents": []}, "documents", "at least 1 item"),
    (RERANK, {"query": "a", "documents": [{"text": "a", "x": 1}]}, "documents.0.x", "unknown"),
    (RERANK, {"query": "a", "documents": ["a"], "top_n": 0}, "top_n", "greater than or equal to 1"),
    (SCORE, {"text_1": ["a", "b"], "text_2": "c"}, "text_2", "as many texts as text_1, 2, got 1"),
]


async def test_odd_bodies_are_refused_by_field(open_api: Any) -> None:
    async with open_api(max_queued_requests=5000) as api:
        for path, body, param, why in REFUSED:
            answer = await api.http.post(path, json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), (body, error)
            assert why in error["message"], (body, error)
        assert (await api.http.post(EMBEDDINGS, json={"input": "a" * tiny.CONTEXT})).status_code == 200
        thousands = await api.http.post(EMBEDDINGS, json={"input": ["abc"] * MAX_INPUTS, "encoding_format": "base64"})
        assert len(thousands.json()["data"]) == MAX_INPUTS
        chat = await api.chat()
        assert (chat.status_code, chat.json()["error"]["param"]) == (400, "model")
        assert "/v1/embeddings" in chat.json()["error"]["message"]


async def test_embeddings_of_a_model_that_generates_name_the_remedy(make_api: MakeApi) -> None:
    async with make_api() as api:
        answer = await api.http.post(EMBEDDINGS, json={"input": "a"})
        assert answer.status_code == 400
        assert "serve it with --task embed" in answer.json()["error"]["message"]
        assert api.is_clean()


async def test_embeddings_have_classes_deadlines_and_can_be_cancelled(open_api: Any) -> None:
    async with open_api() as api:
        api.engine.paused = True
        body = {"input": ["a", "b"], "service_tier": "flex", "priority": 3}
        kept = asyncio.create_task(api.http.post(EMBEDDINGS, json=body, headers={"x-request-id": "mine"}))
        while len(api.engine.live) < 2:
            await asyncio.sleep(0.001)
        late = asyncio.create_task(api.http.post(EMBEDDINGS, json=body | {"deadline_ms": 20}))
        assert (await late).status_code == 408
        assert all(add.options.service is ServiceClass.BEST_EFFORT for add in api.engine.added)
        assert {add.options.priority for add in api.engine.added} == {3}
        assert (await api.http.delete("/v1/requests/mine")).json()["canceled"]
        assert (await kept).status_code == 409
        lost = asyncio.create_task(api.http.post(EMBEDDINGS, json=body))
        while not api.engine.live:
            await asyncio.sleep(0.001)
        api.engine.end_all(FinishReason.ERROR, "no memory")
        assert "no memory" in (await lost).json()["error"]["message"]


async def test_lines_of_a_batch_may_ask_for_embeddings(open_world: Callable[..., Any]) -> None:  # noqa: F811
    async with open_world() as world:
        assert isinstance(world, World)
        made_for(world.api, Task.EMBED)
        body = {"model": "tiny", "input": "abc", "encoding_format": "base64"}
        lines = [
            json.dumps({"custom_id": str(n), "method": "POST", "url": EMBEDDINGS, "body": body}).encode()
            for n in range(3)
        ]
        done = await world.until(await world.submit(*lines, endpoint=EMBEDDINGS))
        assert done["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
        found = await world.answers(done["output_file_id"])
        (vector,) = {line["response"]["body"]["data"][0]["embedding"] for line in found.values()}
        assert base64.b64decode(vector) == scripted_vector(world.api.engine.added[0])
        assert done["usage"]["input_tokens"] == 9
