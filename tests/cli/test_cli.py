from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
import typer
from typer import testing
from typer.testing import CliRunner, Result

from skipjoin import recipes
from skipjoin.__main__ import main
from skipjoin.builtin import builtin_model_path
from skipjoin.cli import app
from skipjoin.cli.options import Section, takes, with_flags
from skipjoin.config import ConfigError, EngineConfig, ForecastConfig, ServerConfig
from skipjoin.engine.build import assemble
from skipjoin.report.results import load_results
from skipjoin.sampling import SamplingParams
from skipjoin.server.engines.engine_handle import EngineStartError
from skipjoin.server.engines.messages import Setup
from support.recipes import RECIPES, SPELLED

SKIPJOIN = Path(sys.executable).with_name("skipjoin")


def skipjoin(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SKIPJOIN, *map(str, args)], capture_output=True, text=True, timeout=120, check=False)


def invoke(*args: object) -> Result:
    return CliRunner().invoke(app, list(map(str, args)))


def test_generate_prints_one_json_object_per_prompt() -> None:
    run = invoke(
        "generate", "tally", "--chat", "--prompt", "Count from 3 to 12", "--prompt", "Spell apple",
        "--max-tokens", 100, "--temperature", 0, "--json", "--profile", "off",
    )  # fmt: skip
    assert run.exit_code == 0, run.stderr
    first, second = map(json.loads, run.stdout.splitlines())
    assert first["text"] == "3, 4, 5, 6, 7, 8, 9, 10, 11, 12"
    assert first["finish_reason"] == "stop"
    assert set(first) == {"text", "token_ids", "prompt_tokens", "finish_reason"}
    assert second["text"] == "a-p-p-l-e"


