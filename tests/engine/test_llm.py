"""Generation in this process, with the built-in model."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from skipjoin import LLM, SamplingParams, Target
from skipjoin.builtin import builtin_model_path
from skipjoin.config import ConfigError, EngineConfig
from skipjoin.core.events import Preempted, Preemption
from skipjoin.core.forecast import Forecast
from skipjoin.core.request import Request, RequestOptions, ServiceClass
from skipjoin.core.step import StepResult
from skipjoin.engine.build import EngineInfo, assemble
from skipjoin.engine.forecasting import Predicted
from skipjoin.engine.load import model_folder
from skipjoin.engine.sizing import host_blocks
from skipjoin.engine.text import Choice
from skipjoin.exec import rank_spec
from skipjoin.exec.rank_spec import MemoryBudget
from skipjoin.model.config import ModelError
from skipjoin.policies.execution import scaled_jct
from skipjoin.sampling import ParameterError

GREEDY = SamplingParams(temperature=0, max_tokens=300)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(progress=False, threads=1, profile="off") as llm:
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


@pytest.mark.parametrize(("stop", "order"), [((), "psptsptst"), (("never",), "pstpstpst")])
def test_text_is_made_while_the_next_step_runs_unless_it_may_end_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, stop: tuple[str, ...], order: str
) -> None:
    """p: a plan is submitted; s: its result is applied; t: a token becomes text."""
    calls: list[str] = []
    core, executor = llm.engine.core, llm.engine.executor
    for owner, name, letter in ((executor, "submit", "p"), (core, "finish_step", "s"), (Choice, "take", "t")):
        inner = getattr(owner, name)

        def noted(*args: Any, inner: Callable[..., Any] = inner, letter: str = letter) -> Any:
            calls.append(letter)
            return inner(*args)

        monkeypatch.setattr(owner, name, noted)
    llm.generate("Count", SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, stop=stop))
    assert "".join(calls) == order


def test_a_prompt_that_is_given_up_says_why_and_the_others_go_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    finish_step = llm.engine.core.finish_step

    def give_up_the_longest(result: StepResult, now: float) -> None:
        lengths = [len(piece.request.prompt) for piece in result.plan.slices]
        index = lengths.index(max(lengths))
        if max(lengths) > 40 and len(result.plan.slices[index].request.output) == 5:
            tokens = [*result.tokens[:index], None, *result.tokens[index + 1 :]]
            result = replace(result, tokens=tokens, dropped={index: "it was too long"})
        finish_step(result, now)

    monkeypatch.setattr(llm.engine.core, "finish_step", give_up_the_longest)
    short, long = llm.generate(["Spell apple\n", "Count from 1 to 5\n" * 10], GREEDY)
    assert (long.finish_reason, long.error, len(long.token_ids)) == ("error", "it was too long", 5)
    assert (short.finish_reason, short.error) == ("stop", "")
    assert short.token_ids == llm.generate("Spell apple\n", GREEDY)[0].token_ids


def test_a_stop_string_ends_the_text_and_nothing_is_left_running(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=300, stop=("20, ", "7, 8"))
    (answer,) = llm.chat(user("Count from 1 to 30"), params)
    assert answer.text == "1, 2, 3, 4, 5, 6, "
    assert answer.finish_reason == "stop"
    assert not llm.engine.core.requests
    # The step in which the stop string was found has committed by the time of the next request.
    llm.chat(user("hello"), GREEDY)
    assert llm.engine.core.kv.device_free == llm.engine.core.kv.device_total


@pytest.mark.parametrize(("given", "stop"), [("45", ("45",)), (["4", "5"], ("4", "5")), (None, ())])
def test_a_stop_string_alone_is_one_and_not_its_characters(given: Any, stop: tuple[str, ...]) -> None:
    assert SamplingParams(stop=given).stop == stop


@pytest.mark.parametrize("given", [45, {"45": 1}])
def test_stop_strings_of_another_type_are_named(given: Any) -> None:
    with pytest.raises(ParameterError, match="stop must be a string or a list of strings, got "):
        SamplingParams(stop=given)
    with pytest.raises(ParameterError, match="stop_token_ids must be a list of ids, got "):
        SamplingParams(stop_token_ids=given)


def test_lengths_are_learned_from_every_end_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop token and a stop string are ends; the most tokens is none, nor is another prompt that is refused."""
    settings: dict[str, Any] = {"recipe": "alise", "forecast_dir": str(tmp_path), "kv_cache_gib": 0.05}
    settings |= {"progress": False, "threads": 1, "profile": "off"}
    count = user("Count from 3 to 12")
    lessons: list[tuple[int, bool]] = []
    with LLM(**settings) as llm:
        assert llm._forecasts is not None
        learn = llm._forecasts.learn

        def noted(predicted: Predicted, tokens: int, *, exact: bool) -> None:
            assert 1 <= predicted.forecast.tokens <= predicted.most
            lessons.append((tokens, exact))
            learn(predicted, tokens, exact=exact)

        monkeypatch.setattr(llm._forecasts, "learn", noted)
        ends = (GREEDY, replace(GREEDY, stop=("6",)), replace(GREEDY, max_tokens=7), replace(GREEDY, ignore_eos=True))
        answers = [llm.chat(count, params)[0] for params in ends]
        with pytest.raises(ParameterError):
            llm.generate([[5], []], GREEDY)
    assert lessons == [
        (len(answer.token_ids), exact) for answer, exact in zip(answers, (True, True, False, False), strict=True)
    ]
    with LLM(**settings) as llm:
        assert llm._forecasts is not None
        assert len(llm._forecasts.forecaster) == 4


