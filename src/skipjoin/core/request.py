from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from skipjoin.core.forecast import Forecast
from skipjoin.core.prefixes import Key, Prefix

NEVER = -(1 << 62)  # less than every plan id
UNLIMITED = sys.maxsize  # token limit of an unlimited reservation


class FinishReason(StrEnum):
    STOP = "stop"  # end-of-sequence or a stop token
    LENGTH = "length"  # max_tokens reached
    ABORT = "abort"  # cancelled by the caller
    DEADLINE = "deadline"  # deadline_s exceeded
    ERROR = "error"  # dropped by the executor


class ServiceClass(StrEnum):
    REAL_TIME = "real-time"  # served for latency
    BEST_EFFORT = "best-effort"  # served for throughput; uses spare capacity only


class Target(NamedTuple):
    """Soft latency objectives: time to first token, time per output token after it, job completion time."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf
    jct_s: float = math.inf

    def with_default(self, default: Target) -> Target:
        return Target(*(own if own < math.inf else other for own, other in zip(self, default, strict=True)))


NO_TARGET = Target()


class Trace(NamedTuple):
    parent: str  # W3C `traceparent`; an empty or invalid one starts a new trace
    request_id: str  # id by which the client knows the request
    response_id: str = ""
    operation: str = ""  # what is asked for, by OpenTelemetry's name


class ProgramId(NamedTuple):
    """Id of a program, such as an agent's run, whose calls wait for the results of earlier ones.

    Unless the client states the name, several programs may have it, and a call with a shorter prompt begins another
    one.
    """

    owner: str
    name: str
    is_stated: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    service: ServiceClass = ServiceClass.REAL_TIME
    is_urgent: bool = False  # runs before others of its service class
    priority: int = 0  # lower values run first among equal classes and urgency
    deadline_s: float | None = None  # seconds after arrival at which the request is ended
    target: Target = NO_TARGET
    client: str = ""
    cache_salt: str = ""  # only requests with equal salts share KV
    trace: Trace | None = None
    adapter: int = 0  # number of the model's adapter; 0 for none
    program: ProgramId | None = None
    weight: float = 1.0  # share of its client relative to others, where clients share the service fairly

    @property
    def kv_salt(self) -> bytes:
        """Equal for requests that may share KV, which depends on the adapter."""
        salt = self.cache_salt.encode()
        # No salt begins with this byte, since it is none of UTF-8.
        return b"\xff" + self.adapter.to_bytes(8, "big") + salt if self.adapter else salt


DEFAULT_OPTIONS = RequestOptions()

# (is served as best effort, is not urgent, priority). Requests of a smaller band strictly precede the others.
Band = tuple[bool, bool, int]


@dataclass(eq=False, slots=True)
class Progress:
    """How far a request is, and how it is treated. Only its methods write it.

    Two counters measure it: *known* tokens (prompt and output) and *computed* tokens (their KV exists). Prefill,
    chunks, decode and recomputation all raise `computed` to `known`. Its band and target are those of its options,
    unless it was lifted to real-time or its target follows from its forecast.
    """

    known: int
    output: list[int]
    band: Band
    target: Target
    computed: int = 0
    planned: int = 0  # `computed` after all plans in flight have committed
    pending_samples: int = 0  # tokens that plans in flight will sample
    cached: int = 0  # prefix-cache hit on arrival, in tokens; 0 once it holds KV
    reverse: bool = False  # fills its blocks from the last slot down; fixed on arrival
    last_plan: int = NEVER  # last plan with a slice of it, unless it has left the running requests
    evictions: int = 0
    was_admitted: bool = field(init=False)  # has held KV, at this engine or an earlier one
    is_newly_resident: bool = False  # no token was sampled since its KV was allocated or swapped in
    awaits_grammar: bool = False
    reserved_tokens: int = UNLIMITED
    forecast: Forecast | None = None
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.known += len(self.output)
        self.was_admitted = bool(self.output)

    @property
    def reached(self) -> int:
        """Number of tokens that are computed or found in the prefix cache."""
        return self.computed or self.cached

    @property
    def pending(self) -> int:
        """Number of tokens to compute before the next sample, with those that plans in flight will sample."""
        return self.known + self.pending_samples - self.planned

    @property
    def in_flight(self) -> bool:
        return self.planned > self.computed

    # -- computation --------------------------------------------------------------------------------------

    def begin(self, end: int, samples: bool, plan_id: int) -> None:
        self.planned = end
        self.pending_samples += samples
        self.last_plan = plan_id

    def withdraw(self, start: int, samples: bool) -> None:
        """Undo `begin` for a slice of the latest plan."""
        self.planned = start
        self.pending_samples -= samples

    def settle(self, end: int, samples: bool) -> None:
        self.computed = end
        if samples:
            self.pending_samples -= 1
            self.is_newly_resident = False

    def append(self, token: int) -> None:
        self.output.append(token)
        self.known += 1

    def extend(self, tokens: Sequence[int]) -> None:
        self.output.extend(tokens)
        self.known += len(tokens)

    def rewind(self, kept: int) -> None:
        """Continue after the first `kept` tokens, with no plan in flight."""
        self.computed = self.planned = kept
        self.pending_samples = 0
        self.last_plan = NEVER
        # The kept part is not swapped in again.
        self.is_newly_resident = self.is_newly_resident or kept > 0

    def finish(self, reason: FinishReason) -> None:
        self.finish_reason = reason

    # -- blocks -------------------------------------------------------------------------------------------

    def find(self, cached: int) -> None:
        self.cached = cached

    def fill_down(self) -> None:
        self.reverse = True

    def place(self) -> None:
        self.was_admitted = self.is_newly_resident = True

    def pause(self) -> None:
        self.last_plan = NEVER

    def evict(self) -> None:
        self.evictions += 1
        self.last_plan = NEVER

    def reserve(self, tokens: int) -> None:
        self.reserved_tokens = tokens

    # -- treatment ----------------------------------------------------------------------------------------

    def await_grammar(self, waits: bool) -> None:
        self.awaits_grammar = waits

    def expect(self, forecast: Forecast | None, target: Target | None = None) -> None:
        self.forecast = forecast
        self.target = self.target if target is None else target

    def lift(self, band: Band) -> None:
        self.band = band


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Request:
    """One sequence to generate; `progress` says how far it is. Requests compare by identity."""

    id: int  # unique; increases with arrival
    arrival: float  # seconds on the driver's clock, as is `deadline`
    prompt: Sequence[int]
    max_tokens: int
    min_tokens: int = 0  # output length before which `stop_tokens` have no effect
    stop_tokens: frozenset[int] = frozenset()
    options: RequestOptions = DEFAULT_OPTIONS
    sampling: object = None  # parameters of the executor's sampler; opaque to the core
    keeps_kv: bool = False  # blocks stay allocated after it has finished, until `EngineCore.release`
    prefix: Prefix | None = None  # keys of its KV blocks; None disables prefix caching
    resumed: Sequence[int] = ()  # output tokens that another engine has generated
    deadline: float = field(init=False)
    max_total_tokens: int = field(init=False)
    progress: Progress = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError(f"request {self.id}: the prompt is empty")
        if self.max_tokens < 1:
            raise ValueError(f"request {self.id}: max_tokens must be at least 1, got {self.max_tokens}")
        if len(self.resumed) >= self.max_tokens:
            raise ValueError(f"request {self.id}: all of its {self.max_tokens} tokens are generated already")
        deadline_s = self.options.deadline_s
        object.__setattr__(self, "deadline", math.inf if deadline_s is None else self.arrival + deadline_s)
        object.__setattr__(self, "max_total_tokens", len(self.prompt) + self.max_tokens)
        progress = Progress(len(self.prompt), list(self.resumed), self.own_band, self.options.target)
        object.__setattr__(self, "progress", progress)

    @property
    def is_best_effort(self) -> bool:
        return self.options.service is ServiceClass.BEST_EFFORT

    @property
    def own_band(self) -> Band:
        return (self.is_best_effort, not self.options.is_urgent, self.options.priority)

    @property
    def is_satisfied(self) -> bool:
        progress = self.progress
        return progress.known + progress.pending_samples >= self.max_total_tokens

    def keys(self, tokens: int) -> Sequence[Key]:
        """Return the keys of the full blocks in the first `tokens` known tokens."""
        return self.prefix.keys(self.tokens, tokens, reverse=self.progress.reverse) if self.prefix is not None else ()

    def tokens(self, start: int, end: int) -> list[int]:
        split = len(self.prompt)
        return [*self.prompt[start:end], *self.progress.output[max(0, start - split) : max(0, end - split)]]
