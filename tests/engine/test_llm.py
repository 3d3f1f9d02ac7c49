from __future__ import annotations

import json
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
from skipjoin.core.forecast import Forecast
from skipjoin.core.request import Request, RequestOptions, ServiceClass
from skipjoin.core.step import StepResult
from skipjoin.engine import load as engine_load
from skipjoin.engine.build import EngineInfo, assemble
from skipjoin.engine.forecasting import Predicted
from skipjoin.engine.sizing import cpu_blocks
from skipjoin.engine.text import Choice
from skipjoin.exec import rank_spec
from skipjoin.exec.rank_spec import MemoryBudget
from skipjoin.model.errors import ModelError
from skipjoin.model.folder import model_folder
from skipjoin.policies.execution import scaled_jct
from skipjoin.sampling import ParameterError

GREEDY = SamplingParams(temperature=0, max_tokens=300)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(progress=False, threads=1, profile="off") as llm:
        yield llm


def test_chat_stops_at_the_end_of_sequence_token(llm: LLM) -> None:
    (answer,) = llm.chat(user("Count from 3 to 12"), GREEDY)
    assert answer.text == "3, 4, 5, 6, 7, 8, 9, 10, 11, 12"
    assert answer.finish_reason == "stop"
    assert llm.tokenizer.decode(answer.token_ids) == answer.text


def test_loading_says_what_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_load, "must_compile", lambda: True)
    done: list[str] = []
    assemble(EngineConfig(threads=1, profile="off"), lambda what, share: done.append(what)).executor.close()
    assert list(dict.fromkeys(done))[:2] == ["compiling CPU operations, once per machine", "loading weights"]


def test_answers_are_in_the_order_of_conversations(llm: LLM) -> None:
    answers = llm.chat([user(f"Count from 1 to {end}") for end in (30, 5, 60, 2)], GREEDY)
    assert [answer.text.split(", ")[-1] for answer in answers] == ["30", "5", "60", "2"]


COLORS = {"type": "object", "properties": {"color": {"enum": ["red", "green"]}}, "required": ["color"]}
PICK = {"type": "function", "function": {"name": "pick", "parameters": COLORS}}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "pick"}}], ids=str)
def test_chat_returns_calls_in_a_message_that_continues_the_conversation(llm: LLM, choice: Any) -> None:
    chat: list[Any] = user("Pick a color")
    fields = {"tools": [PICK], "tool_choice": choice}
    (found,) = llm.chat(chat, GREEDY, **fields)
    assert found.finish_reason == "tool_calls"
    (call,) = found.message["tool_calls"]
    assert call["function"]["name"] == "pick"
    assert json.loads(call["function"]["arguments"])["color"] in ("red", "green")
    chat += [found.message, {"role": "tool", "tool_call_id": call["id"], "content": "Good."}]
    (answer,) = llm.chat(chat, GREEDY, tools=[PICK], tool_choice="none")
    assert answer.message == {"role": "assistant", "content": answer.text}


def test_built_in_model_calls_tools_and_repeats_their_results(llm: LLM) -> None:
    """The documented example, and one with numbers."""
    city, number = {"city": {"type": "string"}}, {"type": "integer"}
    weather, add = (
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
        for name, properties in (("weather", city), ("add", {"a": number, "b": number}))
    )
    for question, tools, arguments, result in (
        ("What is the weather in Oslo?", [weather], '{"city": "Oslo"}', "Rain, 4 degrees."),
        ("What is 12 plus 30?", [weather, add], '{"a": 12, "b": 30}', "42"),
    ):
        chat: list[Any] = user(question)
        (found,) = llm.chat(chat, GREEDY, tools=tools)
        (call,) = found.message["tool_calls"]
        assert call["function"] == {"name": tools[-1]["function"]["name"], "arguments": arguments}
        chat += [found.message, {"role": "tool", "tool_call_id": call["id"], "content": result}]
        (answer,) = llm.chat(chat, GREEDY, tools=tools)
        assert answer.message == {"role": "assistant", "content": result}