def test_a_jct_target_follows_the_forecast_and_in_the_end_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """For requests without one; policies never see that of the length."""
    told: list[tuple[Request, float, float]] = []
    with LLM(progress=False, threads=1, profile="off", forecast_dir="none", slo_jct_scale=3.0) as llm:
        core, cost = llm.engine.core, llm.engine.info.cost
        reforecast = core.reforecast

        def note(number: int, forecast: Forecast, now: float) -> bool:
            request = core.requests[number]
            told.append((request, request.options.target.jct_s, forecast.tokens))
            return reforecast(number, forecast, now)

        monkeypatch.setattr(core, "reforecast", note)
        target = scaled_jct(cost, 3.0, len(llm.tokenizer.chat(user("Count from 3 to 12"))))
        ((answer,), ((request, jct_s, tokens),)) = llm.chat(user("Count from 3 to 12"), GREEDY), told
        assert jct_s == pytest.approx(target(tokens)) != target(len(answer.token_ids))
        target = scaled_jct(cost, 3.0, len(request.prompt))
        assert request.options.target == Target(jct_s=target(len(answer.token_ids)))
        llm.chat(user("Count from 3 to 12"), GREEDY, target=Target(ttft_s=1, jct_s=7.5))
        request, jct_s, _ = told[1]
        assert jct_s == request.options.target.jct_s == 7.5


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), "2", True, None])
def test_an_objective_that_is_no_time_is_named(llm: LLM, seconds: Any) -> None:
    with pytest.raises(ParameterError, match=r"target.tpot_s must be a number above 0, got "):
        llm.generate("x", GREEDY, target=Target(tpot_s=seconds))


def test_a_class_has_a_name_and_objectives_of_its_own(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ParameterError, match="service must be one of real-time, best-effort, got 'flex'"):
        llm.generate("Spell apple\n", GREEDY, service="flex")
    with pytest.raises(ParameterError, match=r"target.ttft_s must not be set with service best-effort"):
        llm.generate("Spell apple\n", GREEDY, service="best-effort", target=Target(ttft_s=1))
    seen: list[RequestOptions] = []
    add = llm._loop.add

    def note(*given: Any, options: RequestOptions) -> None:
        seen.append(options)
        add(*given, options=options)

    monkeypatch.setattr(llm._loop, "add", note)
    llm.generate("Spell apple\n", GREEDY, service="best-effort", target=Target(jct_s=9.0))
    assert seen == [RequestOptions(service=ServiceClass.BEST_EFFORT, target=Target(jct_s=9.0))]


def test_seeds_repeat_and_differ(llm: LLM) -> None:
    def sample(seed: int) -> list[int]:
        params = SamplingParams(temperature=2.0, max_tokens=30, seed=seed, ignore_eos=True)
        return llm.generate(["anything"], params)[0].token_ids

    assert sample(1) == sample(1) != sample(2)


@pytest.mark.parametrize("min_tokens", [0, 500])
def test_without_max_tokens_the_output_fills_the_context(llm: LLM, min_tokens: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, min_tokens=min_tokens, ignore_eos=True)
    (answer,) = llm.generate([[5] * 1000], params)
    assert (len(answer.token_ids), answer.finish_reason) == (24, "length")


