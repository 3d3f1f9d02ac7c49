"""Our attention in older modeling code of transformers, which calls no interface."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F

from skipjoin.model.errors import ModelError
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
_ONE_MATRIX = "DbrxExperts"
# Experts of the usual layout, whose code has no choice of functions.
_USUAL_EXPERTS = "Step3p7Experts"

# Called with the module, and then as its method.
Call = Callable[..., Any]


def register(config: Any) -> None:
    """Register our attention for classes of this type."""
    model_type = config.model_type
    if model_type == "doge" and config.is_moe:
        raise ModelError("its code chooses the experts of a token by scores of other tokens of the batch")
    if model_type == "falcon" and config.alibi and (config.multi_query or config.new_decoder_architecture):
        raise ModelError("linear biases (ALiBi) of its keys differ between heads that share keys")
    if model_type not in _CLASSES and model_type not in _MASKS:
        return
    code: Any = import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    if model_type in _MASKS and not isinstance(code.create_causal_mask, partial):
        code.create_causal_mask = partial(_MASKS[model_type], code.create_causal_mask)
    if (name := _CLASSES.get(model_type)) is not None:
        getattr(code, name).update(dict.fromkeys((PAGED, SAMPLED), getattr(code, name)[_EAGER]))


def _any_mask(original: Callable[..., torch.Tensor | None], **options: Any) -> torch.Tensor:
    found = original(**options)
    return torch.zeros(()) if found is None else found


def _no_mask_with_biases(original: Callable[..., torch.Tensor | None], **options: Any) -> torch.Tensor | None:
    """Return a placeholder for the mask that Falcon joins with its linear biases, where our attention has both."""
    config = options["config"]
    is_ours = config.alibi and config._attn_implementation in (PAGED, SAMPLED)
    return torch.zeros(()) if is_ours else original(**options)


_MASKS: dict[str, Callable[..., Any]] = {"mpt": _any_mask, "falcon": _no_mask_with_biases}


def adapt(model: Any) -> None:
    for module in [*model.modules()]:
        for name in _SPLIT_WEIGHTS.get(type(module).__name__, ()):
            _split(module, name)
        if (found := _TABLE.get(type(module).__name__)) is not None:
            method, call = found
            setattr(module, method, partial(_either, getattr(module, method), partial(call, module), model.config))
        if type(module).__name__ == _PLAIN_EXPERTS:  # as modules with a choice of functions for experts
            module.has_gate = module.is_transposed = True
            module._apply_gate = partial(_gated, module.act_fn)
        if type(module).__name__ in (_ONE_MATRIX, _USUAL_EXPERTS):
            module.has_gate, module.is_transposed = True, False
        if type(module).__name__ == _ONE_MATRIX:
            module._apply_gate = partial(_gated, module.mlp.activation_fn)


class _Parts:
    """Stands for a weight with a matrix for each head or expert, whose places products take."""

    def __init__(self, matrices: torch.nn.ParameterList) -> None:
        self._matrices = matrices

    def __getitem__(self, at: Any) -> Any:
        return self._matrices[at] if isinstance(at, int) else self

    def __matmul__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([matrix @ part for matrix, part in zip(self._matrices, x, strict=True)])


def _split(module: torch.nn.Module, name: str) -> None:
    weight = module._parameters.pop(name)
    assert weight is not None
    parts = torch.nn.ParameterList([torch.nn.Parameter(part, requires_grad=False) for part in weight.unbind()])
    module.add_module(f"{name}_parts", parts)
    module.__dict__[name] = _Parts(parts)


def _either(original: Call, ours: Call, config: Any, *args: Any, **options: Any) -> Any:
    return (ours if config._attn_implementation in (PAGED, SAMPLED) else original)(*args, **options)


def with_positions(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, slopes: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys, [heads, T, dim], with dimensions whose products are slope * position of the key (ALiBi).

    ALiBi also subtracts slope * position of the query, which changes no softmax. `slopes` are divided by the scale of
    the scores.
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


def with_biases(
    query: torch.Tensor, key: torch.Tensor, biases: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys, [heads, T, dim], whose products also add the biases of keys [kv_heads, T]."""
    factor = torch.tensor(1 / scale)
    high = factor.to(query.dtype)
    own = torch.stack([high, (factor - high.float()).to(query.dtype)]).to(query.device).expand(*query.shape[:2], -1)
    others = biases.to(key.dtype)[..., None].expand(-1, -1, 2)
    return (
        torch.cat([query, F.pad(own, (0, BIAS_DIMS - 2))], dim=-1),
        torch.cat([key, F.pad(others, (0, BIAS_DIMS - 2))], dim=-1),
    )


def _by_heads(scale_of: Callable[[Any], float]) -> Call:
    """Return what replaces `_attn`, of [1, heads, T, dim]. Modules of GPT-Neo know their window."""

    def call(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, None]:
        if getattr(module, "attention_type", "") == "local" and mask is not None:
            mask = torch.full_like(mask, module.config.window_size)
        out, _ = attend(module, query.to(value.dtype), key.to(value.dtype), value, mask, scaling=scale_of(module))
        return out.transpose(1, 2), None

    return call


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