def test_text_and_its_token_ids_give_the_same_output(llm: LLM) -> None:
    ids = llm.tokenizer.encode("Spell apple\n")
    by_text, by_ids = llm.generate(["Spell apple\n"], GREEDY) + llm.generate([ids], GREEDY)
    assert by_text.token_ids == by_ids.token_ids == llm.generate(ids, GREEDY)[0].token_ids
    assert by_text.prompt_token_ids == ids


@pytest.mark.parametrize(("stop", "order"), [((), "psptsptst"), (("never",), "pstpstpst")])
def test_detokenization_overlaps_the_next_step_unless_there_are_stop_strings(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, stop: tuple[str, ...], order: str
) -> None:
    """The calls are submitting a plan (p), applying its result (s) and detokenizing a token (t)."""
    calls: list[str] = []
    core, executor = llm.engine.core, llm.engine.executor
    for owner, name, letter in ((executor, "submit", "p"), (core, "finish_step", "s"), (Choice, "take", "t")):
        inner = getattr(owner, name)

        def recorded(*args: Any, inner: Callable[..., Any] = inner, letter: str = letter) -> Any:
            calls.append(letter)
            return inner(*args)

        monkeypatch.setattr(owner, name, recorded)
    llm.generate("Count", SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, stop=stop))
    assert "".join(calls) == order


def test_failed_prompt_has_its_error_and_the_others_finish(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    finish_step = llm.engine.core.finish_step

    def fail_longest(result: StepResult, now: float) -> None:
        lengths = [len(item.request.prompt) for item in result.plan.slices]
        index = lengths.index(max(lengths))
        if max(lengths) > 40 and len(result.plan.slices[index].request.progress.output) == 5:
            tokens = [*result.tokens[:index], None, *result.tokens[index + 1 :]]
            result = replace(result, tokens=tokens, dropped={index: "it was too long"})
        finish_step(result, now)

    monkeypatch.setattr(llm.engine.core, "finish_step", fail_longest)
    short, long = llm.generate(["Spell apple\n", "Count from 1 to 5\n" * 10], GREEDY)
    assert (long.finish_reason, long.error, len(long.token_ids)) == ("error", "it was too long", 5)
    assert (short.finish_reason, short.error) == ("stop", "")
    assert short.token_ids == llm.generate("Spell apple\n", GREEDY)[0].token_ids


def test_stop_string_ends_the_output_and_frees_its_blocks(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=300, stop=("20, ", "7, 8"))
    (answer,) = llm.chat(user("Count from 1 to 30"), params)
    assert answer.text == "1, 2, 3, 4, 5, 6, "
    assert answer.finish_reason == "stop"
    assert not llm.engine.core.requests
    # The step that found the stop string is applied before the next request runs.
    llm.chat(user("hello"), GREEDY)
    assert llm.engine.core.kv.device_free == llm.engine.core.kv.device_total


@pytest.mark.parametrize(("given", "stop"), [("45", ("45",)), (["4", "5"], ("4", "5")), (None, ())])
def test_stop_accepts_a_single_string(given: Any, stop: tuple[str, ...]) -> None:
    assert SamplingParams(stop=given).stop == stop


@pytest.mark.parametrize("given", [45, {"45": 1}])
def test_stop_of_another_type_is_refused(given: Any) -> None:
    with pytest.raises(ParameterError, match="stop must be a string or a list of strings, got "):
        SamplingParams(stop=given)
    with pytest.raises(ParameterError, match="stop_token_ids must be a list of ids, got "):
        SamplingParams(stop_token_ids=given)


def test_forecaster_learns_output_lengths_and_saves_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop tokens and stop strings give exact lengths, `max_tokens` gives lower bounds, and refused prompts nothing."""
    settings: dict[str, Any] = {"recipe": "alise", "forecast_dir": str(tmp_path), "kv_cache_gib": 0.05}
    settings |= {"progress": False, "threads": 1, "profile": "off"}
    count = user("Count from 3 to 12")
    lessons: list[tuple[int, bool]] = []
    with LLM(**settings) as llm:
        learn = llm._forecasts.learn

        def recorded(predicted: Predicted, tokens: int, *, exact: bool) -> None:
            assert 1 <= predicted.forecast.tokens <= predicted.most
            lessons.append((tokens, exact))
            learn(predicted, tokens, exact=exact)

        monkeypatch.setattr(llm._forecasts, "learn", recorded)
        cases = (GREEDY, replace(GREEDY, stop=("6",)), replace(GREEDY, max_tokens=7), replace(GREEDY, ignore_eos=True))
        answers = [llm.chat(count, params)[0] for params in cases]
        with pytest.raises(ParameterError):
            llm.generate([[5], []], GREEDY)
    assert lessons == [
        (len(answer.token_ids), exact) for answer, exact in zip(answers, (True, True, False, False), strict=True)
    ]
    with LLM(**settings) as llm:
        assert len(llm._forecasts.forecaster) == 4


def test_jct_target_follows_the_forecast_and_finally_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies never see the target from the true length."""
    reported: list[tuple[Request, float, float]] = []
    with LLM(progress=False, threads=1, profile="off", forecast_dir="none", slo_jct_scale=3.0) as llm:
        core, cost = llm.engine.core, llm.engine.info.cost
        reforecast = core.reforecast

        def record(number: int, forecast: Forecast, now: float) -> bool:
            request = core.requests[number]
            reported.append((request, request.progress.target.jct_s, forecast.tokens))
            return reforecast(number, forecast, now)

        monkeypatch.setattr(core, "reforecast", record)
        target = scaled_jct(cost, 3.0, len(llm.tokenizer.chat(user("Count from 3 to 12"))))
        ((answer,), ((request, jct_s, tokens),)) = llm.chat(user("Count from 3 to 12"), GREEDY), reported
        assert jct_s == pytest.approx(target(tokens)) != target(len(answer.token_ids))
        target = scaled_jct(cost, 3.0, len(request.prompt))
        assert request.progress.target == Target(jct_s=target(len(answer.token_ids)))
        llm.chat(user("Count from 3 to 12"), GREEDY, target=Target(ttft_s=1, jct_s=7.5))
        request, jct_s, _ = reported[1]
        assert jct_s == request.progress.target.jct_s == 7.5


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), "2", True, None])
def test_invalid_objective_is_refused(llm: LLM, seconds: Any) -> None:
    with pytest.raises(ParameterError, match=r"target.tpot_s must be a number above 0, got "):
        llm.generate("x", GREEDY, target=Target(tpot_s=seconds))


