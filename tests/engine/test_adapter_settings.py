"""Adapters that an engine starts with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skipjoin import LLM
from skipjoin.builtin import builtin_model_path
from skipjoin.cli.options import adapters_of
from skipjoin.config import ConfigError, EngineConfig
from skipjoin.engine.load import check_load
from skipjoin.model.errors import AdapterError
from skipjoin.sampling import ParameterError, SamplingParams
from support.adapters import write_adapter

SETTINGS = {"profile": "off", "kv_cache_gib": 0.01, "swap_space_gib": 0, "threads": 1}


def test_names_and_folders_of_adapters_are_checked() -> None:
    assert adapters_of(["a=x", "b=y=z"]) == {"a": "x", "b": "y=z"}
    assert EngineConfig(lora_modules={"a": "x"}).lora_modules == {"a": str(Path("x").absolute())}
    with pytest.raises(ConfigError, match="lora_modules must be NAME=FOLDER, got 'a'"):
        adapters_of(["a"])
    with pytest.raises(ConfigError, match="lora_modules: a is given twice"):
        adapters_of(["a=x", "a=y"])
    for name in ("", " a", "a\n", "a" * 257):
        with pytest.raises(ConfigError, match="lora_modules must be like"):
            EngineConfig(lora_modules={name: "x"})


def test_a_wrong_adapter_is_refused_before_weights_are_loaded(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"adapter a: .* has no adapter_config.json"):
        check_load(EngineConfig(lora_modules={"a": str(tmp_path)}, **SETTINGS))


def test_prompts_choose_adapters_by_name(tmp_path: Path) -> None:
    hidden = json.loads((builtin_model_path() / "config.json").read_text())["hidden_size"]
    write_adapter(tmp_path, {"model.layers.0.self_attn.o_proj": (hidden, hidden)}, seed=1, size=0.5)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM("tally", lora_modules={"a": str(tmp_path)}, **SETTINGS) as llm:
        plain, adapted = (output.token_ids for output in llm.generate(["Count", "Count"], params, adapter=[None, "a"]))
        assert plain != adapted
        assert llm.generate("Count", params, adapter="a")[0].token_ids == adapted
        with pytest.raises(
            ParameterError, match="adapter must be the name of one, and lora_modules has a; got str 'b'"
        ):
            llm.generate("Count", params, adapter="b")
