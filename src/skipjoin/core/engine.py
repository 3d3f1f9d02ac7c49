"""EngineCore: the life of requests around the scheduler. It adds tokens, ends requests and tells what happened."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import accumulate

from skipjoin.core.events import Arrived, Decoded, Event, Finished, Token
from skipjoin.core.forecast import Forecast
from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.request import FinishReason, Request
from skipjoin.core.scheduling.scheduler import Scheduler
from skipjoin.core.scheduling.waits import WaitState
from skipjoin.core.step import StepPlan, StepResult


class RequestTooLargeError(ValueError):
    """The request can never fit the KV pool."""


class EngineCore:
    """Requests in, events out. A driver, which owns time, calls `start_step` while it returns plans, hands them to
    an executor, and calls `finish_step` with each result in turn; after any call, `take_events` says what happened.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.requests: dict[int, Request] = {}  # live ones, by id
        # A heap of (deadline, id). Entries of ended requests stay until they are more than those of live ones.
        self._deadlines: list[tuple[float, int]] = []
        self._with_deadline = 0  # live requests that have one

    @property
    def kv(self) -> KVAccounts:
        """The block accounts, to be read."""
        return self.scheduler.kv

    @property
    def largest_request(self) -> int:
        """Most tokens, prompt and output together, that one request may have."""
        return self.kv.device_total * self.kv.block_size

    def add(self, request: Request, now: float) -> None:
        """Take a request; the KV of one that was expected (`expect`) is there. Raises `RequestTooLargeError` if it
        could not run even alone, ValueError if its id is in use."""
        if request.max_total_tokens > self.largest_request:
            raise RequestTooLargeError(
                f"the request may grow to {request.max_total_tokens} tokens (prompt plus max_tokens), "
                f"the KV pool holds {self.largest_request}"
            )
        if request.id in self.requests:
            raise ValueError(f"request id {request.id} is in use")
        self.requests[request.id] = request
        if request.deadline < math.inf:
            self._with_deadline += 1
            heapq.heappush(self._deadlines, (request.deadline, request.id))
        self.scheduler.events.append(Arrived(request, now))
        self.scheduler.add(request, now)

    def expect(self, request: Request, now: float) -> bool:
        """Reserve device blocks for a request whose computed tokens have KV at another engine, so that it can be copied
        here; `add` the request when it is. False if there is no room for it now: nothing is evicted for it."""
        return self.scheduler.expect(request, now)

    def release(self, request: Request, now: float) -> None:
        """Free the blocks of an ended request that keeps its KV (`Request.keeps_kv`)."""
        self.scheduler.release(request, now)

    def abort(self, request_id: int, now: float, reason: FinishReason = FinishReason.ABORT, detail: str = "") -> bool:
        """End the request, whatever state it is in; False if it is not there (any more). reason: STOP where its output
        is complete, though more could be generated. detail: of an ERROR, for the client."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._finish(request, reason, now, detail)
        return True

    def reforecast(self, request_id: int, forecast: Forecast, now: float) -> bool:
        """Give the request another forecast; False if it is not there (any more)."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        request.forecast = forecast
        for reforecast in self.scheduler.policies.on_reforecast:
            reforecast(request, now)
        return True

    def start_step(self, now: float) -> StepPlan | None:
        """Decide the next step, or None: the pipeline is full, or there is nothing to do."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self._deadlines)
            # The id may be in use again, by a request with more time.
            if (request := self.requests.get(request_id)) is not None and request.deadline <= now:
                self._finish(request, FinishReason.DEADLINE, now)
        return self.scheduler.schedule(now)

    @property
    def is_stalled(self) -> bool:
        """Whether requests wait although no plan is in flight and no KV in transit."""
        return bool(self.requests) and not self.scheduler.has_plans and not self.kv.is_moving

    @property
    def next_deadline(self) -> float:
        """When `start_step` must be called next for a deadline's sake, on the driver's clock; inf: never."""
        return self._deadlines[0][0] if self._deadlines else math.inf

    def finish_step(self, result: StepResult, now: float) -> None:
        """Apply a step's outcome: commit it, append its tokens, end the requests that are done or were given up."""
        scheduler = self.scheduler
        void = scheduler.commit(result, now)
        for index, why in sorted(result.given_up.items()):
            if (request := result.plan.slices[index].request).finish_reason is None:
                self._finish(request, FinishReason.ERROR, now, why)
        events, details = scheduler.events, result.details
        for index, (piece, token) in enumerate(zip(result.plan.slices, result.tokens, strict=True)):
            request = piece.request
            # A request that ended while the step ran has no use for the token; one whose KV was lost gets no token.
            if not piece.samples or request.finish_reason is not None or request in void:
                continue
            if token is None:
                raise ValueError(f"plan {result.plan.id} sampled no token for request {request.id}")
            request.output.append(token)
            known = request.known = request.known + 1
            events.append(Token(request, now, token, details.get(index) if details else None))
            if token in request.stop_tokens and len(request.output) >= request.min_tokens:
                self._finish(request, FinishReason.STOP, now)
            elif known >= request.max_total_tokens:
                self._finish(request, FinishReason.LENGTH, now)

    def steady(self) -> StepPlan | None:
        """The plan in flight, if after it `decode` may be called; otherwise None."""
        return None if self._deadlines else self.scheduler.steady(len(self.requests))

    def decode(self, since: float, ends: Sequence[float]) -> None:
        """Take steps together that follow the plan that was `steady`, and whose result was there at `since`: they end
        at `ends`, and in each of them every request gets one more token, equal to its last one, and none ends.

        The outcome is that of the single steps, but for the ids of plans and blocks and for the events (`Decoded`).
        Raises ValueError if blocks are short.
        """
        steps, kv, requests = len(ends), self.scheduler.kv, tuple(self.requests.values())
        grown = kv.growth(requests, steps)
        if grown is None:
            raise ValueError(f"{steps} steps need more blocks than are available")
        claimed = kv.device_total - kv.available
        for request in requests:
            request.output += [request.output[-1]] * steps
            request.known += steps
            request.computed += steps
            request.planned += steps
            kv.grow(request, request.computed)
        claims = [claimed + blocks for blocks in accumulate(grown)]
        self.scheduler.events.append(Decoded(requests, since, ends, claims))

    def wait_of(self, request: Request) -> WaitState | None:
        """Why the request waits, and since when; None while it runs."""
        if request.in_flight or request.last_plan >= self.scheduler.latest_plan:
            return None
        tail = self.scheduler.tail
        return request.wait or tail._replace(since=max(tail.since, request.arrival))

    def restart(self, now: float) -> None:
        """The executor was started anew and has nothing of what it had: requests go on from the tokens that they have
        now, and results of plans from before must not come any more."""
        self.scheduler.restart(now)

    def take_events(self) -> list[Event]:
        """What happened since the last call, in order."""
        events = self.scheduler.events
        self.scheduler.events = []
        return events

    def _finish(self, request: Request, reason: FinishReason, now: float, detail: str = "") -> None:
        request.finish_reason = reason
        del self.requests[request.id]
        if request.deadline < math.inf:
            self._with_deadline -= 1
            self._drop_old_deadlines()
        self.scheduler.remove(request, now)
        self.scheduler.events.append(Finished(request, now, reason, detail))

    def _drop_old_deadlines(self) -> None:
        """Keep the heap at most twice as large as what lives, at a constant cost per request."""
        if len(self._deadlines) > 2 * self._with_deadline:
            self._deadlines = list({entry for entry in self._deadlines if self._is_live(*entry)})
            heapq.heapify(self._deadlines)

    def _is_live(self, deadline: float, request_id: int) -> bool:
        request = self.requests.get(request_id)
        return request is not None and request.deadline == deadline
