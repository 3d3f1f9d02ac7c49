"""Phi-3 and Phi-4: as Llama, with projections in joined matrices and perhaps LongRoPE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skipjoin.model.builder import Builder
from skipjoin.model.families.gated import gated_fields, gated_layer
from skipjoin.model.families.rotary import RotaryDecoder
from skipjoin.model.family import family
from skipjoin.model.layers import SequentialLayer
from skipjoin.model.self_attention import Rotary


def _fields(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    fields = gated_fields({"rms_norm_eps": 1e-5, **raw, "attention_bias": False, "mlp_bias": False})
    return fields | {"windows": (int(raw.get("sliding_window") or 0),) * fields["num_layers"]}


@family("phi3", architectures={"Phi3ForCausalLM": "phi3"}, fields=_fields, prefix="model.")
class Phi3Decoder(RotaryDecoder):
    @staticmethod
    def layer(builder: Builder, index: int, rotary: Rotary | None) -> SequentialLayer:
        return gated_layer(builder, index, rotary, has_joined_projections=True, has_joined_gate=True)
