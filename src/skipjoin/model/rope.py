from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SCALINGS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSettings:
    """Rotary embedding of the first `rotary_dim` values of each head, value i paired with value i + rotary_dim / 2."""

    theta: float
    rotary_dim: int
    scaling: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    def inverse_frequencies(self) -> list[float]:
        """Return the radians per position of each pair."""
        plain = [self.theta ** (-2 * i / self.rotary_dim) for i in range(self.rotary_dim // 2)]
        if self.scaling == "linear":
            return [f / self.factor for f in plain]
        if self.scaling == "llama3":
            return [self._llama3(f) for f in plain]
        if self.scaling == "yarn":
            return self._yarn(plain)
        return plain

    def _llama3(self, frequency: float) -> float:
        turns = self.original_max_positions * frequency / (2 * math.pi)
        if turns > self.high_freq_factor:
            return frequency
        if turns < self.low_freq_factor:
            return frequency / self.factor
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return (1 - keep) * frequency / self.factor + keep * frequency

    def _yarn(self, plain: list[float]) -> list[float]:
        def pair_with_turns(turns: float) -> float:
            wave = self.original_max_positions / (turns * 2 * math.pi)
            return self.rotary_dim * math.log(wave) / (2 * math.log(self.theta))

        low, high = pair_with_turns(self.beta_fast), pair_with_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.rotary_dim - 1)
        width = (high - low) or 0.001  # a ramp of width 0 would divide by zero
        stretched = [min(max((i - low) / width, 0.0), 1.0) for i in range(len(plain))]
        return [f / self.factor * s + f * (1 - s) for f, s in zip(plain, stretched, strict=True)]


def parse_rope(raw: Mapping[str, Any], head_dim: int, max_positions: int, default_share: float) -> RopeSettings:
    """Parse the rotary settings of a config.json, in the older (`rope_theta`, `rope_scaling`) or newer form.

    Raises:
        ValueError: If a scaling is not in `SCALINGS` or a number is out of bounds.
        KeyError: If a scaling lacks a parameter.
    """
    nested = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    given = (("rope_theta", nested), ("rope_theta", raw), ("rotary_emb_base", raw))
    name, theta = next(((name, of[name]) for name, of in given if of.get(name) is not None), ("rope_theta", 10000.0))
    theta = _bounded(name, theta, low=1.0)
    share = nested.get("partial_rotary_factor", raw.get("partial_rotary_factor", raw.get("rotary_pct")))
    rotary_dim = int(head_dim * _bounded("partial_rotary_factor", default_share if share is None else share, high=1.0))
    scaling = str(nested.get("rope_type") or nested.get("type") or "default")
    if scaling not in SCALINGS:
        raise ValueError(f"RoPE scaling {scaling!r} is not supported; supported are {', '.join(SCALINGS)}")
    settings: dict[str, Any] = {"theta": theta, "rotary_dim": rotary_dim, "scaling": scaling}
    if scaling == "default":
        return RopeSettings(**settings)
    name = "original_max_position_embeddings"
    original = int(_bounded(name, nested.get(name) or max_positions, low=1.0))
    factor = nested.get("factor")
    if factor is None and scaling == "yarn":
        factor = max_positions / original
    factor = _bounded("factor", nested["factor"] if factor is None else factor)
    settings |= {"factor": factor, "original_max_positions": original}
    if scaling == "llama3":
        for name in ("low_freq_factor", "high_freq_factor"):
            settings[name] = _bounded(name, nested[name])
        if settings["low_freq_factor"] >= settings["high_freq_factor"]:
            raise ValueError(
                f"low_freq_factor in config.json must be below high_freq_factor, which is "
                f"{settings['high_freq_factor']:g}, got {settings['low_freq_factor']:g}"
            )
    if scaling == "yarn":
        settings |= {
            "beta_fast": _bounded("beta_fast", nested.get("beta_fast") or 32),
            "beta_slow": _bounded("beta_slow", nested.get("beta_slow") or 1),
            "truncate": bool(nested.get("truncate", True)),
            "attention_factor": _yarn_attention_factor(nested, factor),
        }
    return RopeSettings(**settings)


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _bounded(name: str, value: Any, *, low: float | None = None, high: float = math.inf) -> float:
    if not (is_number(value) and (value > 0 if low is None else low <= value) and value <= high):
        bounds = "above 0" if low is None else f"of at least {low:g}"
        most = "" if high == math.inf else f" and at most {high:g}"
        raise ValueError(f"{name} in config.json must be a finite number {bounds}{most}, got {value!r:.80}")
    return float(value)


def _yarn_attention_factor(nested: Mapping[str, Any], factor: float) -> float:
    if nested.get("attention_factor") is not None:
        return _bounded("attention_factor", nested["attention_factor"])

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if nested.get("mscale") and nested.get("mscale_all_dim"):
        mscale, all_dim = (_bounded(name, nested[name]) for name in ("mscale", "mscale_all_dim"))
        return scale(mscale) / scale(all_dim)
    return scale(1.0)
