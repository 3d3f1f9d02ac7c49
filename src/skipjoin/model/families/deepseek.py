"""DeepSeek-V2 and V3, GLM-4.7-Flash and Youtu-LLM: attention over one latent row of KV for all heads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from skipjoin.model.attention.base import LayerInputs
from skipjoin.model.attention.torch_backend import rotate
from skipjoin.model.builder import Builder
from skipjoin.model.config import ExpertSettings, LatentSettings, RoutingSettings
from skipjoin.model.config_fields import factor
from skipjoin.model.errors import ModelError
from skipjoin.model.experts import expert_mlp, gated_experts
from skipjoin.model.families.gated import gated_fields, gated_mlp, norms_before
from skipjoin.model.families.rotary import RotaryDecoder
from skipjoin.model.families.scored import sparse_layers
from skipjoin.model.family import family
from skipjoin.model.layers import Layer
from skipjoin.model.ops.base import Linear, Norm
from skipjoin.model.recurrent import MixedLayer, Stateless, mlp_part, shared_experts
from skipjoin.model.self_attention import Rotary, halves_of_pairs

# Of missing entries: those of the configuration class in transformers.
_SHARED = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": _SHARED
    | {"first_k_dense_replace": 0, "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407}
    | {"n_group": None, "topk_group": None, "topk_method": "greedy", "routed_scaling_factor": 1.0},
    "deepseek_v3": _SHARED
    | {"first_k_dense_replace": 3, "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048}
    | {"n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    "glm4_moe_lite": _SHARED
    | {"q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "rms_norm_eps": 1e-5, "n_group": 1}
    | {"first_k_dense_replace": 1, "n_routed_experts": 64, "n_shared_experts": 1, "moe_intermediate_size": 1536}
    | {"topk_group": 1, "num_experts_per_tok": 4, "norm_topk_prob": True, "routed_scaling_factor": 1.8},
    "youtu": _SHARED | {"tie_word_embeddings": True},
}
_ARCHITECTURES = {
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "YoutuForCausalLM": "youtu",
}
# Of norms of latent vectors, whatever that of other norms is.
_EPSILON = 1e-6


def _fields(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    kind = _ARCHITECTURES[architecture]
    raw = {**_DEFAULTS[kind], **raw}
    of = LatentSettings(
        rank=int(raw["kv_lora_rank"]),
        rotary_dim=int(raw["qk_rope_head_dim"]),
        plain_dim=int(raw["qk_nope_head_dim"]),
        value_dim=int(raw["v_head_dim"]),
        query_rank=int(raw["q_lora_rank"] or 0),
    )
    fields = gated_fields({**raw, "head_dim": of.rotary_dim})
    if fields["activation"] != "silu":
        raise ModelError(f"hidden_act of {architecture} must be silu, got {raw['hidden_act']!r:.80}")
    layers = range(fields["num_layers"])
    return fields | {
        "num_kv_heads": 1,
        "head_dim": of.rank + of.rotary_dim,
        "latent": of,
        "attention_scale": _scale(raw, of),
        "rotates_pairs": kind == "deepseek_v2" or bool(raw.get("rope_interleave", True)),
        "experts": None if kind == "youtu" else _experts(raw, kind, layers),
        "shared_width": 0 if kind == "youtu" else int(raw["moe_intermediate_size"]) * int(raw["n_shared_experts"] or 0),
    }


def _scale(raw: Mapping[str, Any], of: LatentSettings) -> float:
    scale = 1.0 / math.sqrt(of.plain_dim + of.rotary_dim)
    rope = {**(raw.get("rope_parameters") or {}), **(raw.get("rope_scaling") or {})}
    kind, share = rope.get("rope_type") or rope.get("type") or "default", rope.get("mscale_all_dim")
    if kind == "default" or not share:
        return scale
    longer = factor(rope, "factor", 1.0)
    turned = 1.0 if longer <= 1 else 0.1 * float(share) * math.log(longer) + 1.0
    return scale * turned * turned


def _experts(raw: Mapping[str, Any], kind: str, layers: range) -> ExpertSettings:
    groups, kept = int(raw["n_group"] or 1), int(raw["topk_group"] or 1)
    scale = factor(raw, "routed_scaling_factor", 1.0)
    if kind == "deepseek_v2":
        if raw["topk_method"] not in ("greedy", "group_limited_greedy"):
            raise ModelError(f"topk_method must be greedy or group_limited_greedy, got {raw['topk_method']!r:.80}")
        if raw["topk_method"] == "greedy":
            groups = kept = 1
        routing = RoutingSettings(
            squashes=False, corrects=False, groups=groups, kept=kept, best=1, sums_to_one=False, scale=scale
        )
    else:
        sums = bool(raw["norm_topk_prob"])
        routing = RoutingSettings(groups=groups, kept=kept, sums_to_one=sums, scale=scale)
    return ExpertSettings(
        count=int(raw["n_routed_experts"]),
        per_token=int(raw["num_experts_per_tok"]),
        width=int(raw["moe_intermediate_size"]),
        among_chosen=True,
        layers=tuple(sparse_layers(raw, layers)),
        routing=routing,
    )


@family(
    "deepseek",
    architectures=_ARCHITECTURES,
    fields=_fields,
    prefix="model.",
    sizes={
        **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 1 << 16),
        **dict.fromkeys(("n_routed_experts", "n_group", "topk_group"), 1 << 12),
    },
)
class DeepseekDecoder(RotaryDecoder):
    @staticmethod
    def layer(builder: Builder, index: int, rotary: Rotary | None) -> Layer:
        config, name = builder.config, f"model.layers.{index}"
        attention = LatentAttention(builder, index, rotary)
        norm, mlp_norm = norms_before(builder, name)
        name = f"{name}.mlp"
        if config.experts is None or index not in config.experts.layers:
            return MixedLayer(norm, attention, mlp_norm, mlp_part(*gated_mlp(builder, name)))
        make = gated_experts(builder, f"{name}.experts")
        mlp = expert_mlp(builder, f"{name}.gate", make, correction=f"{name}.gate.e_score_correction_bias")
        if not config.shared_width:
            return MixedLayer(norm, attention, mlp_norm, Stateless(mlp.add_to))
        return MixedLayer(norm, attention, mlp_norm, shared_experts(builder, f"{name}.shared_experts", mlp))


class LatentAttention:
    """Attention of each head's query, multiplied by the matrix of its keys, over latent rows.

    A row is a key that all heads share, first the part with positions, and its latent part is the value, which the
    matrix of each head's values multiplies after attention. So no head's keys and values are kept or computed.
    """

    def __init__(self, builder: Builder, index: int, rotary: Rotary | None) -> None:
        config, of, name = builder.config, builder.config.latent, f"model.layers.{index}.self_attn"
        assert of is not None
        assert rotary is not None
        self._of, self._heads, hidden = of, config.num_heads, config.hidden_size
        self._layer, self._scale = builder.shard.kv_layers(config).index(index), config.attention_scale or 1.0
        self._cos_sin = rotary.cos_sin
        dim, inputs = of.plain_dim + of.rotary_dim, of.query_rank or hidden
        self._compress: Linear | None = None
        if of.query_rank:
            self._compress = builder.linear(f"{name}.q_a_proj", (of.query_rank,), hidden, config.attention_bias)
            self._query_norm = self._norm(builder, f"{name}.q_a_layernorm", of.query_rank)
        turned = torch.arange(of.rotary_dim)
        if config.rotates_pairs:
            turned = halves_of_pairs(of.rotary_dim, of.rotary_dim, of.rotary_dim)
        order = torch.cat([of.plain_dim + turned, torch.arange(of.plain_dim)])
        self._query = builder.linear(
            f"{name}.q_b_proj" if of.query_rank else f"{name}.q_proj",
            (self._heads * dim,),
            inputs,
            False,
            orders=[(torch.arange(0, self._heads * dim, dim)[:, None] + order).flatten()],
        )
        self._row = builder.linear(
            f"{name}.kv_a_proj_with_mqa",
            (of.rank + of.rotary_dim,),
            hidden,
            config.attention_bias,
            orders=[torch.cat([of.rank + turned, torch.arange(of.rank)])],
        )
        self._row_norm = self._norm(builder, f"{name}.kv_a_layernorm", of.rank)
        both = of.plain_dim + of.value_dim
        weight = builder.weights.take(f"{name}.kv_b_proj.weight", self._heads * both, of.rank)
        by_head = weight.view(self._heads, both, of.rank)
        self._keys = [builder.finish_linear(part[: of.plain_dim].t().contiguous(), None) for part in by_head]
        self._values = [builder.finish_linear(part[of.plain_dim :].contiguous(), None) for part in by_head]
        self._leave = builder.linear(f"{name}.o_proj", (hidden,), self._heads * of.value_dim, config.attention_bias)

    @staticmethod
    def _norm(builder: Builder, name: str, width: int) -> Norm:
        return builder.ops.rms_norm(builder.tensor(f"{name}.weight", width), _EPSILON)

    def add_to(self, x: torch.Tensor, total: torch.Tensor, step: LayerInputs, then: Norm | None = None) -> torch.Tensor:
        of, tokens, first = self._of, len(x), self._of.rotary_dim
        given = x if self._compress is None else self._query_norm(self._compress(x))
        heads, row = self._query(given).view(tokens, self._heads, -1), self._row(x)
        row[:, first:] = self._row_norm(row[:, first:])
        query = row.new_empty(tokens, self._heads, first + of.rank)
        query[:, :, :first] = heads[:, :, :first]
        for head, product in enumerate(self._keys):
            query[:, head, first:] = product(heads[:, head, first:])
        key = row.unsqueeze(1)
        rotate(query, key, step.batch.positions, self._cos_sin)
        out = step.attention.attend(query, key, key, step.kv, step.batch, layer=self._layer, scale=self._scale)
        out = out.view(tokens, self._heads, -1)
        found = row.new_empty(tokens, self._heads, of.value_dim)
        for head, product in enumerate(self._values):
            found[:, head] = product(out[:, head, first:])
        return self._leave.add_to(found.flatten(1), total, then)
