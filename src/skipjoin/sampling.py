"""Sampling parameters with their bounds. Standard library only, so that the API process need not import torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from types import NoneType
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from skipjoin.pooling import Pooling
from skipjoin.structured_output import StructuredOutput

# Maximum number of characters.
MAX_SALT = 256
# The search for a stop string takes time proportional to its length at each token.
MAX_STOP_LENGTH = 512
INT32 = 2**31 - 1
# Seeds are serialized as signed 64-bit integers.
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1
# Fields of bodies with which endpoints set these parameters.
_LIMITS = ("max_tokens", "max_completion_tokens")
_SCORES = ("logprobs", "top_logprobs")
_CONSTRAINTS = ("response_format", "structured_outputs")
# Asks for no seed, as in vLLM. Clients such as SillyTavern send it by default.
NO_SEED = -1


@dataclass(frozen=True, slots=True)
class Parameter:
    """Row of the table of sampling parameters, from which checks, fields of bodies and the reference follow.

    Attributes:
        low, high: Bounds of a number, or of each value of a mapping; `is_above` excludes the lower one.
        means: Pairs of another server's value and its meaning here.
        own: Endpoints declare and convert these fields themselves. Otherwise all bodies have a field of this name.
        is_of_model: A model's generation_config.json may set the default.
    """

    help: str
    low: float | None = None
    high: float | None = None
    is_above: bool = False
    max_items: int | None = None
    means: tuple[tuple[Any, Any], ...] = ()
    own: tuple[str, ...] = ()
    is_openai: bool = False
    is_of_model: bool = False

    @property
    def bounds(self) -> str:
        """Interval, without bounds that only reject nonsense."""
        if self.low is None:
            return ""
        if self.high is not None and self.high >= INT32:
            return "64 bits" if self.low == SEED_MIN else f"at least {self.low}"
        return f"in {'(' if self.is_above else '['}{self.low}, {self.high}]"


class ParameterError(ValueError):
    """Parameter value outside its bounds. `param` is the public name of the field."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(ParameterError):
    """A prompt, or a prompt with `max_tokens`, exceeds the context.

    Clients recognize the error by its first words, OpenAI's, and then shorten the prompt.
    """

    def __init__(self, param: str, context: int, asked: str, remedy: str) -> None:
        limit = f"This model's maximum context length is {context} tokens"
        super().__init__(param, f"{limit}. However, {asked}. Please reduce the length of {remedy}")

    @classmethod
    def of_prompt(cls, param: str, context: int, found: object) -> ContextLengthError:
        what = _prompt_name(param)
        # LangChain knows the error of a client that hides its code by Anthropic's words, "prompt is too long".
        remedy = f"the {what}. The prompt is too long: {param} must have at most {context - 1} tokens to generate one"
        return cls(param, context, f"your {what} resulted in {found} tokens", remedy)

    @classmethod
    def of_input(cls, param: str, context: int, found: object) -> ContextLengthError:
        remedy = f"the input: {param} must have at most {context} tokens, special tokens included"
        return cls(param, context, f"your input resulted in {found} tokens", remedy)

    @classmethod
    def of_output(
        cls, name: str, asked: int, context: int, prompt_tokens: int, param: str = "prompt"
    ) -> ContextLengthError:
        what = _prompt_name(param)
        total = f"{prompt_tokens + asked} tokens ({prompt_tokens} in the {what}, {asked} in the completion)"
        remedy = f"the {what} or completion: {name} must be at most {context - prompt_tokens}, got {asked}"
        return cls(name, context, f"you requested {total}", remedy)


def check_ids(name: str, ids: Collection[int], vocab_size: int) -> None:
    if ids and not 0 <= (wrong := min(ids)) <= (largest := max(ids)) < vocab_size:
        wrong = wrong if wrong < 0 else largest
        raise ParameterError(name, f"{name} must be token ids in [0, {vocab_size - 1}], got {wrong}")


def _prompt_name(param: str) -> str:
    return "messages" if param == "messages" else "prompt"


