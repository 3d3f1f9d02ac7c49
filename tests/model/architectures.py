"""Which causal decoders of transformers run, and how; docs/reference/models.md is made of the record.

PYTHONPATH=tests:tests/model python tests/model/architectures.py    # writes it in five minutes; then: make reference

With names of architectures, it renews their rows.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from model_zoo import PagedRunner
from safetensors.torch import load_file, save_file

from skipjoin.model import family
from skipjoin.model.config import ModelConfig
from skipjoin.model.errors import ModelError
from skipjoin.model.fallback.settings import decoders
from skipjoin.model.load_spec import LoadSpec
from skipjoin.model.loader import load_model, planned_model
from skipjoin.model.weight_files import ModelFiles

RECORD = Path(__file__).with_name("architectures.json")
NATIVE, RUNS, REFUSED, UNTRIED = "native", "through transformers", "refused", "not tried"
# Fields of configurations, of which each gets those that it has.
SMALL = {
    **{"vocab_size": 101, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"intermediate_size": 96, "num_hidden_layers": 4, "max_position_embeddings": 128, "sliding_window": 9},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1},
    **{"n_shared_experts": 1, "rotary_dim": 8},
    **{
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "expert_ffn_hidden_size": 32,
    },
    **{"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "decoder_start_token_id": 0},
    **{"vocab_size_per_layer_input": 101, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2},
    **{"decoder_layers": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 96, "encoder_layers": 1},
}
# Those of latent attention, whose heads have parts.
LATENT = {
    **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16},
    **{"qk_head_dim": 32, "num_key_value_heads": 4},
}
# Fields that have no number by default.
NUMBERED = {
    "n_shared_experts",
    "num_key_value_heads",
    "head_dim",
    "num_experts_per_tok",
    "n_routed_experts",
    "n_group",
    "topk_group",
}
# Kinds of layers of published models, where those of the default configuration are others.
KINDS = {
    "Lfm2ForCausalLM": ("conv", "full_attention"),
    "Lfm2MoeForCausalLM": ("conv", "full_attention"),
    "Llama4ForCausalLM": ("chunked_attention", "full_attention"),
    "MiniMaxM3VLForCausalLM": ("full_attention", "minimax_m3_sparse"),
}
# Language models of those that also see or hear, where their names are others.
TEXTS = {
    "FuyuForCausalLM": "PersimmonForCausalLM",
    "GotOcr2ForConditionalGeneration": "Qwen2ForCausalLM",
    "MossTranscribeDiarizeForConditionalGeneration": "Qwen3ForCausalLM",
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
# Further fields of some, whose default sizes are large or do not fit the others.
FIELDS: dict[str, dict[str, Any]] = {
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2},
    "BambaForCausalLM": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_state": 16},
    "FalconH1ForCausalLM": {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_d_head": 16, "mamba_d_ssm": 128},
    "NemotronHForCausalLM": {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2},
    "Zamba2ForCausalLM": {"n_mamba_heads": 8, "mamba_headdim": 16, "mamba_d_state": 16},
    "Llama4ForCausalLM": {"attention_chunk_size": 8, "intermediate_size_mlp": 96, "floor_scale": 4}
    | {"no_rope_layers": [1, 0, 1, 0], "moe_layers": [0, 1], "rope_parameters": _ROPE},
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8},
    "ZambaForCausalLM": {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    "JetMoeForCausalLM": {"kv_channels": 24},
    "CohereCompassForCausalLM": {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _ROPE)},
    "Phi4MultimodalForCausalLM": {
        "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
        "audio_config": {"hidden_size": 32, "intermediate_size": 32, "num_blocks": 1, "num_attention_heads": 2},
    },
    "Lfm2MoeForCausalLM": {"num_dense_layers": 1, "norm_eps": 1e-5},
    "DbrxForCausalLM": {
        "d_model": 64,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    # Lengths of heads are rounded up to a multiple of 64 for all of them together.
    "xLSTMForCausalLM": {"hidden_size": 128, "embedding_dim": 128},
}
# A larger model has fields that are not above.
MAX_PARAMETERS = 20_000_000
# As tests of native families have it, relative to the spread of the logits.
TOLERANCE = 1e-3
LENGTHS = (1, 18, 40)
# Settings with which rows must have the same bits in the batches and chunks of both seeds.
SPECS = {
    "dtype float32": LoadSpec(dtype="float32"),
    "dtype bfloat16": LoadSpec(dtype="bfloat16"),
    "kv_cache_dtype int8": LoadSpec(dtype="float32", kv_cache_dtype="int8"),
}
SEEDS = (5, 6)


def configurations(kind: type[Any]) -> Iterator[Any]:
    """Yield small configurations, the more special ones last."""
    of = type(kind.config_class().get_text_config(decoder=True))
    default = of()
    is_latent = getattr(default, "kv_lora_rank", None) is not None
    more = FIELDS.get(kind.__name__, {})
    fields: dict[str, Any] = SMALL | (LATENT if is_latent else {}) | more
    names = {*default.to_dict(), *of.attribute_map} & {*fields}
    known = default.to_dict()
    names -= {name for name in names - NUMBERED if name not in of.attribute_map and known[name] is None} - {*more}
    kinds = KINDS.get(kind.__name__) or tuple(dict.fromkeys(known.get("layer_types") or ()))
    if kinds:
        fields["layer_types"] = [kinds[layer % len(kinds)] for layer in range(fields["num_hidden_layers"])]
        names.add("layer_types")
    dropped: list[tuple[str, ...]] = [("head_dim",)] if is_latent else [(), ("head_dim",)]
    dropped += [("layer_types",), ("head_dim", "num_attention_heads"), ("head_dim", "num_hidden_layers", "layer_types")]
    for without in dropped:
        yield of, {name: fields[name] for name in names if name not in without}


def small_model(kind: type[Any]) -> Any:
    error: Exception | None = None
    for of, fields in configurations(kind):
        try:
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in kind._from_config(of(**fields)).parameters())
            if size > MAX_PARAMETERS:
                raise ValueError(f"{size} parameters")
            torch.manual_seed(1)
            return kind._from_config(of(**fields), attn_implementation="eager").eval()
        except Exception as failed:  # transformers raises anything
            error = failed
    raise ValueError(f"no small configuration: {type(error).__name__}: {error}")


def outcome(name: str, folder: Path) -> tuple[str, str]:
    """Return how an architecture runs, and what is refused."""
    family._register_own()
    if any(name in builder.architectures for builder in family._families.values()):
        return NATIVE, ""
    text = TEXTS.get(name, name.replace("ForConditionalGeneration", "ForCausalLM"))
    kind = getattr(transformers, text if text in architectures() else name)
    try:
        model = small_model(kind)
    except Exception as error:
        try:  # what is refused needs no weights
            ModelConfig.from_dict({"architectures": [name]})
        except ModelError as refused:
            return REFUSED, why(refused)
        except Exception:
            pass
        return UNTRIED, f"{error}"[:120]
    for label, parameter in model.named_parameters():
        is_norm = "norm" in ".".join(label.split(".")[-3:]) and "weight" in label
        torch.nn.init.normal_(parameter, mean=float(is_norm), std=0.12 if parameter.dim() > 1 else 0.3)
    model.save_pretrained(folder)
    if kind.__name__ != name:
        nest(folder, name)
    spec = LoadSpec(dtype="float32")
    try:
        ours = load_model(folder, spec)
        planned_model(ModelFiles.of(folder), ours.config, spec)  # as engines do first
    except ModelError as error:
        return REFUSED, why(error)
    sequences = [torch.randint(3, 101, (1, length)) for length in LENGTHS]
    for ids, logits in zip(
        sequences, PagedRunner(ours, [tokens[0].tolist() for tokens in sequences], 4, 3).run(), strict=True
    ):
        with torch.no_grad():
            expected = model(input_ids=ids, use_cache=False).logits[0]
        distance = float((logits - expected).norm() / (expected - expected.mean(-1, keepdim=True)).norm())
        if not distance <= TOLERANCE:
            raise AssertionError(f"{name} was loaded, and its logits differ by {distance:.2g}")
    how = RUNS if ours.config.family == "transformers" else f"{NATIVE}, as `{kind.__name__}`"
    return how, limits(name, folder, [tokens[0].tolist() for tokens in sequences])


def limits(name: str, folder: Path, sequences: list[list[int]]) -> str:
    """Return what is refused; raise AssertionError if the bits of a row depend on the others of its batch."""
    refused = []
    for label, spec in SPECS.items():
        try:
            model = load_model(folder, spec)
        except ModelError as error:
            reason = str(error).partition(": ")[0].partition(f"{label} ")[2].replace(f"those of {name}", "its own")
            refused.append(f"without `{label}`, which {reason}")
            continue
        some, others = (PagedRunner(model, sequences, 4, seed).run() for seed in SEEDS)
        if not all(map(torch.equal, some, others)):
            raise AssertionError(f"{name} with {label} was loaded, and its logits depend on the batch")
    return "; ".join(refused)


def nest(folder: Path, name: str) -> None:
    """Make a decoder the language model of a model that also sees or hears."""
    weights, config = folder / "model.safetensors", folder / "config.json"
    tensors = {label.replace("model.", "model.language_model.", 1): one for label, one in load_file(weights).items()}
    save_file(tensors | {"model.vision_tower.weight": torch.zeros(2, 2)}, weights, metadata={"format": "pt"})
    text = json.loads(config.read_text())
    config.write_text(json.dumps({"architectures": [name], "text_config": text, "eos_token_id": 2}))


def why(error: ModelError) -> str:
    """Return the reason without details of one model."""
    reason = str(error).partition(f"through transformers {transformers.__version__}: ")[2] or str(error)
    if "through transformers its logits differ" in reason:
        return "its logits differ from those without paged KV"
    for general in ("its layers keep a state that is no KV", "its attention cannot be replaced"):
        reason = general if reason.startswith(general) else reason
    is_fixed = "'_Rows' object" in reason or "has no attribute 'language_model'" in reason
    return "its output projection cannot run alone" if is_fixed else reason


def architectures() -> list[str]:
    return sorted(set(decoders()))


def write_outcomes(file: Path, key: str, names: Iterable[str], outcome: Callable[[str, Path], tuple[str, str]]) -> None:
    """Write what became of each name, in addition to what the file has if the command names some."""
    logging.disable()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    found: dict[str, Any] = json.loads(file.read_text())[key] if sys.argv[1:] else {}
    for name in sys.argv[1:] or names:
        with tempfile.TemporaryDirectory() as folder:
            try:
                found[name] = outcome(name, Path(folder))
            except Exception as error:
                found[name] = UNTRIED, f"{type(error).__name__}: {error}"[:300]
            print(name, *found[name], flush=True)
    record = {"transformers": transformers.__version__, key: dict(sorted(found.items()))}
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_outcomes(RECORD, "architectures", architectures(), outcome)