def _falcon(
    module: Any,
    hidden: torch.Tensor,
    alibi: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    *,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    **ignored: Any,
) -> tuple[torch.Tensor, None]:
    from transformers.models.falcon import modeling_falcon as code  # noqa: PLC0415 - as above

    query, key, value = (part.transpose(1, 2) for part in module._split_heads(module.query_key_value(hidden)))
    if module.new_decoder_architecture:  # keys and values are repeated
        repeats = module.num_heads // module.num_kv_heads
        key, value = key[:, ::repeats], value[:, ::repeats]
    options: dict[str, Any] = {"scaling": module.inv_norm_factor}
    if alibi is None:
        query, key = code.apply_rotary_pos_emb(query, key, *position_embeddings)  # type: ignore[no-untyped-call]
    else:
        two = torch.ones((1, 2), dtype=torch.int64, device=hidden.device)
        slopes = code.build_alibi_tensor(two, module.num_heads, torch.float32)[:, 0, 1]
        options |= {"slopes": slopes, "is_rounded": True}
        attention_mask = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device="cpu")  # of no window
    out, _ = attend(module, query, key, value, attention_mask, **options)
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
    """Replace the MLP of Llama 4, which runs all experts, by the chosen ones; their inputs are multiplied by scores."""
    rows = hidden.reshape(-1, module.hidden_dim)
    scores, logits = module.router(rows)
    total, ones = module.shared_expert(rows), rows.new_ones((len(rows), 1))
    for chosen in logits.topk(module.top_k, dim=1).indices.split(1, dim=1):
        total = total + apply_experts(module.experts, rows * scores.gather(1, chosen), chosen, ones)
    return total, logits


def _dbrx_experts(module: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return apply_experts(module, hidden.reshape(-1, module.hidden_size), chosen, weights).view(hidden.shape)


def _phimoe_rotary(module: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace the rotary positions of Phi-3.5-MoE by those of contexts with LongRoPE's short factors."""
    frequencies, scale = module.rope_init_fn(module.config)
    scale = module.config.rope_parameters.get("short_mscale") or scale
    angles = position_ids[..., None].float() * frequencies.to(device=x.device, dtype=torch.float32)
    both = torch.cat((angles, angles), dim=-1)
    return (both.cos() * scale).to(x.dtype), (both.sin() * scale).to(x.dtype)


def cut_experts(module: Any) -> None:
    """Give each expert of Dbrx a matrix, instead of a part of one [experts * inner, hidden]."""
    if type(module).__name__ != _ONE_MATRIX:
        return
    shape = (module.num_experts, module.ffn_hidden_size, module.hidden_size)
    gate, up, down = (module.mlp._parameters.pop(name).detach().view(shape) for name in ("w1", "v1", "w2"))
    for name, matrices in (("gate_up_proj", torch.cat((gate, up), dim=1)), ("down_proj", down.transpose(1, 2))):
        module.register_parameter(name, torch.nn.Parameter(matrices, requires_grad=False))


def _gated(activation: Callable[[torch.Tensor], torch.Tensor], joined: torch.Tensor) -> torch.Tensor:
    gate, up = joined.chunk(2, dim=-1)
    return up * activation(gate)


def _falcon_linear(module: Any, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, module.weight, module.bias)


def _doge(
    module: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    **ignored: Any,
) -> tuple[torch.Tensor, None]:
    """Replace Doge's attention, whose scores have biases of keys, up to the length at which it drops keys."""
    from transformers.models.doge.modeling_doge import apply_rotary_pos_emb  # noqa: PLC0415 - as above

    shape = (*hidden_states.shape[:-1], -1, module.head_dim)
    query, key = module.q_norm(module.q_proj(hidden_states).view(shape)), module.k_proj(hidden_states).view(shape)
    query, key = apply_rotary_pos_emb(query.transpose(1, 2), module.k_norm(key).transpose(1, 2), *position_embeddings)
    values = module.v_proj(hidden_states)
    biases = torch.exp(module.A * F.softplus(module.dt_proj(values)))[0].t()
    options = {"scaling": module.scaling, "biases": biases}
    out, _ = attend(module, query, key, values.view(shape).transpose(1, 2), attention_mask, **options)
    return module.o_proj(out.flatten(2)), None


def _sorted_by_experts(module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, Any, torch.Tensor, list[int], Any]:
    """Replace the routing of JetMoe, which counts the rows of experts: none on torch's meta device."""
    logits = module.layer(hidden).float()
    scores, chosen = logits.topk(module.top_k, dim=1)
    gates, experts = torch.softmax(scores, dim=1).type_as(hidden).flatten(), chosen.flatten()
    order = experts.sort(stable=True).indices
    counts = [len(experts)] + [0] * (module.num_experts - 1)
    if not hidden.is_meta:
        counts = torch.bincount(experts, minlength=module.num_experts).tolist()
    return order, order.div(module.top_k, rounding_mode="trunc"), gates[order], counts, logits


# Weights with a matrix for each head or expert.
_SPLIT_WEIGHTS = {"ZambaMambaMixer": ("x_proj_weight", "dt_proj_weight"), "JetMoeParallelExperts": ("weight",)}
# The method that is replaced, by the class of the module.
_TABLE: dict[str, tuple[str, Call]] = {
    "GPTJAttention": ("_attn", _by_heads(lambda module: 1 / float(module.scale_attn))),
    "CodeGenAttention": ("_attn", _by_heads(lambda module: 1 / float(module.scale_attn))),
    "GPTNeoSelfAttention": ("_attn", _by_heads(lambda _: 1.0)),
    "BloomAttention": ("forward", _bloom),
    "MptAttention": ("forward", _mpt),
    "GPTNeoXJapaneseAttention": ("_attn", _by_heads(lambda module: 1 / module.norm_factor)),
    "FalconAttention": ("forward", _falcon),
    "FalconLinear": ("forward", _falcon_linear),
    "DogeAttention": ("forward", _doge),
    "JetMoeTopKGating": ("forward", _sorted_by_experts),
    "Llama4TextAttention": ("forward", _llama4),
    "Llama4TextMoe": ("forward", _llama4_experts),
    "DbrxExperts": ("forward", _dbrx_experts),
    "Step3p7Experts": ("forward", apply_experts),
    "PhimoeRotaryEmbedding": ("forward", _phimoe_rotary),
}