def _check(name: str, kind: Any, value: Any, parameter: Parameter) -> Any:
    item = get_args(kind)[0] if get_origin(kind) is tuple else kind
    if get_origin(kind) is dict:
        _check_count(name, value, parameter, "tokens")
        for token, number in value.items():
            _integer(name, token, 0, INT32)
            _number(name, number, parameter)
    elif item is not kind:
        what = ("strings", "a string or a list of strings") if item is str else ("ids", "a list of ids")
        value = _several(name, what[1], value)
        _check_count(name, value, parameter, what[0])
        if item is str and any(not isinstance(text, str) or not text for text in value):
            raise ParameterError(name, f"{name} must be non-empty strings")
        for token in value if item is int else ():
            _integer(name, token, 0, INT32)
    elif kind is float:
        _number(name, value, parameter)
    elif kind is int:
        _integer(name, value, parameter.low, parameter.high)
    elif not isinstance(value, kind):
        raise ParameterError(name, f"{name} must be a {kind.__name__}, got {value!r}")
    return value


def _number(name: str, value: Any, parameter: Parameter) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ParameterError(name, f"{name} must be a finite number, got {value!r}")
    low, high = parameter.low, parameter.high
    if low is not None and high is not None and not (low <= value <= high and (value > low or not parameter.is_above)):
        raise ParameterError(name, f"{name} must be {parameter.bounds}, got {value}")


