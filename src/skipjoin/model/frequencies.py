from __future__ import annotations

import math

import torch

from skipjoin.model.rope import RopeSettings


def inverse_frequencies(rope: RopeSettings) -> torch.Tensor:
    """Return the radians per position of each pair.

    Each operation rounds to float32 in Hugging Face's order: at position 100,000, one rounding less turns a pair by up
    to 0.006.
    """
    turned = rope.theta ** (torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim)
    plain = 1.0 / turned
    if rope.scaling == "linear":
        return plain / rope.factor
    if rope.scaling == "longrope":
        return 1.0 / (torch.tensor(rope.factors) * turned)
    if rope.scaling == "factors":
        return plain / torch.tensor(rope.factors)
    if rope.scaling == "llama3":
        return _llama3(rope, plain)
    if rope.scaling == "yarn":
        kept = _kept(rope, len(plain))
        return 1.0 / (rope.factor * turned) * (1 - kept) + plain * kept
    return plain


def _llama3(rope: RopeSettings, plain: torch.Tensor) -> torch.Tensor:
    length, low, high = rope.original_max_positions, rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / plain
    keep = (length / wavelength - low) / (high - low)
    between = (1 - keep) * plain / rope.factor + keep * plain
    scaled = torch.where(wavelength > length / low, plain / rope.factor, between)
    return torch.where(wavelength < length / high, plain, scaled)


def _kept(rope: RopeSettings, pairs: int) -> torch.Tensor:
    def pair_with_turns(turns: float) -> float:
        wave = rope.original_max_positions / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(wave) / (2 * math.log(rope.theta))

    low, high = pair_with_turns(rope.beta_fast), pair_with_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    width = (high - low) or 0.001  # a ramp of width 0 would divide by zero
    return 1 - ((torch.arange(pairs, dtype=torch.float32) - low) / width).clamp(0, 1)
