"""Stored responses through OpenAI's client, across a restart of the server. The output repeats the last message."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import tiny_model as tiny
from server_worlds import Api
from test_server_tools import ADD, CALLS, ECHO

from skipjoin.config import ServerConfig
from skipjoin.server.batches.service import Batches

pytestmark = pytest.mark.anyio

ASKED: dict[str, Any] = {"model": "tiny", "tools": [{"type": "function", **ADD["function"]}]}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "9"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.write_tokenizer(tmp_path_factory.mktemp("stored"))
    (folder / "chat_template.jinja").write_text(ECHO)
    return folder


@asynccontextmanager
async def serving(
    folder: Path, batch_dir: Path, **settings: Any
) -> AsyncIterator[tuple[Api, openai.AsyncOpenAI, openai.AsyncOpenAI]]:
    """Yield a server, and clients with two keys."""
    config = ServerConfig(api_keys=("right", "other"), batch_dir=str(batch_dir), store_responses=True, **settings)
    api = Api(folder, config, context=4096)
    batches = Batches(api.service, most=1)
    await batches.open()
    base, http = "http://localhost/v1", api.http
    async with http:
        yield (
            api,
            openai.AsyncOpenAI(base_url=base, api_key="right", max_retries=0, http_client=http),
            openai.AsyncOpenAI(base_url=base, api_key="other", max_retries=0, http_client=http),
        )
        assert api.is_clean()
    await batches.close()
    api.service.close()


async def test_stored_conversation_goes_on_after_a_restart(folder: Path, tmp_path: Path) -> None:
    def prompt() -> list[int]:
        return api.engine.added[-1].prompt

    async with serving(folder, tmp_path) as (api, client, _):
        first = await client.responses.create(input=CALLS, **ASKED)
        assert {item.type for item in first.output} == {"reasoning", "message", "function_call"}
        whole: list[Any] = [{"role": "user", "content": CALLS}, *first.output, RESULT]
        kept_by_client = await client.responses.create(input=whole, store=False, **ASKED)
        expected = prompt()
        assert (first.store, kept_by_client.store) == (True, False)
    async with serving(folder, tmp_path) as (api, client, others):
        assert (await client.responses.retrieve(first.id)).output == first.output
        async with client.responses.stream(input=[RESULT], previous_response_id=first.id, **ASKED) as stream:  # type: ignore[list-item]
            second = await stream.get_final_response()
        assert prompt() == expected
        assert (second.previous_response_id, second.output_text) == (first.id, "9")
        # Vercel's AI SDK refers to each item by default.
        references = [{"type": "item_reference", "id": item.id} for item in first.output]
        await client.responses.create(input=[whole[0], *references, RESULT], **ASKED)
        assert prompt() == expected

        shown = await client.responses.retrieve(second.id)
        assert (shown.output_text, shown.status, shown.usage) == ("9", "completed", second.usage)
        items = [item async for item in client.responses.input_items.list(second.id, limit=1, order="asc")]
        assert [item.type for item in items] == ["message", *(item.type for item in first.output), RESULT["type"]]
        (newest, *_) = (await client.responses.input_items.list(second.id)).data
        assert newest.type == RESULT["type"]

        for of, name in ((client, kept_by_client.id), (others, first.id)):
            with pytest.raises(openai.BadRequestError) as refused:
                await of.responses.create(input="x", previous_response_id=name, **ASKED)
            assert refused.value.code == "previous_response_not_found"
            for ask in (of.responses.retrieve, of.responses.delete):
                with pytest.raises(openai.NotFoundError):
                    await ask(name)
        with pytest.raises(openai.NotFoundError, match="send the item itself"):
            await others.responses.create(input=references, **ASKED)  # type: ignore[arg-type]

        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
        third = await client.responses.create(input="Thanks.", previous_response_id=second.id, **ASKED)
        found = (await client.responses.input_items.list(third.id, order="asc")).data
        assert len(found) == len(whole) + len(second.output) + 1


async def test_a_response_that_cannot_be_stored_is_an_error(folder: Path, tmp_path: Path) -> None:
    async with serving(folder, tmp_path, max_stored_response_bytes_per_key=10) as (api, *_):
        body, headers = {"input": "a", "max_output_tokens": 2}, {"authorization": "Bearer right"}
        answer = await api.http.post("/v1/responses", json=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "quota_exceeded")
        answer = await api.http.post("/v1/responses", json=body | {"store": False}, headers=headers)
        assert answer.status_code == 200
        answer = await api.http.post("/v1/responses", json=body | {"stream": True}, headers=headers)
        last = json.loads(answer.text.rstrip().rpartition("data: ")[2])
        assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", "quota_exceeded")