def test_service_class_and_its_objectives_are_validated(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ParameterError, match="service must be one of real-time, best-effort, got 'flex'"):
        llm.generate("Spell apple\n", GREEDY, service="flex")
    with pytest.raises(ParameterError, match=r"target.ttft_s must not be set with service best-effort"):
        llm.generate("Spell apple\n", GREEDY, service="best-effort", target=Target(ttft_s=1))
    seen: list[RequestOptions] = []
    add = llm._loop.add

    def record(*given: Any, options: RequestOptions) -> None:
        seen.append(options)
        add(*given, options=options)

    monkeypatch.setattr(llm._loop, "add", record)
    llm.generate("Spell apple\n", GREEDY, service="best-effort", target=Target(jct_s=9.0))
    assert seen == [RequestOptions(service=ServiceClass.BEST_EFFORT, target=Target(jct_s=9.0))]


def test_output_repeats_with_the_same_seed_only(llm: LLM) -> None:
    def sample(seed: int) -> list[int]:
        params = SamplingParams(temperature=2.0, max_tokens=30, seed=seed, ignore_eos=True)
        return llm.generate(["anything"], params)[0].token_ids

    assert sample(1) == sample(1) != sample(2)


@pytest.mark.parametrize("min_tokens", [0, 500])
def test_without_max_tokens_the_output_fills_the_context(llm: LLM, min_tokens: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, min_tokens=min_tokens, ignore_eos=True)
    (answer,) = llm.generate([[5] * 1000], params)
    assert (len(answer.token_ids), answer.finish_reason) == (24, "length")


