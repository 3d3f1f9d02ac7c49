"""Each request's story in figures, folded from core events: what TTFT or queue time means is said here alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from skipjoin.core.events import (
    Arrived,
    Computed,
    Decoded,
    Event,
    Finished,
    Planned,
    Preempted,
    Restarted,
    Started,
    Token,
    Waited,
)
from skipjoin.core.request import NO_TARGET, FinishReason, Request, ServiceClass, Target
from skipjoin.core.scheduling.waits import WaitReason
from skipjoin.observe.waits import WaitLog, WaitTimes

# Below this, a difference of two times is rounding.
_NOTHING_S = 1e-9
COMPLETE = (FinishReason.STOP.value, FinishReason.LENGTH.value)


class Kind(NamedTuple):
    """What figures tell requests apart by: the stream that they belong to, and its service class."""

    stream: str = "default"
    service: ServiceClass = ServiceClass.REAL_TIME


@dataclass(slots=True)
class RequestFacts:
    """One request in figures; times in seconds on its observer's clock, None for what has not happened.

    output_limit: most tokens that it may generate, or what it will generate where its observer knows.
    earlier_tokens: those that it came with, generated elsewhere: its first token was elsewhere, too, and the times that
    began before it came are not told. started: when it first ran. ended: when it was over, with `reason` as in
    `FinishReason`, or a word of the observer's own.
    execution_s: in steps that computed for it; swapping_s: in which those steps stood still for KV; scheduling_s: what
    the host added to those steps. waits: seconds by reason, where its observer is an engine. target:
    its soft objectives. service: what it is served for.

    Durations of a request that is not over take `now` for its end: its age so far, never left out.
    """

    id: int
    arrival: float
    prompt_tokens: int
    output_limit: int
    stream: str = "default"
    output_tokens: int = 0
    earlier_tokens: int = 0
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    ended: float | None = None
    reason: str | None = None
    preemptions: int = 0
    execution_s: float = 0.0
    swapping_s: float = 0.0
    scheduling_s: float = 0.0
    waits: WaitTimes | None = None
    target: Target = NO_TARGET
    service: ServiceClass = ServiceClass.REAL_TIME

    @property
    def is_best_effort(self) -> bool:
        """Whether it is served for throughput alone."""
        return self.service is ServiceClass.BEST_EFFORT

    @property
    def kind(self) -> Kind:
        """What figures tell it apart by."""
        return Kind(self.stream, self.service)

    @property
    def is_complete(self) -> bool:
        """Whether it got all that it was to get."""
        return self.reason in COMPLETE

    def jct(self, now: float) -> float:
        """Job completion time: from arrival to end."""
        return self._end(now) - self.arrival

    def ttft(self, now: float) -> float:
        """Time to first token, from arrival."""
        return (self._end(now) if self.first_token is None else self.first_token) - self.arrival

    def tpot(self, now: float) -> float | None:
        """Time per output token after the first one; None where there is no such token. A request that is not
        complete waits for its next token, and that gap counts."""
        if self.first_token is None or self.last_token is None:
            return None
        if not self.is_complete:
            return (self._end(now) - self.first_token) / self.output_tokens
        if self.output_tokens < 2:
            return None
        return (self.last_token - self.first_token) / (self.output_tokens - 1)

    def normalized_latency(self, now: float) -> float:
        """Completion time per output token. A request that is not complete is taken to reach its limit now, which
        is the least that it can come to."""
        return self.jct(now) / max(1, self.output_tokens if self.is_complete else self.output_limit)

    def queue(self, now: float) -> float:
        """From arrival to the first step that ran it."""
        return (self._end(now) if self.started is None else self.started) - self.arrival

    def prefill(self, now: float) -> float | None:
        """From its first step to its first token; None before that step."""
        if self.started is None:
            return None
        return (self._end(now) if self.first_token is None else self.first_token) - self.started

    def decode(self) -> float | None:
        """From its first token to its last; None without tokens."""
        if self.first_token is None or self.last_token is None:
            return None
        return self.last_token - self.first_token

    def inference(self) -> float | None:
        """From its first step to its last token; None without tokens."""
        if self.started is None or self.last_token is None:
            return None
        return self.last_token - self.started

    def waiting(self, now: float) -> float:
        """Time in the system in which nothing was done for it, preempted or not yet begun."""
        return max(0.0, self.jct(now) - self.execution_s - self.swapping_s - self.scheduling_s)

    def wait_s(self) -> dict[WaitReason, float]:
        """Seconds by reason in which it did not execute, until its end or until `RequestLog.live` was called."""
        return {} if self.waits is None else dict(self.waits.by_reason())

    def _end(self, now: float) -> float:
        return now if self.ended is None else self.ended


class RequestLog:
    """Folds core events into `RequestFacts`.

    on_end: called with the facts of every request that ends, which are then forgotten here.
    on_first: called with the facts of a request that got its first token here, though it may have come with others.
    on_gap: called for every other token with the seconds since the request's token before, and whether the request is
    best effort.
    """

    def __init__(
        self,
        on_end: Callable[[RequestFacts], None],
        *,
        on_first: Callable[[RequestFacts], object] | None = None,
        on_gap: Callable[[tuple[float, bool]], object] | None = None,
    ) -> None:
        self._on_end = on_end
        self._on_first = on_first
        self._on_gap = on_gap
        self._live: dict[Request, RequestFacts] = {}
        self._coming: dict[Request, tuple[RequestFacts, Mapping[WaitReason, float]]] = {}
        self._planned: dict[int, float] = {}  # when the plans in flight were made
        self._computed_at: float | None = None  # when the last result came, if work was left then
        self.waits = WaitLog()
        self._handlers: dict[type, Callable[[Any], None]] = {
            Arrived: self._arrive,
            Waited: self._wait,
            Planned: self._plan,
            Started: self._start,
            Preempted: self._preempt,
            Computed: self._settle,
            Decoded: self._decode,
            Finished: self._finish,
            Restarted: self._restart,
        }

    def expect(self, request: Request, facts: RequestFacts, waited: Mapping[WaitReason, float]) -> None:
        """A request arrives next that began at another engine: its story goes on with these facts, of another log.
        waited: seconds by reason since it left that engine."""
        self._coming[request] = facts, waited

    def live(self, now: float) -> Iterator[RequestFacts]:
        """The requests that have not ended, in the order of their arrival, with their waits until now. Nothing may be
        observed afterwards."""
        for request, facts in self._live.items():
            facts.output_tokens = len(request.output)
            if facts.waits is not None:
                self.waits.finished(facts.waits, now)
            yield facts

    def observe(self, events: Iterable[Event]) -> None:
        """Take what happened, in order."""
        live, on_gap, handlers = self._live, self._on_gap, self._handlers
        for event in events:
            if type(event) is Token:
                facts = live[event.request]
                last, facts.last_token = facts.last_token, event.now
                if last is None:
                    self._begin(facts, event.now)
                elif on_gap is not None:
                    on_gap((event.now - last, facts.is_best_effort))
            elif (handle := handlers.get(type(event))) is not None:
                handle(event)

    def _plan(self, event: Planned) -> None:
        self._planned[event.plan.id] = event.now
        self.waits.planned(event)

    def _wait(self, event: Waited) -> None:
        if (waits := self._live[event.request].waits) is not None:
            self.waits.waited(waits, event)

    def _start(self, event: Started) -> None:
        facts = self._live[event.request]
        if facts.started is None:
            facts.started = event.now
        if facts.waits is not None:
            self.waits.started(facts.waits, event.now)

    def _preempt(self, event: Preempted) -> None:
        self._live[event.request].preemptions += 1

    def _restart(self, event: Restarted) -> None:
        self._planned.clear()
        self.waits.restarted()
        self._computed_at = None

    def _arrive(self, event: Arrived) -> None:
        request = event.request
        if request in self._coming:
            facts, waited = self._coming.pop(request)
            if facts.waits is not None:
                self.waits.resumed(facts.waits, waited, event.now)
            self._live[request] = facts
            return
        self._live[request] = RequestFacts(
            request.id,
            request.arrival,
            len(request.prompt),
            request.max_total_tokens - len(request.prompt),
            earlier_tokens=request.resumed_tokens,
            waits=self.waits.arrived(request.arrival, event.now),
            target=request.options.target,
            service=request.options.service,
        )

    def _begin(self, facts: RequestFacts, now: float) -> None:
        if not facts.earlier_tokens:
            facts.first_token = now
        if self._on_first is not None:
            self._on_first(facts)

    def _finish(self, event: Finished) -> None:
        facts = self._live.pop(event.request)
        facts.ended, facts.reason = event.now, event.reason.value
        facts.output_tokens = len(event.request.output)
        facts.target = event.request.options.target  # one that follows from the output's length has changed
        if facts.waits is not None:
            self.waits.finished(facts.waits, event.now)
        if not self._live:
            self._computed_at = None
        self._on_end(facts)

    def _settle(self, event: Computed) -> None:
        """Charge a step's time to the requests that it ran."""
        result, now = event.result, event.now
        begun = self._planned.pop(result.plan.id)
        # The engine had work since the last result: what passed until this plan ran is the host's time, too. Where
        # plans overlap, a plan waits behind the one before it, and the host adds nothing.
        since = begun if self._computed_at is None else self._computed_at
        host = now - since - result.seconds
        host = host if host > _NOTHING_S else 0.0
        moving, computing = result.moving, result.seconds - result.moving
        live = self._live
        waits = self.waits.computed(result, now)
        for piece in result.plan.slices:
            facts = live.get(piece.request)
            if facts is not None and facts.waits is not None:  # it may have ended while the step ran
                facts.execution_s += computing
                if moving or host:
                    facts.swapping_s += moving
                    facts.scheduling_s += host
                waits.ran(facts.waits)
        # A plan without slices lasts as long as it waits for moves.
        missed = result.seconds if result.plan.slices else now - since
        for request in result.plan.waiting_for_kv:
            facts = live.get(request)
            if facts is not None:
                facts.swapping_s += missed
        self._computed_at = now if live else None

    def _decode(self, event: Decoded) -> None:
        """As the `Planned`, `Computed` and `Token` of each step. Nothing but the steps takes time."""
        last, on_gap = event.ends[-1], self._on_gap
        freed = self.waits.decoded(len(event.ends), last)
        for request in event.requests:
            facts = self._live[request]
            facts.last_token = last
            facts.execution_s += last - event.since
            if facts.waits is not None:
                facts.waits.freed = freed
        if on_gap is not None:
            for before, end in pairwise((event.since, *event.ends)):
                for request in event.requests:
                    on_gap((end - before, request.is_best_effort))
        self._computed_at = last
