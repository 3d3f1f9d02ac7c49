"""Sampling and stopping rules: the values that a user may set, with their bounds.

Standard library only: the API process, the engine process and the tests share it without importing torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MAX_STOP_STRINGS = 16
MAX_STOP_TOKENS = 128
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
# Characters of a request's cache_salt.
MAX_SALT = 256
# Seeds travel as signed 64-bit integers.
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1
# Logits divided by it stay far within float32.
MIN_REPETITION_PENALTY = 0.01


class ParameterError(ValueError):
    """A value outside its bounds. param: the field's public name. The text names the bound."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def _number(name: str, value: Any, low: float, high: float, *, above: bool = False) -> None:
    """Refuse a value that is no finite number in [low, high], or in (low, high] with `above`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ParameterError(name, f"{name} must be a finite number, got {value!r}")
    if value > high or value < low or (above and value == low):
        opening = "(" if above else "["
        raise ParameterError(name, f"{name} must be in {opening}{low}, {high}], got {value}")


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ParameterError(name, f"{name} must be an integer, got {value!r}")
    if not low <= value <= high:
        raise ParameterError(name, f"{name} must be in [{low}, {high}], got {value}")


def _several(name: str, kind: str, value: Any) -> tuple[Any, ...]:
    """The elements of a list or tuple; a text is one element, and None is none."""
    if isinstance(value, str):
        return (value,)
    if value is None or isinstance(value, list | tuple):
        return tuple(value or ())
    raise ParameterError(name, f"{name} must be {kind}, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One request's sampling and stopping rules. Raises `ParameterError` on a value outside its bounds.

    max_tokens: most tokens to generate; None: as many as the context holds.
    min_tokens: end-of-sequence and stop tokens cannot be sampled before this many tokens.
    temperature: 0 is greedy, and in effect so is what is next to 0. top_p, top_k (0: all) and min_p filter what may be
    sampled, in that order.
    presence_penalty, frequency_penalty: subtracted for tokens already generated (OpenAI's definition).
    repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output.
    seed: the same seed gives the same tokens, whatever else runs; None: the engine draws one.
    stop: strings that end the output, not returned; one may be given as it is. stop_token_ids: tokens that end it.
    ignore_eos: continue after end-of-sequence. logit_bias: token id -> value added to its logit.
    logprobs: report the chosen token's log-probability and this many alternatives; None: report nothing.
    prompt_logprobs: the same for the tokens of the prompt.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError(
                "min_tokens",
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}",
            )
        _number("temperature", self.temperature, 0, 2)
        _number("top_p", self.top_p, 0, 1, above=True)
        _integer("top_k", self.top_k, 0, 2**31 - 1)
        _number("min_p", self.min_p, 0, 1)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        _number("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 10)
        if self.seed is not None:
            _integer("seed", self.seed, SEED_MIN, SEED_MAX)
        self._check_stops()
        self._check_bias()
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                _integer(name, value, 0, MAX_LOGPROBS)

    def _check_stops(self) -> None:
        object.__setattr__(self, "stop", _several("stop", "a string or a list of strings", self.stop))
        object.__setattr__(self, "stop_token_ids", _several("stop_token_ids", "a list of ids", self.stop_token_ids))
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ParameterError("stop", f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}")
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise ParameterError("stop", "stop must be non-empty strings")
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise ParameterError(
                "stop_token_ids",
                f"stop_token_ids takes at most {MAX_STOP_TOKENS} ids, got {len(self.stop_token_ids)}",
            )
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, 2**31 - 1)

    def _check_bias(self) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise ParameterError(
                "logit_bias", f"logit_bias takes at most {MAX_LOGIT_BIAS} tokens, got {len(self.logit_bias)}"
            )
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, 2**31 - 1)
            _number("logit_bias", bias, -100, 100)


class Scored(NamedTuple):
    """A token and its log-probability.

    logprob: natural logarithm of its probability under the model's unmodified distribution; None for the first
    token of a prompt. top: the likeliest tokens at that position with their log-probabilities, best first.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


class TokenDetail(NamedTuple):
    """The log-probabilities that are reported with a generated token, if its request asks for them.

    chosen: the token itself. prompt: with a request's first token, the tokens of its prompt, if it asked for them.
    """

    chosen: Scored
    prompt: tuple[Scored, ...] = ()