def test_engine_refuses_unresolved_max_tokens(llm: LLM) -> None:
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
        (
            [5] * 2000,
            GREEDY,
            "^This model's maximum context length is 1024 tokens. However, your prompt resulted in 2000",
        ),
        ([5], SamplingParams(stop_token_ids=(999,)), "stop_token_ids must be token ids in .* got 999"),
        ([5], SamplingParams(logit_bias={999: 1.0}), "logit_bias must be token ids in .* got 999"),
        ({"prompt": "a"}, GREEDY, "prompts must be a text, token ids, or a list of such prompts, got dict {'prompt'"),
        ([{"prompt": "a"}], GREEDY, "prompts must be a text, .* got dict"),
        (7, GREEDY, "prompts must be a text, .* got int 7"),
        (b"a", GREEDY, "prompts must be a text, .* got bytes"),
        ([5, "a"], GREEDY, "prompts: token ids must be integers, got 'a'"),
        ([[5.0]], GREEDY, "prompts: token ids must be integers, got 5.0"),
        ("a", {"temperature": 0}, "params must be SamplingParams, .* got {'temperature': 0}"),
    ],
)
def test_invalid_prompts_are_refused(llm: LLM, prompt: Any, params: Any, names: str) -> None:
    with pytest.raises(ParameterError, match=names):
        llm.generate(prompt, params)
    assert not llm.engine.core.requests


@pytest.mark.parametrize("messages", ["x", ["x"], [[]], 7, {"role": "user", "content": "x"}, [{"text": "x"}]])
def test_invalid_messages_error_shows_an_example(llm: LLM, messages: Any) -> None:
    with pytest.raises(ParameterError, match=r"messages must be a list of messages such as {'role': 'user', .* got "):
        llm.chat(messages)


def test_default_params_are_the_models_and_a_closed_llm_raises(tmp_path: Path) -> None:
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
        ({"recipe": "fastserve", "recipe_params": {"starvation_s": float("nan")}}, ConfigError, "starvation_s"),
        (
            {"recipe": "fastserve", "recipe_params": {"starvation_s": 0.0}},
            ConfigError,
            r"starvation_s must be in \(0, 1e\+09\], got 0",
        ),
        (
            {"recipe": "fastserve", "recipe_params": {"starvation_s": "3"}},
            ConfigError,
            "starvation_s must be a number, got '3'",
        ),
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


GIB = 1 << 30
BLOCK_BYTES = 16 * 4 * 2 * 128 * 4  # 16 tokens of the built-in model


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., EngineInfo]:
    """Return a function that starts an engine on a machine with `free_gib` of free RAM."""

    def started(free_gib: float, **settings: Any) -> EngineInfo:
        monkeypatch.setattr(rank_spec, "free_ram", lambda: int(free_gib * GIB))
        engine = assemble(EngineConfig(threads=1, device="cpu", profile="off", **settings))
        engine.executor.close()
        host = engine.executor.store.cpu
        assert engine.info.cpu_blocks == engine.core.kv.tiers.cpu_total == (host.num_blocks if host else 0)
        return engine.info

    return started


@pytest.mark.parametrize(
    ("free_gib", "kv_gib", "cpu_gib"),
    [(100, 0.1, 4), (4, 0.1, 1), (2, 0.9, 0.1), (1.25, 0.1, 0.15), (1, 0.1, 0)],
)
def test_default_cpu_pool_is_a_share_of_free_ram(
    start: Callable[..., EngineInfo], free_gib: float, kv_gib: float, cpu_gib: float
) -> None:
    blocks = start(free_gib, kv_cache_gib=kv_gib).cpu_blocks
    assert blocks == pytest.approx(cpu_gib * GIB / BLOCK_BYTES, abs=1)


def test_cpu_pool_has_the_requested_size(start: Callable[..., EngineInfo]) -> None:
    assert start(3, kv_cache_gib=0.1, swap_space_gib=0).cpu_blocks == 0
    assert start(3, kv_cache_gib=0.1, swap_space_gib=0.5).cpu_blocks == GIB // 2 // BLOCK_BYTES
    assert start(3, kv_cache_gib=0.1, swap_space_gib=0.5, block_size=64).cpu_blocks == GIB // 8 // BLOCK_BYTES