def _integer(name: str, value: Any, low: float | None, high: float | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ParameterError(name, f"{name} must be an integer, got {value!r}")
    if low is not None and high is not None and not low <= value <= high:
        raise ParameterError(name, f"{name} must be in [{low}, {high}], got {value}")


def _several(name: str, kind: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, str):
        return (value,)
    if value is None or isinstance(value, list | tuple):
        return tuple(value or ())
    raise ParameterError(name, f"{name} must be {kind}, got {value!r}")


def _check_count(name: str, value: Collection[Any], parameter: Parameter, what: str) -> None:
    if parameter.max_items is not None and len(value) > parameter.max_items:
        raise ParameterError(name, f"{name} takes at most {parameter.max_items} {what}, got {len(value)}")


@dataclass(frozen=True, slots=True)
class BadWords:
    """Sequences of token ids of which the last one is banned."""

    sequences: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingBudget:
    """Bound of the reasoning, after which its closing token follows. If `is_open`, the prompt has `opening`."""

    tokens: int
    opening: tuple[int, ...]
    closing: int
    is_open: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters and stop conditions of one request: the table of all parameters.

    Raises:
        ParameterError: If a value is outside its bounds.

    Example:
        >>> SamplingParams(temperature=0.8, stop="END").stop
        ('END',)
        >>> SamplingParams(temperature=3)
        Traceback (most recent call last):
        skipjoin.sampling.ParameterError: temperature must be in [0, 2], got 3
    """

    max_tokens: Annotated[
        int | None,
        Parameter("Maximum number of tokens; None: the rest of the context.", 1, INT32, own=_LIMITS, is_openai=True),
    ] = 16
    min_tokens: Annotated[int, Parameter("Minimum number of tokens before the output can end.", 0, INT32)] = 0
    temperature: Annotated[float, Parameter("0 is greedy.", 0, 2, is_openai=True, is_of_model=True)] = 1.0
    top_p: Annotated[
        float,
        Parameter("Total probability kept, after top_k.", 0, 1, is_above=True, is_openai=True, is_of_model=True),
    ] = 1.0
    top_k: Annotated[
        int, Parameter("Number of tokens kept; 0 and -1 keep all.", 0, INT32, means=((-1, 0),), is_of_model=True)
    ] = 0
    min_p: Annotated[
        float, Parameter("Least probability relative to the likeliest token, after top_p.", 0, 1, is_of_model=True)
    ] = 0.0
    presence_penalty: Annotated[
        float, Parameter("Subtracted from the logits of generated tokens.", -2, 2, is_openai=True)
    ] = 0.0
    frequency_penalty: Annotated[
        float, Parameter("The same, times how often each was generated.", -2, 2, is_openai=True)
    ] = 0.0
    # Dividing logits by a smaller penalty could overflow float32.
    repetition_penalty: Annotated[
        float,
        Parameter(
            "Divides positive, multiplies negative logits of tokens in prompt or output.", 0.01, 10, is_of_model=True
        ),
    ] = 1.0
    seed: Annotated[
        int | None,
        Parameter(
            "The same seed gives the same tokens, whatever else runs. -1 is none.",
            SEED_MIN,
            SEED_MAX,
            means=((NO_SEED, None),),
            is_openai=True,
        ),
    ] = None
    stop: Annotated[
        tuple[str, ...], Parameter("Strings that finish the output and are not returned.", max_items=16, is_openai=True)
    ] = ()
    stop_token_ids: Annotated[tuple[int, ...], Parameter("Tokens that finish the output.", max_items=128)] = ()
    ignore_eos: Annotated[bool, Parameter("Continue after end-of-sequence.")] = False
    logit_bias: Annotated[
        dict[int, float],
        Parameter("Added to the logit of each token id.", -100, 100, max_items=300, is_openai=True),
    ] = field(default_factory=dict)
    logprobs: Annotated[
        int | None,
        Parameter(
            "Alternatives reported with log-probabilities; None reports none.", 0, 20, own=_SCORES, is_openai=True
        ),
    ] = None
    prompt_logprobs: Annotated[
        int | None, Parameter("The same for prompt tokens.", 0, 20, own=("echo", "prompt_logprobs"))
    ] = None
    # A grammar comes before both of these.
    allowed_token_ids: Annotated[
        tuple[int, ...], Parameter("Tokens that the output may have; none: all.", max_items=16_384)
    ] = ()
    bad_words: Annotated[BadWords | None, Parameter("Words that the output must not have.", own=("bad_words",))] = None
    thinking_budget: Annotated[
        ThinkingBudget | None, Parameter("Bound of the reasoning.", own=("thinking_token_budget",))
    ] = None
    # The output ends only where the grammar may end, whatever ignore_eos and min_tokens are.
    structured_outputs: Annotated[
        StructuredOutput | None, Parameter("Constraint on the output.", own=_CONSTRAINTS, is_openai=True)
    ] = None
    pooling: Annotated[
        Pooling | None, Parameter("What a model of vectors returns in place of a token.", own=("dimensions",))
    ] = None

    def __post_init__(self) -> None:
        for name, row in parameters_of(type(self)).items():
            value = given = getattr(self, name)
            if value is row.default:
                continue
            for other, meant in row.parameter.means:
                value = meant if value == other and type(value) is type(other) else value
            if value is not None or not row.is_optional:
                value = _check(name, row.kind, value, row.parameter)
            if value is not given:
                object.__setattr__(self, name, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError(
                "min_tokens",
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}",
            )

    def resolved(self, room: int) -> SamplingParams:
        """Return the parameters with a number as `max_tokens`, by default `room`, the rest of the context."""
        if self.max_tokens is not None:
            return self
        return replace(self, max_tokens=room, min_tokens=min(self.min_tokens, room))

    def check_ids(self, vocab_size: int) -> None:
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            check_ids(name, getattr(self, name), vocab_size)

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


def pooled(pooling: Pooling) -> SamplingParams:
    """Return the parameters of a request of a vector, which counts as one token."""
    return SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, seed=0, pooling=pooling)


class Row(NamedTuple):
    """Field of `SamplingParams`. `kind` is its type without None."""

    kind: Any
    is_optional: bool
    default: Any
    parameter: Parameter


def parameters_of(params: type[SamplingParams]) -> Mapping[str, Row]:
    if params not in _FOUND:
        _FOUND[params] = _find_rows(params)
    return _FOUND[params]


_FOUND: dict[type, Mapping[str, Row]] = {}


def _find_rows(params: type[SamplingParams]) -> Mapping[str, Row]:
    found, hints = {}, get_type_hints(params, include_extras=True)
    for attribute in fields(params):
        kind, parameter = get_args(hints[attribute.name])
        members = [member for member in get_args(kind) if member is not NoneType]
        is_optional = NoneType in get_args(kind)
        default = attribute.default if attribute.default_factory is MISSING else attribute.default_factory()
        found[attribute.name] = Row(members[0] if is_optional else kind, is_optional, default, parameter)
    return found


class TokenLogprob(NamedTuple):
    """Token and its log-probability.

    Attributes:
        logprob: Natural logarithm in the model's unmodified distribution; None for the first prompt token.
        top: Most likely tokens at that position, best first.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


class TokenDetail(NamedTuple):
    """Log-probabilities reported with a generated token, and with a request's first one those of the prompt.

    `vector` is little-endian float32, in place of the token if the request has `pooling`.
    """

    chosen: TokenLogprob
    prompt: tuple[TokenLogprob, ...] = ()
    vector: bytes = b""
