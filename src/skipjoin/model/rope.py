from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SCALINGS = ("default", "linear", "llama3", "yarn", "longrope")
# Far above the context of any model.
MAX_POSITIONS = 1 << 30
# More than the rounding error of a factor that is a quotient of two lengths.
_ROUNDING = 1e-6
_VARIABLE = "its frequencies depend on the length of a request, so cached KV would not stay valid as the request grows"
_REASONS = {"dynamic": f"with alpha, {_VARIABLE}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSettings:
    """Rotary embedding of the first `rotary_dim` values of each head, value i paired with value i + rotary_dim / 2.

    `factors` divide the frequency of each pair (LongRoPE, GGUF). With `query_beta`, queries at position p are
    multiplied by 1 + query_beta * log(1 + p // original_max_positions).
    """

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
    factors: tuple[float, ...] = ()
    query_beta: float = 0.0

    def context(self, max_positions: int) -> int:
        """Return the context length of a model with this `max_position_embeddings`.

        Linear and YaRN scaling extend the original length, whether or not config.json does; Llama 3 states the result.
        LongRoPE changes its factors beyond the original length, which would invalidate cached KV.
        """
        if self.scaling == "longrope" and self.original_max_positions:
            return min(max_positions, self.original_max_positions)
        if self.scaling not in ("linear", "yarn"):
            return max_positions
        extended = self.factor * self.original_max_positions
        if extended > MAX_POSITIONS:
            raise ValueError(
                f"factor in config.json must be at most {MAX_POSITIONS / self.original_max_positions:g} for a "
                f"length of {self.original_max_positions} tokens without it, got {self.factor:g}"
            )
        return int(extended + _ROUNDING)


def parse_rope(raw: Mapping[str, Any], head_dim: int, max_positions: int, default_share: float) -> RopeSettings:
    """Parse the rotary settings of a config.json, in the older (`rope_scaling`) or newer form."""
    older, newer = _object(raw, "rope_scaling"), _object(raw, "rope_parameters")
    # Model cards say to add `rope_scaling`, also to a file in the newer form.
    nested = {**newer, **older}
    # Files of GPT-NeoX may have both names, of which its code reads the older ones.
    given = (("rope_theta", nested), ("rotary_emb_base", raw), ("rope_theta", raw))
    name, theta = next(((name, of[name]) for name, of in given if of.get(name) is not None), ("rope_theta", 10000.0))
    theta = _bounded(name, theta, low=1.0)
    share = nested.get("partial_rotary_factor", raw.get("rotary_pct", raw.get("partial_rotary_factor")))
    rotary_dim = int(head_dim * _bounded("partial_rotary_factor", default_share if share is None else share, high=1.0))
    kinds = (of.get(name) for of in (older, newer) for name in ("rope_type", "type"))
    scaling = str(next(filter(None, kinds), "default"))
    # The positions of text are the same in all sections of models that see.
    scaling = {"su": "longrope", "mrope": "default"}.get(scaling, scaling)
    if scaling == "factors":
        return RopeSettings(
            theta=theta, rotary_dim=rotary_dim, scaling=scaling, factors=_factors(nested.get("factors"), rotary_dim)
        )
    if scaling == "dynamic" and nested.get("alpha") is None:
        scaling = "default"  # up to max_position_embeddings, where the context ends
    if scaling not in SCALINGS:
        reason = f": {_REASONS[scaling]}" if scaling in _REASONS else ""
        raise ValueError(f"RoPE scaling {scaling!r} is not supported; supported are {', '.join(SCALINGS)}{reason}")
    beta = _bounded("llama_4_scaling_beta", nested.get("llama_4_scaling_beta") or 0.0, low=0.0)
    settings: dict[str, Any] = {"theta": theta, "rotary_dim": rotary_dim, "scaling": scaling, "query_beta": beta}
    if scaling == "default" and not beta:
        return RopeSettings(**settings)
    name = "original_max_position_embeddings"
    original = int(_bounded(name, raw.get(name) or nested.get(name) or max_positions, low=1.0))
    if scaling == "default":
        return RopeSettings(**settings, original_max_positions=original)
    factor = nested.get("factor")
    if factor is None and scaling in ("yarn", "longrope"):
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
    if scaling == "longrope":
        settings |= _longrope(nested, factor, original, rotary_dim)
    if scaling == "yarn":
        settings |= {
            "beta_fast": _bounded("beta_fast", nested.get("beta_fast") or 32),
            "beta_slow": _bounded("beta_slow", nested.get("beta_slow") or 1),
            "truncate": bool(nested.get("truncate", True)),
            "attention_factor": _yarn_attention_factor(nested, factor),
        }
    return RopeSettings(**settings)


def _longrope(nested: Mapping[str, Any], factor: float, original: int, rotary_dim: int) -> dict[str, Any]:
    given = nested.get("attention_factor")
    if given is None:
        given = 1.0 if factor <= 1 or original == 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    found: dict[str, Any] = {"attention_factor": _bounded("attention_factor", given)}
    if nested.get("short_factor") is None:
        return found | {"factors": _factors(nested.get("long_factor"), rotary_dim), "original_max_positions": 0}
    return found | {"factors": _factors(nested["short_factor"], rotary_dim)}


def _factors(value: Any, rotary_dim: int) -> tuple[float, ...]:
    if not isinstance(value, list) or len(value) != rotary_dim // 2:
        raise ValueError(f"RoPE must have a factor for each of {rotary_dim // 2} pairs, got {value!r:.80}")
    return tuple(_bounded("factors", factor) for factor in value)


def _object(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = raw.get(name) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} in config.json must be an object, got {value!r:.80}")
    if nested := [key for key, of in value.items() if isinstance(of, Mapping)]:
        raise ValueError(
            f"{name} in config.json must be the same for all layers, got separate ones: {', '.join(nested)}"
        )
    return value


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
