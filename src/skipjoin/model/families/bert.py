"""BERT, RoBERTa and XLM-RoBERTa: encoders with learned positions, and layer norms after each part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from skipjoin.model.batch import PackedBatch
from skipjoin.model.config import ModelError, activation
from skipjoin.model.family import family
from skipjoin.model.layers import Builder, Embedding, LayerInputs


def attend_whole(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Sequence[int], scale: float
) -> torch.Tensor:
    """Attend from every token of a segment to every other; return [T, heads * head_dim].

    Segments run one by one, so that no padding is computed and a row's bits do not depend on the batch.

    Args:
        query: Shape [T, heads, head_dim]. Likewise `key` and `value`.
    """
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    each = zip(*(part.split(lengths) for part in (query, key, value, output)), strict=True)
    for *inputs, out in each:
        q, k, v = (part.transpose(0, 1)[None] for part in inputs)
        out.copy_(F.scaled_dot_product_attention(q, k, v, scale=scale)[0].transpose(0, 1))
    return output.flatten(1)


_OUTPUTS = ("Model", "ForMaskedLM", "ForSequenceClassification")
# Of missing entries: those of the configuration classes in transformers.
_DEFAULTS = {"max_position_embeddings": 512, "type_vocab_size": 2, "layer_norm_eps": 1e-12, "pad_token_id": 0}


def _fields(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    is_roberta = not architecture.startswith("Bert")
    raw = {**_DEFAULTS, **({"pad_token_id": 1} if is_roberta else {}), **raw}
    kind = raw.get("position_embedding_type") or "absolute"
    if kind != "absolute" or raw.get("is_decoder"):
        what = "is_decoder must be false" if raw.get("is_decoder") else f"positions must be absolute, got {kind!r:.80}"
        raise ModelError(f"config.json of this {architecture}: {what}")
    heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    positions = int(raw["max_position_embeddings"])
    return {
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "max_positions": positions - _offset(raw) if is_roberta else positions,
        "norm_eps": float(raw["layer_norm_eps"]),
        "tie_embeddings": True,
        "activation": activation(raw.get("hidden_act", "gelu")),
        "rope": None,
        "mlp_bias": True,
        "is_encoder": True,
        "type_vocab_size": int(raw["type_vocab_size"]),
        "position_offset": _offset(raw) if is_roberta else 0,
    }


def _offset(raw: Mapping[str, Any]) -> int:
    """Return the number of RoBERTa's first positions, which no token has."""
    return int(raw["pad_token_id"]) + 1


class Encoder:
    """Encoder whose tensors begin with `PREFIX`."""

    PREFIX: str
    EMBEDDING: str
    OUTPUT = ""

    def __init__(self, builder: Builder, device: torch.device | str) -> None:
        config, shard, name = builder.config, builder.shard, f"{self.PREFIX}.embeddings"
        self.embedding: Embedding | None = None
        if shard.is_first:
            self.embedding = builder.embedding(self.EMBEDDING)
            self._offset = config.position_offset
            stored = config.max_positions + self._offset
            self._positions = builder.tensor(f"{name}.position_embeddings.weight", stored, config.hidden_size)
            types = builder.tensor(f"{name}.token_type_embeddings.weight", config.type_vocab_size, config.hidden_size)
            # A model with one type has no other for the second text of a pair.
            self._types = types.expand(max(2, len(types)), -1) if len(types) == 1 else types
            self._norm = builder.layer_norm(f"{name}.LayerNorm")
        self._layers = [EncoderLayer(builder, index, self.PREFIX) for index in shard.layers(config)]

    def embed(self, batch: PackedBatch) -> torch.Tensor:
        assert self.embedding is not None  # on the first stage
        x = self.embedding(batch.token_ids)
        x = x + (self._types[0] if batch.types is None else F.embedding(batch.types, self._types))
        return self._norm(x + F.embedding(batch.positions + self._offset, self._positions))

    def advance(self, x: torch.Tensor, step: LayerInputs) -> torch.Tensor:
        for layer in self._layers:
            x = layer(x, step.batch)
        return x

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class EncoderLayer:
    def __init__(self, builder: Builder, index: int, prefix: str) -> None:
        config, shard, name = builder.config, builder.shard, f"{prefix}.encoder.layer.{index}"
        hidden, own, parts = config.hidden_size, shard.query_rows(config), ("query", "key", "value")
        self._heads, self._dim = len(shard.heads(config)), config.head_dim
        self._qkv = builder.linear(
            [f"{name}.attention.self.{part}" for part in parts], [hidden] * 3, hidden, True, rows=[own] * 3
        )
        self._out = builder.summed_linear(f"{name}.attention.output.dense", hidden, hidden, True, columns=own)
        self._norm = builder.layer_norm(f"{name}.attention.output.LayerNorm")
        self._up, self._down = builder.mlp(f"{name}.intermediate.dense", f"{name}.output.dense", config.activation)
        self._mlp_norm = builder.layer_norm(f"{name}.output.LayerNorm")

    def __call__(self, x: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        query, key, value = self._qkv(x).view(len(x), 3, self._heads, self._dim).unbind(1)
        attended = attend_whole(query, key, value, batch.lengths, self._dim**-0.5)
        x = self._out.add_to(attended, x, self._norm)
        return self._down.add_to(self._up(x), x, self._mlp_norm)


@family(
    "bert",
    architectures={f"Bert{output}": "bert" for output in _OUTPUTS},
    fields=_fields,
    prefix="bert.",
    sizes={"type_vocab_size": 1 << 10},
)
class BertEncoder(Encoder):
    PREFIX, EMBEDDING = "bert", "bert.embeddings.word_embeddings.weight"


@family(
    "roberta",
    architectures={
        f"{name}{output}": kind
        for name, kind in {"Roberta": "roberta", "XLMRoberta": "xlm-roberta"}.items()
        for output in _OUTPUTS
    },
    fields=_fields,
    prefix="roberta.",
    sizes={"type_vocab_size": 1 << 10},
)
class RobertaEncoder(Encoder):
    PREFIX, EMBEDDING = "roberta", "roberta.embeddings.word_embeddings.weight"
