from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from skipjoin.builtin import builtin_model_path
from skipjoin.config import ConfigError
from skipjoin.sim.experiments.machines import Machine, shape_of
from skipjoin.sim.hardware import DEVICES, GIB, Device, DeviceGroup, parse_hardware
from skipjoin.sim.models import MODELS, model_shape

# Billions of parameters: the sizes in the papers of OPT, Llama and Llama 2, and with more digits those of the
# published weights (small OPTs, Llama 3, Pythia, Qwen3; Qwen3's with one copy of a tied head).
PUBLISHED = {
    "opt-1.3b": 1.316,
    "opt-2.7b": 2.652,
    "opt-6.7b": 6.658,
    "opt-13b": 13.0,
    "opt-30b": 30.0,
    "opt-66b": 66.0,
    "opt-175b": 175.0,
    "llama-7b": 6.7,
    "llama-13b": 13.0,
    "llama-33b": 32.5,
    "llama-65b": 65.2,
    "llama-2-7b": 6.74,
    "llama-2-13b": 13.02,
    "llama-2-70b": 68.98,
    "llama-3-8b": 8.03,
    "llama-3-70b": 70.55,
    "pythia-12b": 11.85,
    "qwen3-0.6b": 0.596,
    "qwen3-1.7b": 1.72,
    "qwen3-4b": 4.02,
    "qwen3-8b": 8.19,
    "qwen3-14b": 14.77,
    "qwen3-32b": 32.76,
    "qwen3-30b-a3b": 30.5,
    "mixtral-8x7b": 46.7,
    "gpt-oss-20b": 20.9,
    "lfm2-1.2b": 1.17,
    "qwen3-next-80b-a3b": 80.0,
    "granite-4.0-h-micro": 3.2,
}


def test_parameter_counts_match_the_published_ones() -> None:
    assert {name: shape.parameters / 1e9 for name, shape in MODELS.items()} == pytest.approx(PUBLISHED, rel=0.02)


def test_model_sizes_match_the_fastserve_paper() -> None:
    """FastServe, table 1 and section 4.2: bytes of the weights, and 4 l h bytes of KV per token."""
    for name, weights in (("opt-13b", 26e9), ("opt-66b", 132e9), ("opt-175b", 350e9)):
        assert model_shape(name).weight_bytes == pytest.approx(weights, rel=0.02)
    assert model_shape("opt-175b").kv_bytes_per_token == 4 * 96 * 12288
    assert 512 * model_shape("opt-175b").kv_bytes_per_token == 2.25 * GIB


def test_grouped_query_attention_caches_the_key_value_heads_only() -> None:
    assert model_shape("llama-65b").kv_bytes_per_token == 8 * model_shape("llama-2-70b").kv_bytes_per_token


@pytest.mark.parametrize(
    ("name", "expected"), [("OPT-13B", "opt-13b"), (" qwen3-8b ", "qwen3-8b"), ("llama-30b", "llama-33b")]
)
def test_model_names_are_case_insensitive(name: str, expected: str) -> None:
    assert model_shape(name) is MODELS[expected]


@pytest.mark.parametrize(
    ("name", "hint"), [("opt13b", "did you mean opt-13b"), ("zebra", "choose from opt-1.3b, opt-2.7b")]
)
def test_an_unknown_model_suggests_the_nearest_names(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"^model: there is no '{name}'; {hint}"):
        model_shape(name)


@given(device=st.sampled_from(list(DEVICES.values())), tp=st.integers(1, 8), pp=st.integers(1, 99))
def test_a_device_group_round_trips_through_its_name(device: Device, tp: int, pp: int) -> None:
    group = DeviceGroup(device, tp, pp)
    assert group.gpus == tp * pp
    assert parse_hardware(group.name) == group
    assert parse_hardware(group.name.upper()) == group


def test_the_ram_of_a_server_is_divided_by_its_gpus() -> None:
    """AWS p4d.24xlarge, DGX A100 80GB, DGX-1 with V100s, DGX H100 and DGX H200, by their makers' data sheets."""
    servers = {"a100-40gb": 1152, "a100-80gb": 2048, "v100-32gb": 512, "h100-80gb": 2048, "h200-141gb": 2048}
    assert {name: 8 * device.host_memory_bytes / GIB for name, device in DEVICES.items()} == servers