def test_error_of_a_too_large_cpu_pool_names_a_size_that_fits(start: Callable[..., EngineInfo]) -> None:
    """On a CPU, weights and both pools are in RAM, of which 1 GiB must stay free."""
    have = r"the machine has 2\.0 GiB free, 0\.7 of them for the KV pool"
    text = rf"swap_space_gib must be at most (0\.2) \({have}\), got 0\.5"
    with pytest.raises(ConfigError) as refused:
        start(2, kv_cache_gib=0.7, swap_space_gib=0.5)
    found = re.fullmatch(text, str(refused.value))
    assert found, refused.value
    assert start(2, kv_cache_gib=0.7, swap_space_gib=float(found[1])).cpu_blocks == int(0.2 * GIB) // BLOCK_BYTES
    with pytest.raises(ConfigError, match="at most 0 "):
        start(1, kv_cache_gib=0.7, swap_space_gib=0.5)


def test_int8_cpu_pool_has_more_blocks(start: Callable[..., EngineInfo]) -> None:
    plain, small = (
        start(3, kv_cache_gib=0.1, swap_space_gib=0.5, dtype="bfloat16", swap_dtype=name) for name in ("auto", "int8")
    )
    assert (plain.cpu_block_bytes, plain.swap_dtype) == (plain.block_bytes, "auto")
    assert (small.cpu_block_bytes, small.swap_dtype) == (int(0.625 * plain.block_bytes), "int8")
    assert small.cpu_blocks == int(1.6 * plain.cpu_blocks)
    # The default size gives the same number of blocks.
    assert start(2, kv_cache_gib=0.1, dtype="bfloat16", swap_dtype="int8").cpu_blocks == small.cpu_blocks
    for swap_space_gib, text in (
        (0, "swap_space_gib must be above 0, got 0"),
        (None, r"no room for it: .* 1.0 GiB free"),
    ):
        with pytest.raises(ConfigError, match=f"swap_dtype int8 is for KV in CPU memory.* {text}"):
            start(1, kv_cache_gib=0.1, swap_space_gib=swap_space_gib, swap_dtype="int8")


def test_int8_kv_cache_has_more_blocks_in_both_tiers(start: Callable[..., EngineInfo]) -> None:
    sizes = dict(kv_cache_gib=0.1, swap_space_gib=0.1, dtype="bfloat16")
    plain, small = (start(3, **sizes, kv_cache_dtype=name) for name in ("auto", "int8"))
    assert small.cpu_block_bytes == small.block_bytes
    assert small.device_blocks == small.cpu_blocks == pytest.approx(plain.device_blocks * 1.77, rel=0.01)
    assert (plain.dtype, small.dtype) == ("bfloat16", "bfloat16, int8 KV")


def test_page_locked_memory_leaves_a_gib_of_ram(llm: LLM) -> None:
    parts = [llm.engine.executor.rank_specs[0]._replace(device_kind="cuda")]

    def blocks(gib: float | None) -> int:
        return cpu_blocks(EngineConfig(swap_space_gib=gib), parts, [MemoryBudget(0, 100 * GIB)], 10**9)

    assert [blocks(gib) for gib in (None, 99)] == [4 * GIB // BLOCK_BYTES, 99 * GIB // BLOCK_BYTES]
    with pytest.raises(ConfigError, match=r"at most 99 \(the machine has 100.0 GiB free\), got 99.5"):
        blocks(99.5)


def test_unused_cpu_pool_takes_no_memory() -> None:
    before = psutil.Process().memory_info().rss
    with LLM(progress=False, threads=1, profile="off", kv_cache_gib=0.1, swap_space_gib=1.0) as llm:
        llm.generate(["hello"], GREEDY)
        assert psutil.Process().memory_info().rss - before < GIB / 2
        assert llm.engine.core.kv.tiers.cpu_free == llm.engine.core.kv.tiers.cpu_total == GIB // BLOCK_BYTES


def test_policies_know_the_limit_of_the_link() -> None:
    settings: dict[str, Any] = {"profile": "off", "kv_cache_gib": 0.1, "progress": False, "threads": 1}
    with LLM(**settings, swap_bandwidth_gbps=0.008) as llm:
        info = llm.engine.info
        assert info.cost.transfer(10) - info.cost.transfer(0) == pytest.approx(10 * info.cpu_block_bytes / 1e6)


def test_dummy_model_needs_a_tokenizer(tmp_path: Path) -> None:
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