def test_the_engine_refuses_max_tokens_that_are_not_resolved(llm: LLM) -> None:
    with pytest.raises(ParameterError, match=r"max_tokens must be a number, got None: call SamplingParams.resolved"):
        llm._loop.add(10**6, [5], SamplingParams(max_tokens=None))
    assert llm._loop.idle


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
        ({"prompt": "a"}, GREEDY, "prompts must be a text, token ids, or a list of such prompts, got dict {'prompt'"),
        ([{"prompt": "a"}], GREEDY, "prompts must be a text, .* got dict"),
        (7, GREEDY, "prompts must be a text, .* got int 7"),
        (b"a", GREEDY, "prompts must be a text, .* got bytes"),
        ([5, "a"], GREEDY, "prompts: token ids must be integers, got 'a'"),
        ([[5.0]], GREEDY, "prompts: token ids must be integers, got 5.0"),
        ("a", {"temperature": 0}, "params must be SamplingParams, .* got {'temperature': 0}"),
    ],
)
def test_bad_prompts_name_the_bound_and_run_nothing(llm: LLM, prompt: Any, params: Any, names: str) -> None:
    with pytest.raises(ParameterError, match=names):
        llm.generate(prompt, params)
    assert not llm.engine.core.requests


@pytest.mark.parametrize("messages", ["x", ["x"], [[]], 7, {"role": "user", "content": "x"}, [{"text": "x"}]])
def test_what_is_no_conversation_is_told_with_an_example(llm: LLM, messages: Any) -> None:
    with pytest.raises(ParameterError, match=r"messages must be a list of messages such as {'role': 'user', .* got "):
        llm.chat(messages)


def test_prompts_without_parameters_have_those_of_the_model_and_a_closed_llm_says_so(tmp_path: Path) -> None:
    folder = shutil.copytree(builtin_model_path(), tmp_path / "greedy")
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"temperature": 0, "top_p": 0.9}))
    settings = {"progress": False, "threads": 1, "profile": "off", "kv_cache_gib": 0.01, "swap_space_gib": 0}
    with LLM(str(folder), **settings) as llm:
        assert llm.default_params == SamplingParams(temperature=0, top_p=0.9)
        by_default, greedy = llm.generate("x"), llm.generate("x", SamplingParams(temperature=0))
        assert by_default[0].token_ids == greedy[0].token_ids
    llm.close()
    for work in (lambda: llm.generate("a"), lambda: llm.chat(user("a"))):
        with pytest.raises(RuntimeError, match="this LLM is closed"):
            work()


