"""Generation in this process, with the built-in model."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from skipjoin import LLM, SamplingParams
from skipjoin.config import ConfigError
from skipjoin.core.events import Preempted, Preemption
from skipjoin.model.config import ModelError
from skipjoin.sampling import ParameterError

GREEDY = SamplingParams(temperature=0, max_tokens=300)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(progress=False, threads=1) as llm:
        yield llm


def test_chat_counts_and_ends_by_itself(llm: LLM) -> None:
    (answer,) = llm.chat(user("Count from 3 to 12"), GREEDY)
    assert answer.text == "3, 4, 5, 6, 7, 8, 9, 10, 11, 12"
    assert answer.finish_reason == "stop"
    assert llm.tokenizer.decode(answer.token_ids) == answer.text


def test_many_conversations_come_back_in_order(llm: LLM) -> None:
    answers = llm.chat([user(f"Count from 1 to {end}") for end in (30, 5, 60, 2)], GREEDY)
    assert [answer.text.split(", ")[-1] for answer in answers] == ["30", "5", "60", "2"]


def test_texts_and_token_ids_are_the_same_prompt(llm: LLM) -> None:
    ids = llm.tokenizer.encode("Spell apple\n")
    by_text, by_ids = llm.generate(["Spell apple\n"], GREEDY) + llm.generate([ids], GREEDY)
    assert by_text.token_ids == by_ids.token_ids == llm.generate(ids, GREEDY)[0].token_ids
    assert by_text.prompt_token_ids == ids


def test_a_stop_string_ends_the_text_and_nothing_is_left_running(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=300, stop=("20, ", "7, 8"))
    (answer,) = llm.chat(user("Count from 1 to 30"), params)
    assert answer.text == "1, 2, 3, 4, 5, 6, "
    assert answer.finish_reason == "stop"
    assert not llm.engine.core.requests
    # The step in which the stop string was found has committed by the time of the next request.
    llm.chat(user("hello"), GREEDY)
    assert llm.engine.core.kv.device_free == llm.engine.core.kv.device_total


def test_seeds_repeat_and_differ(llm: LLM) -> None:
    def sample(seed: int) -> list[int]:
        params = SamplingParams(temperature=2.0, max_tokens=30, seed=seed, ignore_eos=True)
        return llm.generate(["anything"], params)[0].token_ids

    assert sample(1) == sample(1) != sample(2)


def test_log_probabilities_of_prompt_and_output(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2, prompt_logprobs=1)
    (answer,) = llm.generate("hello\n", params)
    assert len(answer.details) == len(answer.token_ids)
    assert [scored.token for scored in answer.details[0].prompt] == answer.prompt_token_ids
    for token, detail in zip(answer.token_ids, answer.details, strict=True):
        assert detail.chosen.token == token == detail.chosen.top[0][0]
        assert detail.chosen.logprob is not None
        assert detail.chosen.logprob <= 0
        assert len(detail.chosen.top) == 2


@pytest.mark.parametrize(
    ("prompt", "params", "names"),
    [
        ([5] * 2000, GREEDY, "1023 tokens"),
        ([[5], []], GREEDY, "at least 1"),
        ([600], GREEDY, "552"),
        ([-1], GREEDY, "552"),
        ([5] * 1000, GREEDY, "max_tokens must be at most 24"),
    ],
)
def test_bad_prompts_name_the_bound_and_run_nothing(llm: LLM, prompt: object, params: object, names: str) -> None:
    with pytest.raises(ParameterError, match=names):
        llm.generate(prompt, params)
    assert not llm.engine.core.requests


@pytest.mark.parametrize(
    ("settings", "error", "names"),
    [
        ({"model": "/does/not/exist"}, ModelError, "not a folder"),
        ({"recipe": "lifo"}, ConfigError, "fastserve"),
        ({"max_model_len": 5000}, ConfigError, "1024"),
        ({"kv_cache_gib": 0.0001}, ConfigError, "kv_cache_gib to at least"),
        ({"block_size": 0}, ConfigError, "block_size"),
        ({"dtype": "int3"}, ConfigError, "float32"),
        ({"starvation_s": float("nan")}, ConfigError, "starvation_s"),
    ],
)
def test_bad_settings_name_the_bound(settings: dict[str, object], error: type[Exception], names: str) -> None:
    with pytest.raises(error, match=names):
        LLM(**{"progress": False, **settings})


def test_every_recipe_gives_the_same_texts_to_200_mixed_requests() -> None:
    draw = random.Random(2)
    makers = [
        lambda: f"Count from {draw.randint(0, 9)} to {draw.randint(10, 60)}",
        lambda: f"Spell {draw.choice(['river', 'stone', 'pencil'])}",
        lambda: f"Repeat the word {draw.choice(['cat', 'tree'])} {draw.randint(1, 12)} times",
        lambda: f"The {draw.randint(2, 12)} times table",
        lambda: draw.choice(["hello", "Who are you?", "what is the capital of france"]),
    ]
    conversations = [user(draw.choice(makers)()) for _ in range(200)]
    texts: dict[str, list[str]] = {}
    # A pool of 72 blocks: 16 requests of up to 300 tokens do not fit.
    pool = 72 * 16 * 4 * 2 * 128 * 4 / 2**30
    for recipe in ("fcfs", "fastserve"):
        with LLM(progress=False, recipe=recipe, kv_cache_gib=pool, max_num_seqs=16, threads=1) as llm:
            drops = 0
            take_events = llm.engine.core.take_events

            def counted(take_events=take_events):
                nonlocal drops
                events = take_events()
                drops += sum(isinstance(event, Preempted) and event.how is Preemption.DROP for event in events)
                return events

            llm.engine.core.take_events = counted
            texts[recipe] = [answer.text for answer in llm.chat(conversations, GREEDY)]
            assert drops > 0, recipe
            assert llm.engine.core.kv.device_free == llm.engine.core.kv.device_total
    assert texts["fcfs"] == texts["fastserve"]
