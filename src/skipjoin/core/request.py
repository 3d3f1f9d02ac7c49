"""A request: what was asked and how far it got."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from skipjoin.core.forecast import Forecast
from skipjoin.core.kv.prefixes import Prefix
from skipjoin.core.scheduling.waits import WaitState

NEVER = -(1 << 62)  # a plan id below every other
UNLIMITED = sys.maxsize  # tokens that a claim without a limit reaches


class FinishReason(StrEnum):
    """Why a request left the engine."""

    STOP = "stop"  # end-of-sequence or a stop token
    LENGTH = "length"  # max_tokens reached
    ABORT = "abort"  # the caller gave up
    DEADLINE = "deadline"  # its time ran out
    ERROR = "error"  # the executor gave it up


class ServiceClass(StrEnum):
    """What a request is served for (BROS section 1)."""

    REAL_TIME = "real-time"  # its tokens in time
    BEST_EFFORT = "best-effort"  # throughput: it runs on what real-time requests leave


class Target(NamedTuple):
    """Soft objectives of one request, in seconds: time to first token, time per output token after it, and job
    completion time. A request that misses one goes on; `RequestOptions.deadline_s` is the hard limit."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf
    jct_s: float = math.inf


NO_TARGET = Target()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """What a client asks of the scheduler. Made once, at the API's edge or in `LLM`, and carried as it is from there.

    service: real-time requests come before best-effort ones. is_urgent: it comes before the other requests of its
    class. priority: lower is earlier, among requests that are alike in both. deadline_s: seconds from the request's
    arrival after which it is ended; None: never. target: soft objectives. client: which client it is of, where clients
    are told apart. cache_salt: KV is shared only between requests that have the same.
    """

    service: ServiceClass = ServiceClass.REAL_TIME
    is_urgent: bool = False
    priority: int = 0
    deadline_s: float | None = None
    target: Target = NO_TARGET
    client: str = ""
    cache_salt: str = ""


DEFAULT_OPTIONS = RequestOptions()

# Requests of a smaller band come strictly first: whether it is best effort, whether it is not urgent, its priority.
Band = tuple[bool, bool, int]


@dataclass(eq=False, slots=True, weakref_slot=True)
class Request:
    """One sequence to generate. Compared by identity; mutated by the scheduler and the engine core only, but for
    `options`, which its driver may replace while it gives the request a forecast.

    Progress is two counters: tokens *known* (prompt and generated) and tokens *computed* (their KV exists).
    Prefill, a chunk of it, decode and recomputation are all "computed catches up with known". `planned` and
    `pending_samples` say what the plans in flight will add: with no plan in flight, planned == computed and
    pending_samples == 0.

    id: unique and increasing with arrival. arrival, deadline: seconds on the driver's clock.
    max_tokens: most tokens to generate, at least 1. stop_tokens end the output once min_tokens are generated.
    sampling: what the executor's sampler reads; the core never looks inside.
    forecast: of its output length, if there is one; `EngineCore.reforecast` changes it.
    output: generated so far; a request may come with tokens from elsewhere, after which it goes on.
    keeps_kv: its blocks stay when it ends, to be read by another engine, until `EngineCore.release`.
    prefix: the keys of its KV; None: it uses none of others', and others none of its own.
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
    deadline: float = field(default=math.inf, init=False)  # follows from the options
    band: Band = field(default=(False, True, 0), init=False)  # follows from the options
    resumed_tokens: int = 0  # tokens of its output that it came with
    known: int = 0
    computed: int = 0
    planned: int = 0  # computed, once every plan in flight has committed
    pending_samples: int = 0  # tokens that plans in flight will sample
    reverse: bool = False  # its blocks are filled from their last slot down, for its whole life
    led_since: float = math.inf  # when it first waited for KV that another request computes, until it holds some
    cached: int = 0  # tokens whose KV was found when it arrived, until it holds some of its own
    max_total_tokens: int = 0  # known never passes this: prompt + max_tokens
    claimed: int = UNLIMITED  # tokens that its claim on KV reaches; the ledger's to change
    last_plan: int = NEVER  # id of the last plan it had a slice in
    evictions: int = 0  # times its KV was dropped or swapped out to make room
    is_fresh: bool = False  # no token was sampled for it since its KV last came to the device
    finish_reason: FinishReason | None = None
    wait: WaitState | None = None  # why it waits, if the last decision that examined it did not run it
    examined: int = -1  # the last decision that examined it and did not run it

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError(f"request {self.id}: the prompt is empty")
        if self.max_tokens < 1:
            raise ValueError(f"request {self.id}: max_tokens must be at least 1, got {self.max_tokens}")
        if len(self.output) >= self.max_tokens:
            raise ValueError(f"request {self.id}: all of its {self.max_tokens} tokens are generated already")
        if self.options.deadline_s is not None:
            self.deadline = self.arrival + self.options.deadline_s
        self.band = (self.is_best_effort, not self.options.is_urgent, self.options.priority)
        self.resumed_tokens = len(self.output)
        self.known = len(self.prompt) + self.resumed_tokens
        self.max_total_tokens = len(self.prompt) + self.max_tokens

    @property
    def is_best_effort(self) -> bool:
        """Whether it is served for throughput alone."""
        return self.options.service is ServiceClass.BEST_EFFORT

    @property
    def reached(self) -> int:
        """Tokens that need not be computed, as far as is known: those that were, or whose KV was found."""
        return self.computed or self.cached

    @property
    def pending(self) -> int:
        """Tokens to compute before the next sample, counting those that plans in flight will sample."""
        return self.known + self.pending_samples - self.planned

    @property
    def in_flight(self) -> bool:
        """Whether a plan that has not committed holds a slice of this request."""
        return self.planned > self.computed

    @property
    def is_satisfied(self) -> bool:
        """Whether all that it may generate is known or being sampled."""
        return self.known + self.pending_samples >= self.max_total_tokens

    def tokens(self, start: int, end: int) -> list[int]:
        """The known tokens at positions [start, end)."""
        split = len(self.prompt)
        return [*self.prompt[start:end], *self.output[max(0, start - split) : max(0, end - split)]]
