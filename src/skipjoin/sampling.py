"""Sampling parameters and stop conditions of a request, with their bounds.

Uses the standard library only, so that the API process and tests can import it without torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from skipjoin.structured_output import StructuredOutput

MAX_STOP_STRINGS = 16
MAX_STOP_TOKENS = 128
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
# Maximum number of characters.
MAX_SALT = 256
# Seeds are serialized as signed 64-bit integers.
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1
# Asks for no seed, as in vLLM. Clients such as SillyTavern send it by default.
NO_SEED = -1
# Dividing logits by a smaller penalty could overflow float32.
MIN_REPETITION_PENALTY = 0.01


class ParameterError(ValueError):
    """Parameter value outside its bounds. `param` is the public name of the field."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(ParameterError):
    """A prompt, or a prompt with `max_tokens`, exceeds the context.

    The message begins as OpenAI's, because clients recognize the error by these words and then shorten the prompt.
    """

    def __init__(self, param: str, context: int, asked: str, remedy: str) -> None:
        limit = f"This model's maximum context length is {context} tokens"
        super().__init__(param, f"{limit}. However, {asked}. Please reduce the length of {remedy}")

    @classmethod
    def of_prompt(cls, param: str, context: int, found: object) -> ContextLengthError:
        what = _prompt_name(param)
        remedy = f"the {what}: {param} must have at most {context - 1} tokens, so that one can be generated"
        return cls(param, context, f"your {what} resulted in {found} tokens", remedy)

    @classmethod
    def of_output(
        cls, name: str, asked: int, context: int, prompt_tokens: int, param: str = "prompt"
    ) -> ContextLengthError:
        what = _prompt_name(param)
        total = f"{prompt_tokens + asked} tokens ({prompt_tokens} in the {what}, {asked} in the completion)"
        remedy = f"the {what} or completion: {name} must be at most {context - prompt_tokens}, got {asked}"
        return cls(name, context, f"you requested {total}", remedy)


def check_ids(name: str, ids: Collection[int], vocab_size: int) -> None:
    """Raise `ParameterError` unless all token ids are in [0, vocab_size)."""
    if ids and not 0 <= (wrong := min(ids)) <= (largest := max(ids)) < vocab_size:
        wrong = wrong if wrong < 0 else largest
        raise ParameterError(name, f"{name} must be token ids in [0, {vocab_size - 1}], got {wrong}")


def _prompt_name(param: str) -> str:
    return "messages" if param == "messages" else "prompt"


def _number(name: str, value: Any, low: float, high: float, *, above: bool = False) -> None:
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
    if isinstance(value, str):
        return (value,)
    if value is None or isinstance(value, list | tuple):
        return tuple(value or ())
    raise ParameterError(name, f"{name} must be {kind}, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters and stop conditions of one request.

    Attributes:
        max_tokens: Maximum number of tokens to generate; None allows as many as fit in the context. See `resolved`.
        min_tokens: Minimum number of tokens before end-of-sequence and stop tokens can be sampled.
        temperature: 0, and values very close to it, mean greedy sampling.
        top_p, top_k, min_p: Filters, applied in that order. A `top_k` of 0 keeps all tokens.
        presence_penalty, frequency_penalty: Subtracted for generated tokens (OpenAI's definition).
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt or output.
        seed: The same seed gives the same tokens, regardless of the rest of the batch. None or -1 draws one.
        stop: Strings that finish the output and are not returned; a single string is accepted.
        stop_token_ids: Tokens that finish the output.
        ignore_eos: Continue after end-of-sequence.
        logit_bias: Value added to the logit of each token id.
        logprobs: Number of alternatives reported with the chosen token's log-probability; None reports neither.
        prompt_logprobs: The same for prompt tokens.
        structured_outputs: Constraint on the output. The output ends only where the grammar may end, whatever
            `ignore_eos` and `min_tokens` are, and always where the grammar must end.

    Raises:
        ParameterError: If a value is outside its bounds.
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
    structured_outputs: StructuredOutput | None = None

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
            if self.seed == NO_SEED:
                object.__setattr__(self, "seed", None)
        self._check_stops()
        self._check_bias()
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                _integer(name, value, 0, MAX_LOGPROBS)
        if self.structured_outputs is not None and not isinstance(self.structured_outputs, StructuredOutput):
            raise ParameterError(
                "structured_outputs", f"structured_outputs must be a StructuredOutput, got {self.structured_outputs!r}"
            )

    def resolved(self, room: int) -> SamplingParams:
        """Return the parameters with a number as `max_tokens`, by default `room`, the rest of the context."""
        if self.max_tokens is not None:
            return self
        return replace(self, max_tokens=room, min_tokens=min(self.min_tokens, room))

    def check_ids(self, vocab_size: int) -> None:
        """Raise `ParameterError` for a token id beyond a model's vocabulary."""
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias)):
            check_ids(name, ids, vocab_size)

    def with_seed_of(self, copy: int) -> SamplingParams:
        """Return the parameters of one of several choices, with a reproducible seed of its own if there is a seed."""
        if self.seed is None or copy == 0:
            return self
        seed = SEED_MIN + (self.seed - SEED_MIN + copy) % 2**64
        return replace(self, seed=seed + 1 if self.seed < NO_SEED <= seed else seed)

    @property
    def output_limit(self) -> int:
        if self.max_tokens is None:
            raise ParameterError("max_tokens", "max_tokens must be a number, got None: call SamplingParams.resolved")
        return self.max_tokens

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


class TokenLogprob(NamedTuple):
    """Token and its log-probability.

    Attributes:
        logprob: Natural logarithm of the probability in the model's unmodified distribution; None for the first prompt
            token.
        top: Most likely tokens at that position with their log-probabilities, best first.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


class TokenDetail(NamedTuple):
    """Log-probabilities reported with a generated token.

    Attributes:
        prompt: Entries of the prompt tokens, with a request's first token only, if requested.
    """

    chosen: TokenLogprob
    prompt: tuple[TokenLogprob, ...] = ()
