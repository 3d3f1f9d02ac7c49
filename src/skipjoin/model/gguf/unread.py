from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from skipjoin.model.gguf.architecture import Architecture
from skipjoin.model.gguf.file import Gguf, GgufError

# Values with which a number changes nothing, where an architecture does not read it.
_WITHOUT_EFFECT: dict[str, tuple[float, ...]] = {
    **dict.fromkeys(("attention.clamp_kqv", "attention.max_alibi_bias", "attention.shared_kv_layers"), (0,)),
    **dict.fromkeys(("attention.temperature_scale", "activation_sparsity_scale", "moe_every_n_layers"), (0,)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping"), (0,)),
    **dict.fromkeys(("swiglu_clamp_exp", "swiglu_clamp_shexp", "rope.scaling.yarn_log_multiplier"), (0,)),
    **dict.fromkeys(("attention.output_scale", "embedding_scale", "residual_scale", "logit_scale"), (0, 1)),
    **dict.fromkeys(("expert_group_count", "expert_weights_scale", "interleave_moe_layer_step"), (0, 1)),
    **dict.fromkeys(("rope.scaling.alpha", "rope.scaling.yarn_attn_factor"), (0, 1)),
    "expert_weights_norm": (1,),
}
_ENCODERS = ("BertModel", "NomicBertModel")
# Kinds of scores of experts: softmax over all, and over the chosen ones, which is the same where these add up to 1.
_SOFTMAX, _LOGISTIC, _SOFTMAX_OF_CHOSEN = 1, 2, 3
# Metadata are in float32.
_ROUNDING = 1e-5


def refuse_unread(file: Gguf, of: Architecture, config: Mapping[str, Any]) -> None:
    """Raise `GgufError` if a number of the metadata differs from what the model of `config` computes with."""
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise GgufError(f"{file.path} has general.type {kind!r:.80}, and is no model of its own: give a model")
    read = {*of.numbers.values(), *of.yarn_numbers.values()}
    for key, wanted in {**_WITHOUT_EFFECT, **_following(file, of, config)}.items():
        value = file.metadata.get(f"{file.architecture}.{key}")
        if value is None or key in read:
            continue
        if not all(_is_one_of(number, wanted) for number in (value if isinstance(value, list) else [value])):
            known = " or ".join(f"{usual:.6g}" for usual in wanted)
            raise GgufError(
                f"{file.path} has {file.architecture}.{key} {value!r:.80}, and {of.name} is only supported with "
                f"{known}: give the folder or hub id of the model that it was made from"
            )


def _following(file: Gguf, of: Architecture, config: Mapping[str, Any]) -> dict[str, tuple[float, ...]]:
    head_dim = config["head_dim"]
    scale = max(config.get("query_pre_attn_scalar", head_dim), 1) ** -0.5
    rotated = file.metadata.get(f"{file.architecture}.rope.dimension_count", head_dim)
    weights = config.get("norm_topk_prob", True)
    found: dict[str, tuple[float, ...]] = {
        "attention.causal": (int(of.name not in _ENCODERS),),
        "attention.scale": (0, scale),
        "attention.key_length_swa": (head_dim,),
        "attention.value_length_swa": (head_dim,),
        "rope.dimension_count_swa": (rotated,),
        "rope.freq_base_swa": (config["rope_theta"],),
        "expert_weights_norm": (int(weights),),
        "expert_gating_func": (0, _LOGISTIC)
        if of.has_logistic_scores
        else (0, _SOFTMAX, *([_SOFTMAX_OF_CHOSEN] if weights else [])),
    }
    rope = config["rope_parameters"]
    if of.has_layer_heads:
        found |= {"attention.scale": (0, 1), "rope.dimension_count_swa": (head_dim,)}
        del found["rope.freq_base_swa"]
        return found
    if rope["rope_type"] == "yarn":
        found["rope.scaling.yarn_ext_factor"] = (1,)
        if "llama_4_scaling_beta" in rope:
            found["attention.temperature_length"] = (rope.get("original_max_position_embeddings", 0),)
    return found


def _is_one_of(value: object, wanted: Collection[float]) -> bool:
    return isinstance(value, int | float) and any(math.isclose(value, usual, rel_tol=_ROUNDING) for usual in wanted)