@pytest.mark.parametrize(
    ("settings", "error", "names"),
    [
        ({"model": "/does/not/exist"}, ModelError, "not a folder"),
        ({"recipe": "lifo"}, ConfigError, "fastserve"),
        ({"max_model_len": 5000}, ConfigError, "1024"),
        ({"kv_cache_gib": 0.0001}, ConfigError, "kv_cache_gib to at least"),
        ({"block_size": 0}, ConfigError, "block_size"),
        ({"dtype": "int3"}, ConfigError, "float32"),
        ({"recipe_params": {"starvation_s": float("nan")}}, ConfigError, "starvation_s"),
        ({"recipe_params": {"starvation_s": 0.0}}, ConfigError, r"starvation_s must be in \(0, 1e\+09\], got 0"),
        ({"recipe_params": {"starvation_s": "3"}}, ConfigError, "starvation_s must be a number, got '3'"),
        ({"block_size": 16.5}, ConfigError, "block_size must be an integer, got 16.5"),
        ({"slo_s": 0.0}, ConfigError, r"slo_s must be in \(0, 1e\+06\], got 0"),
        ({"slo_jct_scale": -2.0}, ConfigError, r"slo_jct_scale must be in \(0, 1e\+09\], got -2"),
        ({"slo_jct_scale": 2.0, "forecaster": "none"}, ConfigError, "slo_jct_scale needs forecasts"),
        ({"slo_s": float("nan")}, ConfigError, r"slo_s must be in \(0, 1e\+06\], got nan"),
        ({"swap_space_gib": -0.5}, ConfigError, r"swap_space_gib must be in \[0, 1e\+06\], got -0.5"),
        ({"swap_space_gib": float("nan")}, ConfigError, r"swap_space_gib must be in \[0, 1e\+06\], got nan"),
        ({"swap_space_gib": float("inf")}, ConfigError, r"swap_space_gib must be in \[0, 1e\+06\], got inf"),
        ({"swap_space_gib": 1e6}, ConfigError, r"swap_space_gib must be at most \d.* GiB free, .*\), got 1e\+06"),
        (
            {"swap_space_gib": 1e-5},
            ConfigError,
            "swap_space_gib must be 0 or at least 6.2e-05, one KV block, got 1e-05",
        ),
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
        with LLM(progress=False, recipe=recipe, kv_cache_gib=pool, max_num_seqs=16, threads=1, profile="off") as llm:
            evictions = 0
            take_events = llm.engine.core.take_events

            def counted(take_events=take_events):
                nonlocal evictions
                events = take_events()
                evictions += sum(isinstance(event, Preempted) and event.how is not Preemption.PAUSE for event in events)
                return events

            llm.engine.core.take_events = counted
            texts[recipe] = [answer.text for answer in llm.chat(conversations, GREEDY)]
            assert evictions > 0, recipe
            assert llm.engine.core.kv.device_free == llm.engine.core.kv.device_total
    assert texts["fcfs"] == texts["fastserve"]


# -- the host pool ----------------------------------------------------------------------------------------------------

GIB = 1 << 30
BLOCK_BYTES = 16 * 4 * 2 * 128 * 4  # 16 tokens of the built-in model


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., EngineInfo]:
    """`start(free_gib, **settings)`: the facts of an engine on a machine with that much free RAM."""

    def started(free_gib: float, **settings: Any) -> EngineInfo:
        monkeypatch.setattr(rank_spec, "free_ram", lambda: int(free_gib * GIB))
        engine = assemble(EngineConfig(threads=1, device="cpu", profile="off", **settings))
        engine.executor.close()
        host = engine.executor.store.host
        assert engine.info.host_blocks == engine.core.kv.cpu_total == (host.num_blocks if host else 0)
        return engine.info

    return started


@pytest.mark.parametrize(
    ("free_gib", "kv_gib", "host_gib"),
    [(100, 0.1, 4), (4, 0.1, 1), (2, 0.9, 0.1), (1.25, 0.1, 0.15), (1, 0.1, 0)],
)
def test_an_unset_host_pool_is_a_share_of_free_ram(
    start: Callable[..., EngineInfo], free_gib: float, kv_gib: float, host_gib: float
) -> None:
    blocks = start(free_gib, kv_cache_gib=kv_gib).host_blocks
    assert blocks == pytest.approx(host_gib * GIB / BLOCK_BYTES, abs=1)


def test_a_host_pool_is_as_large_as_asked_for(start: Callable[..., EngineInfo]) -> None:
    assert start(3, kv_cache_gib=0.1, swap_space_gib=0).host_blocks == 0
    assert start(3, kv_cache_gib=0.1, swap_space_gib=0.5).host_blocks == GIB // 2 // BLOCK_BYTES
    assert start(3, kv_cache_gib=0.1, swap_space_gib=0.5, block_size=64).host_blocks == GIB // 8 // BLOCK_BYTES


def test_the_refusal_of_a_host_pool_names_a_size_that_works(start: Callable[..., EngineInfo]) -> None:
    """The device pool of a CPU lies in the same RAM, and 1 GiB is left alone."""
    have = r"the machine has 2\.0 GiB free, 0\.7 of them for the KV pool"
    text = rf"swap_space_gib must be at most (0\.3) \({have}\), got 0\.5"
    with pytest.raises(ConfigError) as refused:
        start(2, kv_cache_gib=0.7, swap_space_gib=0.5)
    found = re.fullmatch(text, str(refused.value))
    assert found, refused.value
    assert start(2, kv_cache_gib=0.7, swap_space_gib=float(found[1])).host_blocks == int(0.3 * GIB) // BLOCK_BYTES
    with pytest.raises(ConfigError, match="at most 0 "):
        start(1, kv_cache_gib=0.7, swap_space_gib=0.5)


def test_a_host_pool_of_8_bits_has_more_blocks(start: Callable[..., EngineInfo]) -> None:
    plain, small = (
        start(3, kv_cache_gib=0.1, swap_space_gib=0.5, dtype="bfloat16", swap_dtype=name) for name in ("auto", "int8")
    )
    assert (plain.host_block_bytes, plain.swap_dtype) == (plain.block_bytes, "auto")
    assert (small.host_block_bytes, small.swap_dtype) == (int(0.625 * plain.block_bytes), "int8")
    assert small.host_blocks == int(1.6 * plain.host_blocks)
    # Free RAM holds as many more, where no size is set.
    assert start(2, kv_cache_gib=0.1, dtype="bfloat16", swap_dtype="int8").host_blocks == small.host_blocks
    for swap_space_gib, text in (
        (0, "swap_space_gib must be above 0, got 0"),
        (None, r"no room for it: .* 1.0 GiB free"),
    ):
        with pytest.raises(ConfigError, match=f"swap_dtype int8 is for KV on the host.* {text}"):
            start(1, kv_cache_gib=0.1, swap_space_gib=swap_space_gib, swap_dtype="int8")


def test_page_locked_memory_leaves_a_gib_of_ram(llm: LLM) -> None:
    parts = [llm.engine.executor.rank_specs[0]._replace(device_kind="cuda")]

    def blocks(gib: float | None) -> int:
        return host_blocks(EngineConfig(swap_space_gib=gib), parts, [MemoryBudget(0, 100 * GIB)], 10**9)

    assert [blocks(gib) for gib in (None, 99)] == [4 * GIB // BLOCK_BYTES, 99 * GIB // BLOCK_BYTES]
    with pytest.raises(ConfigError, match=r"at most 99 \(the machine has 100.0 GiB free\), got 99.5"):
        blocks(99.5)


def test_a_host_pool_takes_no_memory_before_it_is_used() -> None:
    before = psutil.Process().memory_info().rss
    with LLM(progress=False, threads=1, profile="off", kv_cache_gib=0.1, swap_space_gib=1.0) as llm:
        llm.generate(["hello"], GREEDY)
        assert psutil.Process().memory_info().rss - before < GIB / 2
        assert llm.engine.core.kv.cpu_free == llm.engine.core.kv.cpu_total == GIB // BLOCK_BYTES


@pytest.mark.parametrize("recipe", ["fcfs", "fastserve"])
def test_little_kv_and_a_host_pool_give_the_same_texts_as_much_kv(recipe: str) -> None:
    conversations = [user(f"Count from {start} to {start + 50}") for start in range(24)]

    def texts(**settings: Any) -> tuple[list[str], int]:
        """The answers, and how often a request had to make way."""
        made_way = 0
        common = dict(progress=False, recipe=recipe, threads=1, profile="off", max_num_seqs=16, max_model_len=512)
        with LLM(**common, **settings) as llm:
            kv, take_events = llm.engine.core.kv, llm.engine.core.take_events

            def counted():
                nonlocal made_way
                events = take_events()
                made_way += sum(isinstance(event, Preempted) and event.how is not Preemption.PAUSE for event in events)
                return events

            llm.engine.core.take_events = counted
            answers = [answer.text for answer in llm.chat(conversations, GREEDY)]
            while not llm._loop.idle:  # cached KV may still be on its way to the host
                llm._loop.step()
            assert (kv.device_free, kv.cpu_free) == (kv.device_total, kv.cpu_total)
        return answers, made_way

    much, unhurried = texts(swap_space_gib=0)
    little, crowded = texts(kv_cache_gib=40 * BLOCK_BYTES / GIB, swap_space_gib=400 * BLOCK_BYTES / GIB)
    assert unhurried == 0 < crowded
    assert little == much


@pytest.mark.parametrize(
    ("settings", "threshold_s"),
    [
        ({}, 30.0),
        ({"slo_s": 2.0}, 200.0),
        ({"slo_s": 2.0, "recipe_params": {"starvation_s": 4}}, 4.0),
    ],
)
def test_the_threshold_of_starvation_follows_the_objective(settings: dict[str, Any], threshold_s: float) -> None:
    with LLM(progress=False, threads=1, profile="off", kv_cache_gib=0.1, **settings) as llm:
        assert llm.engine.info.recipe_params["starvation_s"] == threshold_s


def test_a_dummy_of_a_folder_needs_its_tokenizer_and_says_so(tmp_path: Path) -> None:
    source = model_folder("tally")
    shutil.copy(source / "config.json", tmp_path)
    settings: dict[str, Any] = {"load_format": "dummy", "profile": "off", "threads": 1, "progress": False}
    with pytest.raises(ModelError, match="has no tokenizer files"):
        LLM(str(tmp_path), **settings)
    shutil.copy(source / "tokenizer.json", tmp_path)
    with LLM(str(tmp_path), **settings) as llm:
        (answer,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
        assert len(answer.token_ids) == 6
        assert answer.token_ids != llm.generate([[7, 6, 5]], GREEDY)[0].token_ids
