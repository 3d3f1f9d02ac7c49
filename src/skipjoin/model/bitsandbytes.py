"""Weights of bitsandbytes: 4 bits with a table of numbers, or 8 bits with a scale per output.

A 4-bit matrix is stored flat, two codes per byte, the first in the high bits. Scales may be 8-bit codes themselves, of
differences from their mean.
"""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

import torch

from skipjoin.model.errors import ModelError
from skipjoin.model.groups import GROUP, GroupedMatrix
from skipjoin.model.safetensors_weights import FolderWeights

# Suffixes of tensors that only matrices of either kind have.
SCALES_4BIT, SCALES_8BIT = "weight.absmax", "SCB"
# Names of the tables of numbers, which end the name of the tensor with a matrix's settings.
_TABLES = ("nf4", "fp4")
# The largest code of 8 bits, whose number is the scale.
_MAX_CODE = 127


class Blocks(NamedTuple):
    """Weights `scale * values[code]` of codes [out, in]; `block` consecutive ones share a scale, across rows."""

    codes: torch.Tensor
    scales: torch.Tensor
    block: int
    values: torch.Tensor

    def grouped(self) -> GroupedMatrix | None:
        outputs, inputs = self.codes.shape
        if inputs % self.block or self.block % GROUP:
            return None
        values = tuple(self.values.tolist())
        return GroupedMatrix(self.codes, self.scales.view(outputs, -1), self.block, 4, values=values)

    def widened(self) -> torch.Tensor:
        numbers = self.values[self.codes.long()].flatten()
        return (numbers * self.scales.repeat_interleave(self.block)[: len(numbers)]).view(self.codes.shape)


def read_4bit(weights: FolderWeights, name: str, outputs: int, inputs: int) -> GroupedMatrix | Blocks:
    settings, count = _settings(weights, name), outputs * inputs
    if settings.get("shape") != [outputs, inputs]:
        raise ModelError(f"{name} has shape {settings.get('shape')!r:.40}, but config.json implies {[outputs, inputs]}")
    block = _size(settings, "blocksize", name)
    packed = weights.stored(f"{name}.weight", -(-count // 2), 1, types=("U8",))
    codes = torch.cat([packed >> 4, packed & 15], 1).flatten()[:count].view(outputs, inputs)
    values = weights.stored(f"{name}.weight.quant_map", 16, types=("F32",))
    found = Blocks(codes, _scales(weights, name, -(-count // block), settings), block, values)
    return found.grouped() or found


def read_8bit(weights: FolderWeights, name: str, outputs: int, inputs: int) -> GroupedMatrix:
    if weights.has(f"{name}.weight_format") and int(weights.stored(f"{name}.weight_format", types=("U8",))):
        raise ModelError(f"{name} has its rows in the order of a kind of card; only row by row can be read")
    codes = weights.stored(f"{name}.weight", outputs, inputs, types=("I8",))
    scales = weights.stored(f"{name}.{SCALES_8BIT}", outputs, types=("F32",)) / _MAX_CODE
    return GroupedMatrix(codes, scales[:, None], -(-inputs // GROUP) * GROUP, 8)


def _settings(weights: FolderWeights, name: str) -> dict[str, Any]:
    for table in _TABLES:
        where = f"{name}.weight.quant_state.bitsandbytes__{table}"
        if (shape := weights.shape_of(where)) is not None:
            try:
                found = json.loads(bytes(weights.stored(where, *shape, types=("U8",)).flatten().tolist()))
            except ValueError as error:
                raise ModelError(f"{where} is not JSON: {error}") from error
            if isinstance(found, dict):
                return found
    raise ModelError(f"{name} has no settings of bitsandbytes for {' or '.join(_TABLES)}")


def _scales(weights: FolderWeights, name: str, blocks: int, settings: dict[str, Any]) -> torch.Tensor:
    if not weights.has(f"{name}.weight.nested_absmax"):
        return weights.stored(f"{name}.{SCALES_4BIT}", blocks, types=("F32",))
    codes = weights.stored(f"{name}.{SCALES_4BIT}", blocks, types=("U8",))
    block, mean = _size(settings, "nested_blocksize", name), settings.get("nested_offset")
    if not isinstance(mean, float) or not math.isfinite(mean):
        raise ModelError(f"nested_offset of {name} must be a finite number, got {mean!r:.40}")
    values = weights.stored(f"{name}.weight.nested_quant_map", 256, types=("F32",))
    scales = weights.stored(f"{name}.weight.nested_absmax", -(-blocks // block), types=("F32",))
    return values[codes.long()] * scales.repeat_interleave(block)[:blocks] + mean


def _size(settings: dict[str, Any], key: str, name: str) -> int:
    found = settings.get(key)
    if type(found) is not int or found < 1:
        raise ModelError(f"{key} of {name} must be a positive integer, got {found!r:.40}")
    return found
