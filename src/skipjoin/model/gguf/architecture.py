from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import torch

# Tensors without a suffix.
_BARE = ("ssm_a", "ssm_d", "ffn_gate_inp.scale", "ffn_down_exps.scale")
# Tensors of a delta rule whose rows are values' heads.
_OF_VALUES = ("attn_qkv", "attn_gate", "ssm_conv1d", "ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
QKV = frozenset({"attn_q", "attn_k", "attn_v"})
# Queries, keys and values in one tensor, as some files have those of models whose checkpoints have three.
JOINED_QKV = "attn_qkv"


class Recurrence(NamedTuple):
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int


class Heads(NamedTuple):
    queries: int
    keys: int
    states: Recurrence | None = None


class Architecture(NamedTuple):
    """How files of one `general.architecture` store a model.

    Attributes:
        layers: Names of tensors in a layer by those in checkpoints, several if their rows follow one another in one;
            `outer` has those outside.
        epsilon: Names of the norms' epsilon in config.json and in the metadata.
        biases: Tensors of a layer whose biases come together, by the field of config.json that says so.
        fixed: Fields of config.json that all models have.
        numbers: Other fields, and their names in the metadata; `yarn` and `yarn_numbers` are those of YaRN.
        has_windows: Which layers have a sliding window follows from the architecture, or stands in the metadata.
        state_kind: Name in config.json of layers that have no KV; files say so by 0 heads of keys and values.
        norm_offset: What the file's weights of norms have been increased by.
        has_paired_rows: Values that are rotated together are neighbors in heads.
        has_joined_heads: Rows of a projection are all queries, then all keys and values, not those of each head.
        has_tiled_values: Heads of a recurrence's values are ordered by their number at their key, and then by the key.
        has_layer_heads: Heads and rotary positions of layers with a window differ from those of others.
        has_logistic_scores: Scores of experts are logistic functions of logits.
        has_alternating_gates: Rows of experts' gates and of what they gate alternate in checkpoints.
    """

    name: str
    layers: Mapping[str, str | tuple[str, ...]]
    epsilon: tuple[str, str]
    biases: Mapping[str, frozenset[str]]
    always_biased: frozenset[str] = frozenset()
    prefix: str = "model."
    outer: Mapping[str, str] = OUTER
    fixed: Mapping[str, Any] = {}
    numbers: Mapping[str, str] = {}
    yarn: Mapping[str, Any] = {}
    yarn_numbers: Mapping[str, str] = {}
    has_windows: bool = False
    state_kind: str = ""
    norm_offset: float = 0.0
    has_paired_rows: bool = False
    has_joined_heads: bool = False
    has_tiled_values: bool = False
    has_alternating_gates: bool = False
    has_layer_heads: bool = False
    has_logistic_scores: bool = False

    @property
    def parts(self) -> frozenset[str]:
        named = self.layers.values()
        return frozenset(part for parts in named for part in ((parts,) if isinstance(parts, str) else parts))

    def stored_names(self, name: str) -> tuple[str, ...]:
        """Return the names in a file of the tensors that a checkpoint has as `name`."""
        base, _, kind = name.rpartition(".")
        if kind not in ("weight", "bias"):
            base, kind = (name.removesuffix("_bias"), "bias") if name.endswith("_bias") else (name, "weight")
        if base in self.outer:
            return (f"{self.outer[base]}.{kind}",)
        _, index, rest = _EXPERT.sub(".experts.", base).removeprefix(self.prefix).split(".", 2)
        parts = self.layers[rest]
        named = (parts,) if isinstance(parts, str) else parts
        return tuple(f"blk.{index}.{part}" if part in _BARE else f"blk.{index}.{part}.{kind}" for part in named)

    @staticmethod
    def expert(name: str) -> int | None:
        """Return the expert of a checkpoint's tensor, which is part of one tensor in a file."""
        found = _EXPERT.search(name)
        return None if found is None else int(found[1])

    def order(self, stored_names: tuple[str, ...], rows: int, heads: Heads) -> np.ndarray:
        import numpy as np  # noqa: PLC0415 (programs that read settings only need it not)

        part, plain = _part(stored_names[0]), np.arange(rows)
        if self.has_paired_rows and part in ("attn_q", "attn_k"):
            count = heads.queries if part == "attn_q" else heads.keys
            return plain.reshape(count, -1, 2).swapaxes(1, 2).reshape(rows)
        if self.has_joined_heads and part == "attn_qkv":
            return plain.reshape(3, heads.queries, -1).swapaxes(0, 1).reshape(rows)
        if self.has_tiled_values and part in _OF_VALUES and (of := heads.states) is not None:
            first = 2 * of.key_heads * of.key_dim if part in ("attn_qkv", "ssm_conv1d") else 0
            return np.concatenate([plain[:first], first + self._tiled(rows - first, of)])
        if len(stored_names) == 2 and part == "attn_qkv" and (of := heads.states) is not None:
            return _by_key_head(of)
        if self.has_alternating_gates and part == "ffn_gate_exps":
            return plain.reshape(2, -1).T.reshape(rows)
        return plain

    def columns(self, stored_names: tuple[str, ...], columns: int, heads: Heads) -> np.ndarray | None:
        """Return which column of a file each column of a checkpoint's tensor is, or None if they agree."""
        if self.has_tiled_values and _part(stored_names[0]) == "ssm_out" and heads.states is not None:
            return self._tiled(columns, heads.states)
        return None

    @staticmethod
    def _tiled(size: int, of: Recurrence) -> np.ndarray:
        import numpy as np  # noqa: PLC0415

        return np.arange(size).reshape(of.heads // of.key_heads, of.key_heads, -1).swapaxes(0, 1).reshape(size)

    def is_bias_of_experts(self, name: str) -> bool:
        return name.endswith("_bias") and self.stored_names(name)[0].endswith("_exps.bias")

    def original(self, stored_name: str, vector: torch.Tensor) -> torch.Tensor:
        if stored_name.endswith(".ssm_a"):
            return (-vector).log()
        is_weight = "norm" in stored_name and "ssm_norm" not in stored_name and not stored_name.endswith(".bias")
        return vector - self.norm_offset if self.norm_offset and is_weight else vector


def _part(stored_name: str) -> str:
    return stored_name.split(".")[2] if stored_name.startswith("blk.") else stored_name


def _by_key_head(of: Recurrence) -> np.ndarray:
    import numpy as np  # noqa: PLC0415

    values = of.heads // of.key_heads * of.value_dim
    parts, first = [], 0
    for size in (of.key_dim, of.key_dim, values, values):
        parts.append(first + np.arange(of.key_heads * size).reshape(of.key_heads, size))
        first += of.key_heads * size
    return np.concatenate(parts, axis=1).flatten()
