"""BERT and its relatives: encoders with learned positions, and layer norms after each part."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from skipjoin.model.builder import Builder
from skipjoin.model.errors import ModelError
from skipjoin.model.families.encoder import OUTPUTS, Encoder, Layout, encoder_family, encoder_fields
from skipjoin.model.family import family
from skipjoin.model.ops.base import by_distance

# Of missing entries: those of the configuration classes in transformers.
_DEFAULTS = {"max_position_embeddings": 512, "type_vocab_size": 2, "layer_norm_eps": 1e-12, "pad_token_id": 0}
_LARGEST_SIZE = 1 << 24
# Of MPNet: the buckets of distances, those of them that have one distance each, and where the last one begins.
_BUCKETS, _EXACT, _FARTHEST = 32, 8, 128
# The first positions of RoBERTa and MPNet, which no token has, are counted from the number of this token.
_PADDED = ("Roberta", "XLMRoberta", "Camembert")


def _fields(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    is_roberta = architecture.startswith(_PADDED)
    raw = {**_DEFAULTS, **({"pad_token_id": 1} if is_roberta else {}), **raw}
    kind = raw.get("position_embedding_type") or "absolute"
    if kind != "absolute" or raw.get("is_decoder"):
        what = "is_decoder must be false" if raw.get("is_decoder") else f"positions must be absolute, got {kind!r:.80}"
        raise ModelError(f"config.json of this {architecture}: {what}")
    offset = int(raw["pad_token_id"]) + 1 if is_roberta else 0
    return encoder_fields(raw) | {
        "max_positions": int(raw["max_position_embeddings"]) - offset,
        "type_vocab_size": int(raw["type_vocab_size"]),
        "position_offset": offset,
    }


@encoder_family("bert", _fields, Bert="bert")
class BertEncoder(Encoder):
    PREFIX = "bert"


@encoder_family("roberta", _fields, Roberta="roberta", XLMRoberta="xlm-roberta", Camembert="camembert")
class RobertaEncoder(Encoder):
    PREFIX = "roberta"


def _electra_fields(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    return _fields(raw, architecture) | {"embed_dim": int(raw.get("embedding_size") or raw["hidden_size"])}


@family(
    "electra",
    architectures={f"Electra{output}": "electra" for output in (*OUTPUTS, "ForPreTraining")},
    fields=_electra_fields,
    prefix="electra.",
    sizes={"type_vocab_size": 1 << 10, "embedding_size": _LARGEST_SIZE},
)
class ElectraEncoder(Encoder):
    PREFIX, EMBEDDING = "electra", "electra.embeddings.word_embeddings.weight"


def _distilbert_fields(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    usual = {"hidden_size": "dim", "num_attention_heads": "n_heads", "hidden_act": "activation"}
    raw = {**raw, **{name: raw[own] for name, own in usual.items() if own in raw}, "layer_norm_eps": 1e-12}
    return encoder_fields(raw) | {
        "hidden_size": int(raw["hidden_size"]),
        "num_heads": int(raw["num_attention_heads"]),
        "num_layers": int(raw["n_layers"]),
        "intermediate_size": int(raw["hidden_dim"]),
        "max_positions": int(raw.get("max_position_embeddings", 512)),
    }


@encoder_family(
    "distilbert",
    _distilbert_fields,
    dict.fromkeys(("dim", "hidden_dim"), _LARGEST_SIZE) | {"n_heads": 1 << 16, "n_layers": 1 << 14},
    DistilBert="distilbert",
)
class DistilBertEncoder(Encoder):
    PREFIX = "distilbert"
    LAYOUT = Layout(
        layer="transformer.layer.{}",
        qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        out="attention.out_lin",
        attention_norm="sa_layer_norm",
        up=("ffn.lin1",),
        down="ffn.lin2",
        mlp_norm="output_layer_norm",
    )


def _mpnet_fields(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    raw = {**_DEFAULTS, **raw}
    if (buckets := raw.get("relative_attention_num_buckets", _BUCKETS)) != _BUCKETS:
        raise ModelError(
            f"relative_attention_num_buckets of this {architecture} must be {_BUCKETS}, got {buckets!r:.80}"
        )
    return encoder_fields(raw) | {"max_positions": int(raw["max_position_embeddings"]) - 2, "position_offset": 2}


@encoder_family("mpnet", _mpnet_fields, MPNet="mpnet")
class MPNetEncoder(Encoder):
    """Encoder whose scores also depend on the distance of two tokens, in all layers."""

    PREFIX = "mpnet"
    LAYOUT = Layout(
        qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        out="attention.attn.o",
        attention_norm="attention.LayerNorm",
    )

    def __init__(self, builder: Builder, device: torch.device | str) -> None:
        super().__init__(builder, device)
        config, own = builder.config, builder.shard.heads(builder.config)
        table = builder.tensor("mpnet.encoder.relative_attention_bias.weight", _BUCKETS, config.num_heads)
        # Of the key's position less the query's, the largest first.
        distances = torch.arange(config.max_positions - 1, -config.max_positions, -1)
        added = table[:, own.start : own.stop].t()[:, _bucket(distances).to(table.device)]
        self.by_distance = by_distance(added, config.head_dim**-0.5)


def _bucket(distances: torch.Tensor) -> torch.Tensor:
    """Return the bucket of each distance (T5): half of them for keys behind the query, the farther the wider."""
    far, half = distances.abs(), _BUCKETS // 2
    wide = torch.log(far.clamp(min=1).float() / _EXACT) / math.log(_FARTHEST / _EXACT) * (half - _EXACT)
    return torch.where(far < _EXACT, far, (_EXACT + wide.long()).clamp(max=half - 1)) + half * (distances > 0)