def test_generate_agrees_with_transformers_on_a_saved_folder(tmp_path: Path) -> None:
    import transformers  # noqa: PLC0415 - takes a second

    torch.manual_seed(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(builtin_model_path())
    common = dict(vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    common |= dict(max_position_embeddings=128, bos_token_id=547, eos_token_id=None, pad_token_id=552)
    configs = {
        "opt": transformers.OPTConfig(**common, ffn_dim=128),
        "llama": transformers.LlamaConfig(**common, intermediate_size=128, num_key_value_heads=2),
    }
    for name, config in configs.items():
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.15)
        folder = tmp_path / name
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        run = invoke("generate", folder, "--prompt", "one two three", "--max-tokens", 20, "--temperature", 0,
                     "--ignore-eos", "--json", "--profile", "off")  # fmt: skip
        assert run.exit_code == 0, run.stderr
        ids = tokenizer("one two three", return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            expected = model.generate(ids, max_new_tokens=20, do_sample=False, attention_mask=torch.ones_like(ids))
        assert json.loads(run.stdout)["token_ids"] == expected[0, ids.shape[1] :].tolist(), name


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (("generate", "/no/such/folder", "--prompt", "x"), "/no/such/folder is not a folder"),
        (("generate", "some/model-Q4.gguf", "--prompt", "x"), "some/model-Q4.gguf is not a file"),
        (("generate", "qwen3:8b", "--prompt", "x"), "hub ids of two parts such as"),
        (("generate", __file__, "--prompt", "x"), "test_cli.py is a file: give its folder"),
        (("generate", "tally", "--prompt", "x", "--temperature", "-1"), "--temperature must be in [0, 2]"),
        (("generate", "tally", "--prompt", "x", "--temperature", "nan"), "--temperature must be a finite number"),
        (("generate", "tally", "--prompt", "x", "--max-tokens", "99999999999"), "--max-tokens must be in [1,"),
        (
            ("generate", "tally", "--prompt", "x", "--max-tokens", "5000", "--profile", "off"),
            "--max-tokens must be at most",
        ),
        (("generate", "tally", "--prompt", "x", "--recipe", "lifo"), "recipe must be one of"),
        (("generate", "tally", "--prompt", "x", "--service", "flex"), "service must be one of real-time, best-effort"),
        (("serve", "--port", "99999"), "--port must be in [0, 65535]"),
        (("serve", "--load-format", "random"), "--load-format must be one of auto, dummy, got 'random'"),
        (("serve", "--kv-cache-gib", "0"), "--kv-cache-gib must be in (0,"),
        (("serve", "--forecaster", "magic"), "forecaster must be one of learned, alise, prior, none, got 'magic'"),
        (("serve", "--forecast-entries", "0"), "--forecast-entries must be in [1,"),
        (("convert", "/no/such/folder", "/tmp/target"), "/no/such/folder"),
        (("profile", "tally", "--out", "/dev/null/x"), "/dev/null/x cannot be written: /dev/null is not a folder"),
        (("profile", "tally", "--out", "/"), "profile / cannot be written: it is a folder; name a file"),
        (("simulate", "--rates", "1"), "--model must be given for hardware a100-40gb, such as opt-13b"),
        (("demo", "--out", "/dev/null"), "--out: /dev/null: /dev/null is not a folder"),
        (("predict", "train", "--trace", "x", "--out", "/dev/null"), "--out: /dev/null is not a folder"),
        (("plot", "/dev/null"), "/dev/null: the file is empty"),
        (("batch", "submit", "/no/such/file"), "/no/such/file: No such file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(args: tuple[str, ...], names: str) -> None:
    run = invoke(*args)
    assert run.exit_code == 2, run.stderr
    assert names in run.stderr
    assert "Traceback" not in run.stderr
    assert run.stdout == ""


def test_program_exits_with_the_code_of_its_command() -> None:
    run = skipjoin("serve", "--port", "99999")
    assert run.returncode == 2
    assert run.stderr == "error: --port must be in [0, 65535], got 99999\n"
    assert run.stdout == ""


def test_interrupt_during_imports_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whatever is imported at the time: an interrupt there may become another exception.
    script = (
        "import builtins, os, signal, sys; from skipjoin.__main__ import main; real = builtins.__import__\n"
        "def interrupted(name, *args, **more):\n"
        "    try:\n"
        "        'typer' in name and os.kill(os.getpid(), signal.SIGINT)\n"
        "        return real(name, *args, **more)\n"
        "    except BaseException as error: raise ImportError from error\n"
        "builtins.__import__ = interrupted; main()"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "")
    monkeypatch.setattr("skipjoin.cli.app", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130


def test_package_imports_its_names_when_they_are_asked_for() -> None:
    script = (
        "import sys, skipjoin; print(*(name for name in sys.modules if name.startswith('skipjoin')), skipjoin.Target)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == "skipjoin <class 'skipjoin.core.request.Target'>\n"


def test_unsupported_architecture_error_names_the_nearest_and_the_page_of_all(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Llama9ForCausalLM"], "model_type": "llama9"}')
    shutil.copy(builtin_model_path() / "tokenizer.json", tmp_path)
    run = invoke("generate", tmp_path, "--prompt", "x", "--load-format", "dummy")
    assert run.exit_code == 2
    assert "which have LlamaForCausalLM (docs/reference/models.md lists both)" in " ".join(run.stderr.split())


def test_version_and_help() -> None:
    assert invoke("--version").stdout.startswith("skipjoin 0.")
    assert "--recipe" in invoke("serve", "--help").stdout


def on_fastserve(options: list[str]) -> list[str]:
    """Return the options, with the recipe whose parameters they set unless they name another one."""
    return options if "--set" not in options or "--recipe" in options else [*options, "--recipe", "fastserve"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], (None, None, {}, ())),
        (["--swap-space", "2.5", "--slo", "1", "--set", "quantum_s=2"], (2.5, 1.0, {"quantum_s": 2.0}, ())),
        (["--kv-offloading-size", "0", "--set", "starvation_s=7"], (0.0, None, {"starvation_s": 7.0}, ())),
        (["--recipe", "sarathi", "--set", "chunk_tokens=64"], (None, None, {"chunk_tokens": 64}, ())),
        (["--set", "paced=false", "--set=starvation_s=3"], (None, None, {"paced": False, "starvation_s": 3.0}, ())),
        (["--api-key", "a", "--api-key", "b"], (None, None, {}, ("a", "b"))),
    ],
)
def test_serve_passes_memory_and_objective_options(
    options: list[str], expected: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: list[tuple[EngineConfig, ServerConfig]] = []
    monkeypatch.setattr(
        "skipjoin.server.lifecycle.run_server",
        lambda engine, server, *rest, **kw: configs.append((engine, server)) or 0,
    )
    run = CliRunner().invoke(app, ["serve", *on_fastserve(options)])
    assert run.exit_code == 0, run.output
    ((config, server),) = configs
    assert (config.swap_space_gib, config.slo_s, config.recipe_params, server.api_keys) == expected
    sent = msgspec.json.decode(msgspec.json.encode(Setup(config, "", 0)), type=Setup)
    assert sent.config == config


@pytest.mark.parametrize("name", ["--swap-space", "--kv-offloading-size"])
def test_generate_passes_memory_and_objective_options(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    class Recorder:
        default_params = SamplingParams(top_p=0.9, top_k=20)

        def __init__(self, **settings: object) -> None:
            given.update(settings)

        def __enter__(self) -> Recorder:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def generate(self, prompts: object, params: SamplingParams, service: str, adapter: None) -> list[object]:
            given["service"] = service
            assert (params.top_p, params.top_k, params.max_tokens) == (0.9, 5, 128)
            return []

    monkeypatch.setattr("skipjoin.llm.LLM", Recorder)
    monkeypatch.delenv("SKIPJOIN_FORECAST_DIR")
    options = ["--slo", "0.2", "--load-format", "dummy", "-tp", "2", "-pp", "3", "--enforce-eager", "--block-size", "8"]
    options += ["--forecaster", "prior", "--service", "best-effort", "--top-k", "5"]
    run = CliRunner().invoke(app, ["generate", "--prompt", "x", name, "1.5", *options])
    assert run.exit_code == 0, run.output
    assert given.pop("service") == "best-effort"
    forecasts = {field.name: given.pop(field.name) for field in fields(ForecastConfig)}
    assert ForecastConfig(**forecasts) == ForecastConfig(forecaster="prior")
    config = EngineConfig(**given)
    assert config == EngineConfig(
        swap_space_gib=1.5,
        slo_s=0.2,
        load_format="dummy",
        tensor_parallel_size=2,
        pipeline_parallel_size=3,
        enforce_eager=True,
        block_size=8,
    )
    # All fields with an option are set, and no other fields.
    assert set(given) == {field.name for field in fields(EngineConfig)} - {
        "max_live_requests",
        "fair_output_weight",
        "learned_dir",
        "otlp_traces_endpoint",
    }


def test_simulate_passes_memory_and_objective_options(tmp_path: Path) -> None:
    """`--slo` sets a threshold of the scheduler. Reports use separate objectives."""
    out = tmp_path / "out.json"
    small = ["--model", "opt-13b", "--lengths", "fixed:16,2", "--rates", "1", "--requests", "2", "--out", out]
    small += ["--recipe", "fastserve"]
    chosen = ["--swap-space", "8", "--slo", "0.5", "--slo-ttft", "9"]
    for options in ([], chosen, ["--kv-offloading-size", "0", "--set", "starvation_s=7"]):
        run = invoke("simulate", *small, "--append", "--jobs", "1", *options)
        assert run.exit_code == 0, run.stderr
    plain, chosen, none = load_results([out])
    # Sizes are rounded to blocks of 12.5 MiB.
    assert [record["settings"]["swap_gib"] for record in (plain, chosen, none)] == pytest.approx([72, 8, 0], abs=0.0125)
    assert plain["settings"]["starvation_s"] == pytest.approx(25.2, abs=0.1)
    assert [record["settings"]["starvation_s"] for record in (chosen, none)] == [50.0, 7.0]
    assert none["settings"]["cpu_blocks"] == 0
    assert chosen["slo"]["ttft_s"] == 9.0


@pytest.mark.usefixtures("log_of_process")
def test_starvation_bound_uses_the_servers_queue_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[EngineConfig] = []

    class Recorder:
        def __init__(self, *_: object) -> None:
            self.client = None

        async def start(self, config: EngineConfig, limits: object) -> None:
            configs.append(config)
            raise EngineStartError("enough")

        async def stop(self) -> None:
            pass

    monkeypatch.setattr("skipjoin.server.engines.engine_handle.EngineHandle", Recorder)
    args = ["serve", "--port", "0", "--set", "starvation_bound_s=60", "--max-num-queued-reqs", "77"]
    run = CliRunner().invoke(app, on_fastserve(args))
    assert run.exit_code == 1, run.output
    (config,) = configs
    assert (config.recipe_params, config.max_live_requests) == ({"starvation_bound_s": 60.0}, 77)


BOUNDED = {"threads": 1, "profile": "off", "kv_cache_gib": 0.1, "swap_space_gib": 0.1, "max_model_len": 256}


@pytest.mark.parametrize(
    "recipe",
    [name for name, one in RECIPES.items() if "starvation_bound_s" in one.parameters and name != "fastserve-defer"],
)
def test_infeasible_starvation_bound_error_names_feasible_values(recipe: str) -> None:
    config = EngineConfig(
        recipe=SPELLED[recipe], recipe_params={"starvation_bound_s": 3.0}, max_live_requests=5000, **BOUNDED
    )
    with pytest.raises(ConfigError) as refused:
        assemble(config)
    figures = re.fullmatch(
        r"starvation_bound_s must be at least ([\d.]+) s with 5000 requests at once \(max_num_queued_reqs, and more "
        r"for batches unless batch_dir is none\), got 3; it would hold with (\d+) of them",
        str(refused.value),
    )
    assert figures is not None, refused.value
    longer = replace(config, recipe_params={"starvation_bound_s": float(figures[1])})
    fewer = replace(config, max_live_requests=int(figures[2]))
    for works in (longer, fewer):
        engine = assemble(works)
        engine.executor.close()
        bound_s = works.recipe_params["starvation_bound_s"]
        assert isinstance(bound_s, float)
        assert 0 < engine.info.recipe_params["starvation_s"] < bound_s
        assert f"No request goes {bound_s:g} s without running" in engine.info.notice
    with pytest.raises(ConfigError, match="starvation_bound_s must be at least"):
        assemble(replace(fewer, max_live_requests=int(figures[2]) + 1))


def test_starvation_bound_needs_max_live_requests() -> None:
    with pytest.raises(ConfigError, match="starvation_bound_s needs max_live_requests"):
        assemble(EngineConfig(recipe="fastserve", recipe_params={"starvation_bound_s": 60.0}, **BOUNDED))
    with pytest.raises(ConfigError, match=r"max_live_requests must be in \[1, "):
        EngineConfig(max_live_requests=0)


HAS = "fastserve has starvation_s, promotion, quantum_s, hysteresis_s, order, paced, starvation_bound_s, eviction"
SIMULATE = ["simulate", "--model", "opt-13b", "--rates", "1"]
STREAM = "name=other,lengths=alpaca,share=0.5,key=other"


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (["serve", "--swap-space", "-1"], "--swap-space must be in [0, 1e+06], got -1"),
        (["serve", "--swap-bandwidth-gbps", "0"], "--swap-bandwidth-gbps must be in (0, 1e+06], got 0"),
        (["serve", "--swap-bandwidth-gbps", "9", "--swap-space", "0"], "--swap-space must be above 0, got 0"),
        (
            [*SIMULATE, "--hardware", "a100-40gb:pp2", "--pipeline-depth", "2"],
            "--pipeline-depth must be 1 with several",
        ),
        (["serve", "tally", "--served-model-name", " "], "--served-model-name must not be empty"),
        (["serve", "--slo", "0"], "--slo must be in (0, 1e+06], got 0"),
        (["serve", "--slo-ttft-ms", "0"], "--slo-ttft-ms must be in (0, 604800000], got 0"),
        (["serve", "--slo-tpot-ms", "-3"], "--slo-tpot-ms must be in (0, 604800000], got -3"),
        (["serve", "--slo-jct-ms", "nan"], "--slo-jct-ms must be in (0, 604800000], got nan"),
        (["serve", "--slo-jct-scale", "0"], "--slo-jct-scale must be in (0, 1e+09], got 0"),
        (["serve", "--slo-jct-scale", "nan"], "--slo-jct-scale must be in (0, 1e+09], got nan"),
        (["serve", "--slo-jct-scale", "2", "--slo-jct-ms", "9"], "--slo-jct-scale and --slo-jct-ms exclude each other"),
        (["serve", "--slo-jct-scale", "2", "--forecaster", "none"], "--slo-jct-scale needs forecasts: forecaster must"),
        (["serve", "--slo-jct-ms", "inf"], "--slo-jct-ms must be in (0, 604800000], got inf"),
        (["serve", "--priority-ttft-ms", "0"], "--priority-ttft-ms must be in (0, 604800000], got 0"),
        (
            ["serve", "--priority-tier", "all", "--priority-tpot-ms", "9", "--slo-tpot-ms", "8"],
            "--priority-tpot-ms must be at most --slo-tpot-ms, which is 8, got 9",
        ),
        (["serve", "--fair-by", "key"], "--fair-by key needs API keys, which tell clients apart: set --api-key or"),
        (
            ["serve", "--fair-by", "key", "--api-key", "k", "--set", "starvation_bound_s=60"],
            "starvation_bound_s must not be set together with --fair-by",
        ),
        (
            [*SIMULATE, "--fair-by", "key"],
            "--fair-by key needs requests of different keys: set key= in stream or closed",
        ),
        (
            ["bench", "--base-url", "http://x", "--rates", "1", "--stream", STREAM],
            "key in stream and closed is for simulate: bench sends all requests with one",
        ),
        (["serve", "--fair-output-weight", "0"], "--fair-output-weight must be in (0, 1000], got 0"),
        (["serve", "--dtype", "bfloat"], "got 'bfloat'; did you mean bfloat16"),
        (
            ["serve", "--attention", "tritn"],
            "one of auto, torch, cpp, triton, flash, got 'tritn'; did you mean triton?",
        ),
        (["serve", "--priority-range", "5"], "--priority-range must be two integers, LOW:HIGH, got '5'"),
        (["serve", "--priority-range", "-1:-2"], "--priority-range must be LOW:HIGH of 64 bits, LOW at most HIGH"),
        (["serve", "--min-slo-ttft-ms", "nan"], "--min-slo-ttft-ms must be in (0, 604800000], got nan"),
        (
            ["serve", "--min-slo-tpot-ms", "5", "--max-slo-tpot-ms", "4"],
            "--min-slo-tpot-ms must be at most --max-slo-tpot-ms, which is 4, got 5",
        ),
        (["serve", "--set", "starvation_s=-2"], "starvation_s must be in (0, 1e+09], got -2"),
        (["serve", "--set", "starvation_bound_s=0"], "starvation_bound_s must be in (0, 1e+09], got 0"),
        (["serve", "--set", "starvation_bound_s=-1"], "starvation_bound_s must be in (0, 1e+09], got -1"),
        (["serve", "--set", "starvation_bound_s=nan"], "starvation_bound_s must be in (0, 1e+09], got nan"),
        (
            ["serve", "--set", "starvation_bound_s=60", "--set", "starvation_s=5"],
            "starvation_s must not be set together with",
        ),
        (
            ["serve", "--set", "starvation_bound_s=60", "--recipe", "fcfs"],
            "starvation_bound_s needs recipe fastserve: fcfs has no parameters",
        ),
        (
            ["serve", "--set", "starvation_bound_s=60", "--set", "eviction=defer"],
            "starvation_bound_s must not be set together with eviction=defer",
        ),
        (["generate", "--prompt", "x", "--kv-offloading-size", "nan"], "--swap-space must be in [0, 1e+06], got nan"),
        (["generate", "--prompt", "x", "--swap-space", "9e5"], "--swap-space must be at most"),
        (["generate", "--prompt", "x", "--slo", "inf"], "--slo must be in (0, 1e+06], got inf"),
        ([*SIMULATE, "--swap-space", "inf"], "--swap-space must be in [0, 1e+06], got inf"),
        ([*SIMULATE, "--max-tokens", "all"], "--max-tokens must be an integer or room or exact, got 'all'"),
        ([*SIMULATE, "--slo", "-1"], "--slo must be in (0, 1e+06], got -1"),
        ([*SIMULATE, "--set", "starvation_s=0"], "starvation_s must be in (0, 1e+09], got 0"),
        ([*SIMULATE, "--duration", "0"], "--duration must be in (0, 1e+09], got 0"),
        ([*SIMULATE, "--requests", "0"], "--requests must be in [1, 5000000], got 0"),
        ([*SIMULATE, "--requests", "1", "--duration", "1"], "--duration and --requests exclude each other"),
    ],
)
@pytest.mark.usefixtures("log_of_process")
def test_invalid_options_are_named(args: list[str], names: str) -> None:
    run = CliRunner().invoke(app, on_fastserve(args))
    assert run.exit_code == 2, run.output
    assert names in run.stderr
    assert "Traceback" not in run.output
    assert run.stdout == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--recipe", "lifo"], "--recipe must be one of adaptive, alise, bros, "),
        (["--recipe", "srpt"], "--recipe srpt needs true output lengths: set oracle to max-tokens"),
        (["--recipe", "srpt", "--set", "oracle=tarot"], "oracle must be one of none, max-tokens, got 'tarot'"),
        (["--set", "quantum_s=-1"], "quantum_s must be in (0, 1e+06], got -1"),
        (
            ["--set", "quantum_s=1", "--set", "starvation_bound_s=60"],
            "quantum_s must not be set together with starvation_bound_s",
        ),
        (["--set", "starvation_s=3", "--set", "starvation_s=4"], "--set: starvation_s is given twice"),
        (["--set", "foo"], f"--set must be NAME=VALUE, got 'foo': {HAS}"),
        (["--set", "foo=1"], f"there is no parameter 'foo': {HAS}"),
        (["--set", "chunk_tokens=64"], f"chunk_tokens needs recipe sarathi: {HAS}"),
        (["--set", "quantum_s=soon"], "quantum_s must be a number, got 'soon'"),
        (["--set", "quantum_s=0"], "quantum_s must be in (0, 1e+06], got 0"),
        (["--set", "paced=perhaps"], "paced must be true or false, got 'perhaps'"),
        (["--recipe", "sarathi", "--set", "chunk_tokens=6.5"], "chunk_tokens must be an integer, got '6.5'"),
    ],
)
@pytest.mark.parametrize("command", [["serve"], ["generate", "--prompt", "x"]], ids=["serve", "generate"])
def test_invalid_recipe_parameters_are_refused(command: list[str], options: list[str], message: str) -> None:
    run = CliRunner().invoke(app, [*command, *on_fastserve(options)])
    assert run.exit_code == 2, run.output
    assert run.stderr.startswith(f"error: {message}")
    assert run.stderr.count("\n") == 1


def test_simulate_refuses_a_parameter_that_none_of_its_recipes_has() -> None:
    run = CliRunner().invoke(app, [*SIMULATE, "--recipes", "fcfs,sarathi", "--set", "quantum_s=1"])
    assert run.exit_code == 2, run.output
    assert "fastserve: fcfs has no parameters; sarathi has chunk_tokens" in run.stderr


def test_recipes_are_listed_with_their_parameters() -> None:
    shown = CliRunner().invoke(app, ["recipes"]).output
    listed = json.loads(CliRunner().invoke(app, ["recipes", "--json"]).output)
    assert set(listed) == set(recipes.RECIPES)
    assert all(name in shown and recipe["summary"] for name, recipe in listed.items())
    assert [name for name, recipe in listed.items() if recipe["default"]] == ["adaptive"]
    chunk = listed["sarathi"]["parameters"]["chunk_tokens"]
    assert (chunk["type"], chunk["default"], chunk["at_least"], chunk["at_most"]) == ("int", 512, 1, 1 << 20)
    assert "chunk_tokens=512" in shown
    assert listed["srpt"]["parameters"]["oracle"]["choices"] == ["none", "max-tokens"]
    assert [*json.loads(CliRunner().invoke(app, ["recipes", "fcfs", "--json"]).output)] == ["fcfs"]
    unknown = CliRunner().invoke(app, ["recipes", "fcsf"])
    assert (unknown.exit_code, "did you mean fcfs?" in unknown.stderr) == (2, True)


def test_full_help_truncates_no_name() -> None:
    checked = 0
    for path, command in _commands(typer.main.get_command(app)):
        shown = _help(path, command)
        assert "\u2026" not in shown
        assert max(map(len, shown.splitlines())) <= 80, path
        for option in command.params:
            if option.param_type_name == "option":
                checked += 1
                assert _flags(shown) >= {*option.opts, *option.secondary_opts}, path
    assert checked > 200


def _help(path: tuple[str, ...], command: Any) -> str:
    has_more = any("--help-all" in option.opts for option in command.params)
    options = [*path, "--help-all" if has_more else "--help"]
    run = CliRunner().invoke(app, options, env={"COLUMNS": "80"})
    testing._get_command.cache_clear()  # --help-all shows what the commands of this call hide
    assert run.exit_code == 0, run.output
    return run.output


def _flags(text: str) -> set[str]:
    return set(re.split(r"[\s,/]+", text))


@pytest.mark.parametrize(("columns", "is_table"), [("0", True), ("20", False), ("60", True)])
def test_a_narrow_terminal_shows_one_field_a_line(columns: str, is_table: bool) -> None:
    run = CliRunner().invoke(app, ["list"], env={"COLUMNS": columns})
    lines = [line.strip() for line in run.stdout.splitlines()]
    assert run.exit_code == 0
    assert ("model: tally" in lines) != is_table
    assert any(line.startswith("can be served: yes") for line in lines) != is_table
    assert any(line.startswith("tally ") and "yes (built in)" in line for line in lines) == is_table


def test_help_shows_common_options_and_counts_the_others() -> None:
    for path, command in _commands(typer.main.get_command(app)):
        run = CliRunner().invoke(app, [*path, "--help"])
        everything = _help(path, command)
        omitted = {flag for flag in _flags(everything) - _flags(run.output) if flag.startswith("--")}
        options = {
            flag: parameter for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)
        }
        assert all(options[flag].hidden and not options[flag].required for flag in omitted if flag in options), path
        count = len({options[flag].name for flag in omitted if flag in options})
        assert (f"Show all options, {count} more than --help does" in " ".join(run.output.split())) == (count > 0), path
    common = _flags(CliRunner().invoke(app, ["serve", "--help"]).output)
    assert common >= {"--recipe", "--port", "--api-key", "--max-num-seqs", "--config", "--help-all"}
    assert not common & {"--batch-max-lines", "--hang-timeout", "--ray-address"}
    assert 15 <= len({flag for flag in common if re.fullmatch(r"--[a-z-]+", flag)}) <= 30


