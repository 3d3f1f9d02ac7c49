"""Attention of older modeling code in transformers, which calls no interface: with ours in its place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch

from skipjoin.model.config import ModelError
from skipjoin.model.fallback.interfaces import PAGED, SAMPLED, apply_experts, attend

# Value of `_attn_implementation` with which a module computes its attention itself.
_EAGER = "eager"
# Dimensions by which heads with linear biases are longer, of which the last are 0.
BIAS_DIMS, _USED_DIMS = 16, 4
# Positions are split by this number, so that both parts are exact in bfloat16.
_SPLIT = 256

_CLASSES = {
    "gptj": "GPTJ_ATTENTION_CLASSES",
    "gpt_neo": "GPT_NEO_ATTENTION_CLASSES",
    "falcon": "FALCON_ATTENTION_CLASSES",
}

_PLAIN_EXPERTS = "Llama4TextExperts"

# Called with the module, and then as its method.
Call = Callable[..., tuple[torch.Tensor, Any]]


def register(config: Any) -> None:
    """Add our names to a table that classes of this type choose their module of attention from."""
    model_type = config.model_type
    if model_type == "falcon" and config.alibi:
        raise ModelError("its code rounds linear biases (ALiBi) of positions to bfloat16, and ours are exact")
    if model_type not in _CLASSES and model_type != "mpt":
        return
    code: Any = import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    if (name := _CLASSES.get(model_type)) is None:
        if not isinstance(code.create_causal_mask, partial):
            code.create_causal_mask = partial(_any_mask, code.create_causal_mask)
    else:
        getattr(code, name).update(dict.fromkeys((PAGED, SAMPLED), getattr(code, name)[_EAGER]))


def _any_mask(original: Callable[..., torch.Tensor | None], **options: Any) -> torch.Tensor:
    """Return a mask in any case, since MPT converts it; that of paged KV is not read."""
    found = original(**options)
    return torch.zeros(()) if found is None else found


def adapt(model: Any) -> None:
    """Let the modules of attention of a model call our function, where the table has them."""
    for module in model.modules():
        if (found := _TABLE.get(type(module).__name__)) is not None:
            method, call = found
            setattr(module, method, partial(_either, getattr(module, method), partial(call, module), model.config))
        if type(module).__name__ == _PLAIN_EXPERTS:  # as modules with a choice of functions for experts
            module.has_gate = module.is_transposed = True
            module._apply_gate = partial(_gated, module.act_fn)


def _either(original: Call, ours: Call, config: Any, *args: Any, **options: Any) -> Any:
    return (original if config._attn_implementation == _EAGER else ours)(*args, **options)


def with_positions(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, slopes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys with dimensions whose products are slope * position of the key (ALiBi).

    The bias of ALiBi is slope * (position of the key - position of the query), of which the second part is the same for
    all keys, and changes no softmax.

    Args:
        query: Shape [heads, T, dim]; `key` likewise.
        slopes: Shape [heads], divided by the scale of the scores.
    """
    high = slopes.to(query.dtype)
    low = (slopes - high.float()).to(query.dtype)
    own = torch.stack([high * _SPLIT, high, low * _SPLIT, low], dim=-1)[:, None].expand(-1, query.shape[1], -1)
    parts = torch.stack([positions // _SPLIT, positions % _SPLIT], dim=-1).to(key.dtype).repeat(1, 2)
    others = parts[None].expand(len(key), -1, -1)
    zeros = query.new_zeros((1, query.shape[1], BIAS_DIMS - _USED_DIMS))
    return (
        torch.cat([query, own, zeros.expand(len(query), -1, -1)], dim=-1),
        torch.cat([key, others, zeros.expand(len(key), -1, -1)], dim=-1),
    )


def _by_heads(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, None]:
    """Replace `_attn` of GPT-J and CodeGen: [1, heads, T, dim]."""
    out, _ = attend(
        module, query.to(value.dtype), key.to(value.dtype), value, mask, scaling=1 / float(module.scale_attn)
    )
    return out.transpose(1, 2), None


def _neo(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, None]:
    """Replace `_attn` of GPT-Neo, whose module knows its window."""
    if module.attention_type == "local" and mask is not None:
        mask = torch.full_like(mask, module.config.window_size)
    out, _ = attend(module, query, key, value, mask, scaling=1.0)
    return out.transpose(1, 2), None


def _bloom(
    module: Any,
    hidden: torch.Tensor,
    residual: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **ignored: Any,
) -> tuple[torch.Tensor, None]:
    from transformers.models.bloom.modeling_bloom import _get_alibi_slopes  # noqa: PLC0415 - of this model only

    query, key, value = module._reshape(module.query_key_value(hidden))
    slopes = _get_alibi_slopes(module.num_heads, hidden.device)
    out, _ = attend(module, query, key, value, attention_mask, scaling=module.inv_norm_factor, slopes=slopes)
    return module.dense(out.flatten(2)) + residual, None


def _mpt(
    module: Any,
    hidden: torch.Tensor,
    position_bias: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **ignored: Any,
) -> tuple[torch.Tensor, None]:
    """Replace the attention of MPT, whose biases of the last two positions differ by the slopes."""
    joined = module.Wqkv(hidden)
    if module.clip_qkv:
        joined = joined.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    shape = (*hidden.shape[:2], module.n_heads, module.head_dim)
    query, key, value = (part.view(shape).transpose(1, 2) for part in joined.chunk(3, dim=2))
    slopes = position_bias[:, 0, -1] - position_bias[:, 0, -2]
    if attention_mask is not None and attention_mask.dtype == torch.bool:  # of the window 0
        attention_mask = attention_mask.new_zeros(attention_mask.shape, dtype=torch.int64)
    out, _ = attend(module, query, key, value, attention_mask, scaling=module.softmax_scale, slopes=slopes)
    return module.out_proj(out.flatten(2)), None


def _japanese(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, None]:
    """Replace `_attn` of GPT-NeoX Japanese."""
    out, _ = attend(module, query, key, value, mask, scaling=1 / module.norm_factor)
    return out.transpose(1, 2), None


def _falcon(
    module: Any,
    hidden: torch.Tensor,
    alibi: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    *,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    **ignored: Any,
) -> tuple[torch.Tensor, None]:
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb  # noqa: PLC0415 - as above

    query, key, value = (part.transpose(1, 2) for part in module._split_heads(module.query_key_value(hidden)))
    if module.new_decoder_architecture:  # keys and values are repeated
        repeats = module.num_heads // module.num_kv_heads
        key, value = key[:, ::repeats], value[:, ::repeats]
    query, key = apply_rotary_pos_emb(query, key, *position_embeddings)  # type: ignore[no-untyped-call]
    out, _ = attend(module, query, key, value, attention_mask, scaling=module.inv_norm_factor)
    return module.dense(out.flatten(2)), None


def _llama4(
    module: Any,
    hidden_states: torch.Tensor,
    position_embeddings: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **ignored: Any,
) -> tuple[torch.Tensor, None]:
    """Replace the attention of Llama 4, which scales queries by their place in a batch of one sequence."""
    from transformers.models.llama4.modeling_llama4 import apply_rotary_emb  # noqa: PLC0415 - as above

    shape = (*hidden_states.shape[:-1], -1, module.head_dim)
    query, key, value = (
        product(hidden_states).view(shape) for product in (module.q_proj, module.k_proj, module.v_proj)
    )
    if module.use_rope:
        query, key = apply_rotary_emb(query, key, position_embeddings)
    if hasattr(module, "qk_norm"):
        query, key = module.qk_norm(query), module.qk_norm(key)
    grows = module.attn_temperature_tuning and not module.use_rope
    options = {"scaling": module.scaling, "growth": (module.floor_scale, module.attn_scale) if grows else None}
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    out, _ = attend(module, query, key, value, attention_mask, **options)
    return module.o_proj(out.flatten(2)), None


def _llama4_experts(module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace the MLP of Llama 4, which runs all experts: their inputs are multiplied by the scores of the chosen."""
    rows = hidden.reshape(-1, module.hidden_dim)
    scores, logits = module.router(rows)
    total, ones = module.shared_expert(rows), rows.new_ones((len(rows), 1))
    for chosen in logits.topk(module.top_k, dim=1).indices.split(1, dim=1):
        total = total + apply_experts(module.experts, rows * scores.gather(1, chosen), chosen, ones)
    return total, logits


def _gated(activation: Callable[[torch.Tensor], torch.Tensor], joined: torch.Tensor) -> torch.Tensor:
    gate, up = joined.chunk(2, dim=-1)
    return up * activation(gate)


# The method that is replaced, by the class of the module.
_TABLE: dict[str, tuple[str, Call]] = {
    "GPTJAttention": ("_attn", _by_heads),
    "CodeGenAttention": ("_attn", _by_heads),
    "GPTNeoSelfAttention": ("_attn", _neo),
    "BloomAttention": ("forward", _bloom),
    "MptAttention": ("forward", _mpt),
    "GPTNeoXJapaneseAttention": ("_attn", _japanese),
    "FalconAttention": ("forward", _falcon),
    "Llama4TextAttention": ("forward", _llama4),
    "Llama4TextMoe": ("forward", _llama4_experts),
}
