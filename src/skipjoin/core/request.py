from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from skipjoin.core.forecast import Forecast
from skipjoin.core.prefixes import Key, Prefix
from skipjoin.core.waits import WaitState

NEVER = -(1 << 62)  # less than every plan id
UNLIMITED = sys.maxsize  # token limit of an unlimited reservation


class FinishReason(StrEnum):
    STOP = "stop"  # end-of-sequence or a stop token
    LENGTH = "length"  # max_tokens reached
    ABORT = "abort"  # cancelled by the caller
    DEADLINE = "deadline"  # deadline_s exceeded
    ERROR = "error"  # dropped by the executor


class ServiceClass(StrEnum):
    """Service class of a request (BROS section 1)."""

    REAL_TIME = "real-time"  # served for latency
    BEST_EFFORT = "best-effort"  # served for throughput; uses spare capacity only


class Target(NamedTuple):
    """Soft latency objectives in seconds: time to first token, time per output token after it, and job completion time.

    A request that misses one continues; the hard limit is `RequestOptions.deadline_s`.
    """

    ttft_s: float = math.inf
    tpot_s: float = math.inf
    jct_s: float = math.inf

    def with_default(self, default: Target) -> Target:
        """Return a copy in which missing objectives come from `default`."""
        return Target(*(own if own < math.inf else other for own, other in zip(self, default, strict=True)))


NO_TARGET = Target()


class Trace(NamedTuple):
    """Trace that a request belongs to.

    Attributes:
        parent: W3C `traceparent`; empty or invalid starts a new trace.
        request_id: Id by which the client knows the request.
    """

    parent: str
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Scheduling options of a request.

    Attributes:
        is_urgent: Whether the request runs before others of its service class.
        priority: Lower values run first among requests with equal `service` and `is_urgent`.
        deadline_s: Seconds after arrival at which the request is ended; None for no deadline.
        cache_salt: Only requests with equal salts share KV.
    """

    service: ServiceClass = ServiceClass.REAL_TIME
    is_urgent: bool = False
    priority: int = 0
    deadline_s: float | None = None
    target: Target = NO_TARGET
    client: str = ""
    cache_salt: str = ""
    trace: Trace | None = None


DEFAULT_OPTIONS = RequestOptions()

# (is served as best effort, is not urgent, priority). Requests of a smaller band strictly precede the others.
Band = tuple[bool, bool, int]


@dataclass(eq=False, slots=True, weakref_slot=True)
class Request:
    """One sequence to generate.

    Requests compare by identity. Only the scheduler and the engine core mutate them, except that the driver may replace
    `options` while it assigns a forecast, and that `Prioritized` lifts the `band` of old best-effort requests.

    Progress is measured by two counters: *known* tokens (prompt and output) and *computed* tokens (their KV exists).
    Prefill, chunks, decode and recomputation all raise `computed` to `known`. `planned` and `pending_samples` also
    count what the plans in flight will add.

    Attributes:
        id: Unique; increases with arrival.
        arrival: Seconds on the driver's clock, as is `deadline`.
        min_tokens: Output length before which `stop_tokens` have no effect.
        sampling: Parameters of the executor's sampler; opaque to the core.
        keeps_kv: Whether blocks stay allocated after the request has finished, until `EngineCore.release`.
        prefix: Keys of the request's KV blocks; None disables prefix caching for it.
    """

    id: int
    arrival: float
    prompt: Sequence[int]
    max_tokens: int
    min_tokens: int = 0
    stop_tokens: frozenset[int] = frozenset()
    options: RequestOptions = DEFAULT_OPTIONS
    sampling: object = None
    forecast: Forecast | None = None
    keeps_kv: bool = False
    prefix: Prefix | None = None

    output: list[int] = field(default_factory=list)
    deadline: float = field(default=math.inf, init=False)  # derived from the options
    band: Band = field(default=(False, True, 0), init=False)  # `own_band`, or that of real-time requests once lifted
    resumed_tokens: int = 0  # output tokens on arrival
    known: int = 0
    computed: int = 0
    planned: int = 0  # `computed` after all plans in flight have committed
    pending_samples: int = 0  # tokens that plans in flight will sample
    awaits_grammar: bool = False  # must not run until its grammar is compiled; see `EngineCore.grammar_compiled`
    reverse: bool = False  # fills its blocks from the last slot down; fixed on arrival
    led_since: float = math.inf  # since when it waits for another request to compute a shared prefix
    cached: int = 0  # prefix-cache hit on arrival, in tokens; 0 once it holds KV
    max_total_tokens: int = 0  # upper bound of `known`: prompt + max_tokens
    reserved_tokens: int = UNLIMITED  # token limit of its KV reservation; set by the ledger only
    last_plan: int = NEVER  # id of the last plan that contained a slice of it
    evictions: int = 0  # times its KV was dropped or swapped out for another request
    was_admitted: bool = False  # has held KV, at this engine or at the one from which it resumes
    is_newly_resident: bool = False  # no token sampled since its KV was last allocated or swapped in
    finish_reason: FinishReason | None = None
    wait: WaitState | None = None  # why the last decision that examined it did not run it
    examined: int = -1  # number of that decision

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError(f"request {self.id}: the prompt is empty")
        if self.max_tokens < 1:
            raise ValueError(f"request {self.id}: max_tokens must be at least 1, got {self.max_tokens}")
        if len(self.output) >= self.max_tokens:
            raise ValueError(f"request {self.id}: all of its {self.max_tokens} tokens are generated already")
        if self.options.deadline_s is not None:
            self.deadline = self.arrival + self.options.deadline_s
        self.band = self.own_band
        self.resumed_tokens = len(self.output)
        self.was_admitted = self.resumed_tokens > 0
        self.known = len(self.prompt) + self.resumed_tokens
        self.max_total_tokens = len(self.prompt) + self.max_tokens

    @property
    def is_best_effort(self) -> bool:
        return self.options.service is ServiceClass.BEST_EFFORT

    @property
    def own_band(self) -> Band:
        return (self.is_best_effort, not self.options.is_urgent, self.options.priority)

    @property
    def reached(self) -> int:
        """Number of tokens known to need no computation: computed, or found in the prefix cache."""
        return self.computed or self.cached

    @property
    def pending(self) -> int:
        """Number of tokens to compute before the next sample, including those that plans in flight will sample."""
        return self.known + self.pending_samples - self.planned

    @property
    def in_flight(self) -> bool:
        """True if a plan that has not committed contains a slice of this request."""
        return self.planned > self.computed

    @property
    def is_satisfied(self) -> bool:
        return self.known + self.pending_samples >= self.max_total_tokens

    def credit(self, tokens: int) -> None:
        """Count the first `tokens` tokens as computed, because the prefix cache has their KV."""
        self.computed = self.planned = tokens

    def rewind(self, kept: int) -> None:
        """Compute the tokens after the first `kept` ones again, because their KV is lost. No plan may contain them."""
        self.computed = self.planned = kept
        self.pending_samples = 0
        self.last_plan = NEVER
        # The kept part is not swapped in again.
        self.is_newly_resident = self.is_newly_resident or kept > 0

    def keys(self, tokens: int) -> Sequence[Key]:
        """Return the keys of the full blocks in the first `tokens` known tokens; see `Prefix.keys`."""
        return self.prefix.keys(self.tokens, tokens, reverse=self.reverse) if self.prefix is not None else ()

    def tokens(self, start: int, end: int) -> list[int]:
        """Return the known tokens at positions [start, end)."""
        split = len(self.prompt)
        return [*self.prompt[start:end], *self.output[max(0, start - split) : max(0, end - split)]]
