from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from skipjoin import LLM, AsyncLLM, SamplingParams
from skipjoin.async_llm import Chunk
from skipjoin.sampling import ParameterError
from support.waiting import wait_until

SETTINGS = {"profile": "off", "threads": 1, "kv_cache_gib": 0.01}
GREEDY = SamplingParams(temperature=0, max_tokens=24)
CHAT = [{"role": "user", "content": "Count from 3 to 12"}]
PAGE = Path(__file__).resolve().parents[2] / "docs/python.md"


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    made = AsyncLLM("tally", **SETTINGS)
    yield made
    made.close()


def test_outputs_equal_those_of_llm_for_concurrent_requests_and_n(llm: AsyncLLM) -> None:
    prompts = ["Repeat apple 5 times", [5, 6, 7], CHAT]
    seeded = SamplingParams(temperature=2, seed=7, max_tokens=12)

    async def streamed() -> list[str]:
        pieces = {0: "", 1: "", 2: ""}
        ended: list[int] = []
        async for chunk in llm.stream("abc", seeded, n=3):
            assert chunk.index not in ended
            pieces[chunk.index] += chunk.text
            ended += [chunk.index] if chunk.finish_reason else []
        assert sorted(ended) == [0, 1, 2]
        return list(pieces.values())

    async def everything() -> tuple[list[list], list, list[str]]:
        many = asyncio.gather(*(llm.generate(prompt, GREEDY) for prompt in prompts))
        return await many, await llm.generate("abc", seeded, n=3), await streamed()

    single, several, pieces = asyncio.run(everything())
    with LLM("tally", **SETTINGS) as plain:
        expected = [
            *plain.generate([prompts[0]], GREEDY),
            *plain.generate([prompts[1]], GREEDY),
            *plain.chat(CHAT, GREEDY),
        ]
        copies = plain.generate(["abc"] * 3, [seeded.with_seed_of(copy) for copy in range(3)])
    assert [output.token_ids for (output,) in single] == [output.token_ids for output in expected]
    assert [output.text for (output,) in single] == [output.text for output in expected]
    assert [output.text for output in several] == [copy.text for copy in copies] == pieces
    assert len(set(pieces)) > 1


def test_tools_are_those_of_llm(llm: AsyncLLM) -> None:
    pick = {"type": "function", "function": {"name": "pick", "parameters": {"type": "object", "required": ["color"]}}}
    pick["function"]["parameters"]["properties"] = {"color": {"enum": ["red", "green"]}}  # type: ignore[index]
    fields = {"tools": [pick], "tool_choice": "required", "parallel_tool_calls": False}
    params = SamplingParams(temperature=0, max_tokens=90)
    (found,) = asyncio.run(llm.generate(CHAT, params, **fields))
    assert found.finish_reason == "tool_calls"
    whole = found.message["tool_calls"][0]["function"]
    assert whole["name"] == "pick"

    async def streamed() -> list[Chunk]:
        return [chunk async for chunk in llm.stream(CHAT, params, **fields)]

    chunks = asyncio.run(streamed())
    calls = [call for chunk in chunks for call in (chunk.delta or {}).get("tool_calls", ())]
    arguments = "".join(call["function"]["arguments"] for call in calls)
    assert (calls[0]["function"]["name"], arguments, chunks[-1].finish_reason) == (*whole.values(), "tool_calls")
    with pytest.raises(ParameterError, match=r"^tools need a conversation"):
        asyncio.run(llm.generate("abc", GREEDY, **fields))


def test_stop_strings_end_a_stream_and_a_closed_one_is_aborted(llm: AsyncLLM) -> None:
    async def work() -> str:
        (stopped,) = await llm.generate(CHAT, SamplingParams(temperature=0, max_tokens=200, stop=["6"]))
        assert stopped.finish_reason == "stop"
        stream = llm.stream("abc", SamplingParams(max_tokens=900, ignore_eos=True), n=4)
        await anext(stream)
        await stream.aclose()
        return stopped.text

    assert "5" in asyncio.run(work())
    wait_until(lambda: not llm._loop.core.requests)
    assert not llm._streams


@pytest.mark.parametrize(
    ("prompt", "options", "error"),
    [
        ("abc", {"n": 0}, "n must be an integer in"),
        ([], {}, "prompt must be one"),
        (["a", "b"], {}, "prompt must be one"),
        ([10**6], {}, "prompt must be token ids in"),
        ("abc", {"service": "best"}, "service must be one of"),
    ],
)
def test_invalid_arguments_are_named_and_disturb_nothing(llm: AsyncLLM, prompt, options, error) -> None:
    async def work() -> None:
        with pytest.raises(ParameterError, match=error):
            await llm.generate(prompt, GREEDY, **options)
        (other,) = await llm.generate("abc", GREEDY)
        assert len(other.token_ids) <= 24

    asyncio.run(work())


def test_close_fails_unfinished_and_later_requests() -> None:
    async def work() -> None:
        async with AsyncLLM("tally", **SETTINGS) as llm:
            stream = llm.stream("abc", SamplingParams(max_tokens=900, ignore_eos=True))
            await anext(stream)
        with pytest.raises(RuntimeError, match="is closed"):
            async for _ in stream:
                pass
        with pytest.raises(RuntimeError, match="is closed"):
            await llm.generate("abc", GREEDY)

    asyncio.run(work())


def test_documented_fastapi_app_streams_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastapi.testclient import TestClient  # noqa: PLC0415

    (code,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "FastAPI" in block]
    names: dict = {"__name__": "example"}
    exec(compile(code, str(PAGE), "exec", dont_inherit=True), names)
    with TestClient(names["app"]) as client:
        assert "6, 7" in client.post("/count", params={"to": 7}).text