@pytest.mark.parametrize("text", ["a100-40gb", "a100-40", "A100-40GB", "A100 40GB", "a100_40", " a100-40gb "])
def test_spellings_of_a_gpu_are_equivalent(text: str) -> None:
    assert parse_hardware(text) == DeviceGroup(DEVICES["a100-40gb"])


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a100", "there is no 'a100'; did you mean a100-"),
        ("zebra", "choose from a100-40gb, a100-80gb, v100-32gb, h100-80gb, h200-141gb$"),
        ("", "choose from"),
        ("a100-40gb:", "such as a100-40gb:tp8pp2, got 'a100-40gb:'"),
        ("a100-40gb:pp2tp8", "such as a100-40gb:tp8pp2"),
        ("a100-40gb:tp", "such as a100-40gb:tp8pp2"),
        ("a100-40gb:tp16", r"tp must be in \[1, 8\], the GPUs of a server, got 16"),
        ("a100-40gb:tp0", r"tp must be in \[1, 8\]"),
        ("a100-40gb:tp8pp0", "pp must be at least 1, got 0"),
    ],
)
def test_invalid_hardware_is_refused(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=rf"^hardware.*{error}"):
        parse_hardware(text)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        (
            "qwen3-30b-a3b",
            {"architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 48, "head_dim": 128}
            | {"num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 6144, "vocab_size": 151936}
            | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
            | {"max_position_embeddings": 40960},
        ),
        (
            "mixtral-8x7b",
            {"architectures": ["MixtralForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32}
            | {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000}
            | {"num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 32768},
        ),
        (
            "lfm2-1.2b",
            {"architectures": ["Lfm2ForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 16, "vocab_size": 65536}
            | {"num_attention_heads": 32, "intermediate_size": 12288, "max_position_embeddings": 128000}
            | {"full_attn_idxs": [2, 5, 8, 10, 12, 14]},
        ),
        (
            "qwen3-next-80b-a3b",
            {"architectures": ["Qwen3NextForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 48}
            | {"num_attention_heads": 16, "intermediate_size": 5632, "vocab_size": 151936}
            | {"max_position_embeddings": 262144},
        ),
        (
            "granite-4.0-h-micro",
            {"architectures": ["GraniteMoeHybridForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 40}
            | {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 100352, "num_local_experts": 0}
            | {"shared_intermediate_size": 8192, "intermediate_size": 8192, "mamba_n_heads": 64, "mamba_d_state": 128}
            | {"layer_types": (["mamba"] * 9 + ["attention"]) * 4, "tie_word_embeddings": True}
            | {"max_position_embeddings": 131072},
        ),
    ],
)
def test_experts_and_states_of_a_folder_are_those_of_the_catalog(
    name: str, config: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    assert dataclasses.replace(shape_of(str(tmp_path)), name=name) == MODELS[name]


def test_models_that_a_server_can_run_are_simulated(tmp_path: Path) -> None:
    folder = builtin_model_path()
    for name in ("tally", str(folder)):
        (system,) = Machine(model=name).systems("fcfs")
        assert (system.model, system.max_model_len) == ("tally", 1024)
    shape = shape_of(str(folder))
    weights = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    assert shape.parameters == pytest.approx(weights, rel=0.01)
    (tmp_path / "cut.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"--model: .*cut\.gguf is cut off in its header"):
        Machine(model=str(tmp_path / "cut.gguf")).systems("fcfs")
    with pytest.raises(ConfigError, match="there is no 'opt-13bb'; did you mean opt-13b"):
        Machine(model="opt-13bb").systems("fcfs")


@pytest.mark.parametrize(
    ("config", "billions", "kv_bytes"),
    [
        # DeepSeek-V3: 671 billion parameters; a row of 512 + 64 numbers in each of 61 layers.
        (
            {"architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 129_280, "hidden_size": 7168}
            | {"intermediate_size": 18_432, "num_hidden_layers": 61, "num_attention_heads": 128},
            671.0,
            61 * 576 * 2,
        ),
        # Gemma 4 with 15 of 35 layers that have KV, of which 3 attend to all tokens.
        (
            {"architectures": ["Gemma4ForCausalLM"], "hidden_size": 1536, "intermediate_size": 6144}
            | {"num_hidden_layers": 35, "num_attention_heads": 8, "num_key_value_heads": 1, "num_kv_shared_layers": 20}
            | {"layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7},
            4.0,
            2 * 2 * (12 * 256 + 3 * 512),
        ),
    ],
    ids=["latent", "unlike heads"],
)
def test_kv_of_a_folder_is_that_of_its_layers(
    config: dict[str, Any], billions: float, kv_bytes: int, tmp_path: Path
) -> None:
    raw = config | {"dtype": "bfloat16", "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    shape = shape_of(str(tmp_path))
    assert shape.kv_bytes_per_token == kv_bytes
    assert shape.cpu_block_bytes(16) == 16 * kv_bytes
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.02)
    with pytest.raises(ConfigError, match="--swap-dtype int8 needs keys and values of equal heads"):
        Machine(model=str(tmp_path), swap_dtype="int8").systems("fcfs")


def test_states_take_a_part_of_both_pools() -> None:
    (system,) = Machine(model="granite-4.0-h-micro", kv_gib=30, swap_gib=80).systems("fcfs")
    shape, states = model_shape("granite-4.0-h-micro"), system.states
    here, there = states.device + states.snapshots, states.cpu
    pools = here * shape.state_bytes + system.kv_blocks * system.block_bytes, there * shape.state_bytes
    assert pools[0] == pytest.approx(30 * GIB, rel=1e-3)
    assert pools[1] + system.cpu_blocks * system.cpu_block_bytes == pytest.approx(80 * GIB, rel=1e-3)
    assert min(states[1:]) > 0
    with pytest.raises(ConfigError, match=r"kv_gib must be at least 0\.285, because a request's state takes 0\.071"):
        Machine(model="granite-4.0-h-micro", kv_gib=0.1).systems("fcfs")
