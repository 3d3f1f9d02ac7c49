"""Fields of vLLM's that clients send, and requests that their key cancels."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import tiny_model as tiny
from server_worlds import Api, MakeApi
from test_server_api import error_of, events

from skipjoin.config import ServerConfig
from skipjoin.sampling import BadWords, ThinkingBudget

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "hello"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


async def test_token_ids_are_returned(api: Api) -> None:
    asked = {"return_token_ids": True, "max_tokens": 8}
    whole = (await api.chat(**asked)).json()
    ids = api.engine.added[-1].prompt
    assert whole["prompt_token_ids"] == ids
    assert whole["choices"][0]["token_ids"] == [*ids, ids[0]]
    *found, _ = events(await api.chat(**asked, stream=True))
    assert [event.get("prompt_token_ids") for event in found] == [ids] + [None] * (len(found) - 1)
    assert [token for event in found for token in event["choices"][0].get("token_ids", [])] == [*ids, ids[0]]
    (choice,) = (await api.complete(**asked)).json()["choices"]
    assert choice["prompt_token_ids"] == api.service.tokenizer.encode("abcdef")
    *found, _ = events(await api.complete(**asked, stream=True))
    assert found[0]["choices"][0]["prompt_token_ids"] == choice["prompt_token_ids"]
    assert [token for event in found for token in event["choices"][0]["token_ids"]] == choice["token_ids"]
    assert "token_ids" not in (await api.chat()).json()["choices"][0]


async def test_log_probabilities_of_prompts_are_returned(api: Api) -> None:
    answer = (await api.chat(prompt_logprobs=2, logprobs=True)).json()
    ids = api.engine.added[-1].prompt
    first, *others = answer["prompt_logprobs"]
    assert first is None
    assert len(others) == len(ids) - 1
    for token, scores in zip(ids[1:], others, strict=True):
        assert scores["0"] == {"logprob": -1.0, "rank": 1, "decoded_token": "!"}
        assert scores[str(token)]["logprob"] == (-0.25 if token > 1 else -1.0 - token)
        assert scores[str(token)]["rank"] == (None if token > 1 else token + 1)
    assert len(answer["choices"][0]["logprobs"]["content"]) == 8
    (choice,) = (await api.complete(prompt_logprobs=0, logprobs=1)).json()["choices"]
    assert [scores and [*scores] for scores in choice["prompt_logprobs"]] == [
        None,
        *([str(token)] for token in api.engine.added[-1].prompt[1:]),
    ]
    assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["text_offset"]) == 16


async def test_banned_words_and_allowed_tokens_reach_the_engine(api: Api) -> None:
    answer = await api.chat(bad_words=["no", " way"], allowed_token_ids=[5, 7])
    params = api.engine.added[-1].params
    assert answer.status_code == 200
    assert params.allowed_token_ids == (5, 7)
    texts = [api.service.tokenizer.decode(word) for word in params.bad_words.sequences]
    assert sorted(texts) == [" no", " way", "no", "way"]
    assert api.engine.added[-1].params.bad_words == BadWords(params.bad_words.sequences)
    for wrong, param in (
        ({"allowed_token_ids": [tiny.VOCAB]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words.0"),
    ):
        assert error_of(await api.chat(**wrong), 400)["param"] == param


async def test_reasoning_has_a_budget_where_one_token_ends_it(api: Api, tmp_path: Path) -> None:
    assert (await api.chat(thinking_token_budget=5)).status_code == 200  # the model has no reasoning
    assert api.engine.added[-1].params.thinking_budget is None
    for mark in ("", "</think>"):
        folder = tiny.write_tokenizer(tmp_path / f"model{len(mark)}")
        (folder / "chat_template.jinja").write_text(tiny.TEMPLATE + "<think>\n{# </think> #}")
        if mark:
            file = folder / "tokenizer.json"
            file.write_text(file.read_text().replace("<|system|>", mark))
        thinking = Api(folder, ServerConfig())
        async with thinking.http:
            answer = await thinking.chat(thinking_token_budget=5)
            if not mark:
                error = error_of(answer, 400)
                assert error["param"] == "thinking_token_budget"
                assert "not one token" in error["message"]
            else:
                assert answer.status_code == 200
                opening = tuple(thinking.service.tokenizer.encode("<think>"))
                expected = ThinkingBudget(tokens=5, opening=opening, closing=tiny.EOS + 1, is_open=True)
                assert thinking.engine.added[-1].params.thinking_budget == expected
                body = {"messages": MESSAGES, "thinking": {"type": "enabled", "budget_tokens": 7}}
                assert (await thinking.http.post("/v1/messages", json=body)).status_code == 200
                assert thinking.engine.added[-1].params.thinking_budget.tokens == 7
        thinking.service.close()


async def test_request_is_named_by_its_body_and_canceled_by_its_key(make_api: MakeApi) -> None:
    async with make_api(api_keys=("right", "other")) as api:
        api.engine.paused = True
        own, other = ({"authorization": f"Bearer {key}"} for key in ("right", "other"))
        body = {"messages": MESSAGES, "request_id": "mine/1"}
        whole = asyncio.create_task(api.http.post(CHAT, json=body, headers=own | {"x-request-id": "header"}))
        while not api.engine.live:
            await asyncio.sleep(0)
        for headers, name in ((other, "mine/1"), (own, "header")):
            refused = await api.http.delete(f"/v1/requests/{name}", headers=headers)
            assert error_of(refused, 404)["code"] == "request_not_found"
        canceled = await api.http.delete("/v1/requests/mine/1", headers=own)
        assert canceled.json()["canceled"] is True
        answer = await whole
        assert error_of(answer, 409)["code"] == "canceled"
        assert (answer.headers["x-request-id"], answer.headers["x-should-retry"]) == ("mine/1", "false")
        assert not api.engine.live
        again = await api.http.delete(f"/v1/requests/{canceled.json()['id']}", headers=own)
        assert error_of(again, 404)["code"] == "request_not_found"

        api.engine.paused = False
        cancel: list[Any] = []

        async def canceling() -> None:
            while not api.engine.live:
                await asyncio.sleep(0)
            cancel.append(await api.http.delete("/v1/requests/streamed", headers=own))

        task = asyncio.create_task(canceling())
        long = {"prompt": "abcdef", "max_tokens": 400, "stream": True, "request_id": "streamed"}
        streamed = await api.http.post(COMPLETIONS, json=long, headers=own)
        await task
        assert cancel[0].status_code == 200
        last = streamed.text.strip().rsplit("\n\n", 1)[-1].removeprefix("data: ")
        assert json.loads(last)["error"]["code"] == "canceled"
        assert api.is_clean()