def _commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in getattr(group, "commands", {}).items():
        yield (*path, name), command
        yield from _commands(command, (*path, name))


def test_help_groups_options_and_does_not_import_torch() -> None:
    program = (
        "import sys; from skipjoin.cli import app; app(['serve', '--help-all'], standalone_mode=False); "
        "print('torch' in sys.modules)"
    )
    environment = os.environ | {"COLUMNS": "80"}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert run.stdout.endswith("False\n")
    positions = [
        run.stdout.index(text) for text in ("\nModel:\n", "\nScheduling:\n", "--set", "\nHTTP server:\n", "\nLimits:\n")
    ]
    assert positions == sorted(positions)
    assert max(map(len, run.stdout.splitlines())) <= 80


def test_duplicate_option_names_are_refused() -> None:
    def command(*, seed: Annotated[int, typer.Option("--seed")] = 0, engine: dict[str, object]) -> None:
        pass

    with pytest.raises(ValueError, match="two options of a command are called seed"):
        takes(engine=Section(EngineConfig))(command)


def test_error_names_the_flag_as_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    for options, message in (
        (["--kv-offloading-size=-1"], "--kv-offloading-size must be in [0, 1e+06], got -1.0"),
        (["--swap-space", "-1"], "--swap-space must be in [0, 1e+06], got -1.0"),
        (["--recipe", "fastserve", "--set", "starvation_s=0"], "starvation_s must be in (0, 1e+09], got 0.0"),
        (["--max-num-queued-reqs", "0"], "--max-num-queued-reqs must be in [1, 1099511627776], got 0"),
    ):
        monkeypatch.setattr(sys, "argv", ["skipjoin", "serve", *options])
        assert invoke("serve", *options).stderr == f"error: {message}\n"
    flags = {"model": "--model", "slo_s": "--slo", "port": "--port"}
    text = "model must be x, not model y in ./slo_s/port.json or slo_s=3; slo_s, slo_s.p95 and slo_s-x"
    assert with_flags(text, flags) == text.replace("model must", "--model must").replace("slo_s, ", "--slo, ")


def test_unknown_parameter_error_suggests_a_similar_one() -> None:
    run = invoke("serve", "--recipe", "fastserve", "--set", "quantm_s=1")
    assert "there is no parameter 'quantm_s'; did you mean quantum_s?" in run.stderr
