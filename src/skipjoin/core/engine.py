from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from itertools import accumulate

from skipjoin.core.decide.scheduler import Scheduler
from skipjoin.core.events import Arrived, Decoded, Event, Finished, Token
from skipjoin.core.forecast import Forecast
from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.request import FinishReason, Request
from skipjoin.core.step import StepPlan, StepResult
from skipjoin.core.waits import WaitState


class RequestTooLargeError(ValueError): ...


class EngineCore:
    """Synchronous engine core without a clock.

    A driver calls `start_step` until it returns None, runs the plans, and calls `finish_step` with the results in
    order.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.requests: dict[int, Request] = {}  # live requests by id
        self.on_finished: Callable[[Request], object] = lambda request: None
        # Heap of (deadline, id). Entries of finished requests stay until they outnumber the live ones.
        self._deadlines: list[tuple[float, int]] = []
        self._with_deadline = 0  # number of live requests with a deadline

    @property
    def kv(self) -> KVAccounts:
        return self.scheduler.kv

    @property
    def largest_request(self) -> int:
        return self.kv.device_total * self.kv.block_size

    def add(self, request: Request, now: float) -> None:
        """Add a request, whose KV has arrived if it was expected.

        Raises:
            RequestTooLargeError: The request could not run even alone.
            ValueError: Its id is in use.
        """
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

    def release(self, request: Request, now: float) -> None:
        self.scheduler.release(request, now)

    def abort(
        self,
        request_id: int,
        now: float,
        reason: FinishReason = FinishReason.ABORT,
        detail: str = "",
        *,
        is_refused: bool = False,
    ) -> bool:
        """End the request in any state; return False if it does not exist or has finished.

        The reason is STOP if the output is complete although more could be generated. The client sees the `detail` of
        an ERROR.
        """
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._finish(request, reason, now, detail, is_refused=is_refused)
        return True

    def reforecast(self, request_id: int, forecast: Forecast, now: float) -> bool:
        """Return False if the request has finished."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        request.progress.expect(forecast)
        for notify in self.scheduler.policies.on_reforecast:
            notify(request, now)
        return True

    def charge(self, request: Request, tokens: float, now: float) -> None:
        """Count service of a request, which may be finished, as that of `tokens` output tokens."""
        for notify in self.scheduler.policies.on_charged:
            notify(request, tokens, now)

    def start_step(self, now: float) -> StepPlan | None:
        """Plan the next step; None if the pipeline is full or there is nothing to do."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self._deadlines)
            # The id may have been reused by a request with a later deadline.
            if (request := self.requests.get(request_id)) is not None and request.deadline <= now:
                self._finish(request, FinishReason.DEADLINE, now)
        return self.scheduler.schedule(now)

    @property
    def is_stalled(self) -> bool:
        if self.scheduler.has_plans or self.kv.is_moving:
            return False
        return any(not request.progress.awaits_grammar for request in self.requests.values())

    @property
    def next_deadline(self) -> float:
        return self._deadlines[0][0] if self._deadlines else math.inf

    def finish_step(self, result: StepResult, now: float) -> None:
        scheduler = self.scheduler
        void = scheduler.commit(result, now)
        for index, why in sorted(result.dropped.items()):
            if (request := result.plan.slices[index].request).progress.finish_reason is None:
                self._finish(request, FinishReason.ERROR, now, why, is_refused=index in result.refused)
        events, details = scheduler.events, result.details
        new = tuple.__new__  # `Token(...)` takes longer, and each step makes one for each request
        for index, (slice_, token) in enumerate(zip(result.plan.slices, result.tokens, strict=True)):
            request, _, _, samples, _, _ = slice_
            progress = request.progress
            # Requests that finished during the step, or whose KV was lost, get no token.
            if not samples or progress.finish_reason is not None or request in void:
                continue
            if token is None:
                raise ValueError(f"plan {result.plan.id} sampled no token for request {request.id}")
            progress.append(token)
            events.append(new(Token, (request, now, token, details.get(index) if details else None)))
            if token in request.stop_tokens and len(progress.output) >= request.min_tokens:
                self._finish(request, FinishReason.STOP, now)
            elif progress.known >= request.max_total_tokens:
                self._finish(request, FinishReason.LENGTH, now)

    def steady(self) -> StepPlan | None:
        return None if self._deadlines else self.scheduler.steady(len(self.requests))

    def decode(self, since: float, ends: Sequence[float]) -> None:
        """Simulate decode-only steps that end at `ends`, after the plan of `steady`, whose result came at `since`.

        No request may finish in them.

        Raises:
            ValueError: There are too few blocks.
        """
        steps, kv, requests = len(ends), self.scheduler.kv, tuple(self.requests.values())
        grown = kv.growth(requests, steps)
        if grown is None:
            raise ValueError(f"{steps} steps need more blocks than are available")
        reserved = kv.device_total - kv.available
        for request in requests:
            progress = request.progress
            end = progress.computed + steps
            progress.begin(end, False, progress.last_plan)
            progress.settle(end, False)
            progress.extend([progress.output[-1]] * steps)
            kv.grow(request, end)
        totals = [reserved + blocks for blocks in accumulate(grown)]
        self.scheduler.events.append(Decoded(requests, since, ends, totals))

    def wait_of(self, request: Request) -> WaitState | None:
        if request.progress.in_flight or request.progress.last_plan >= self.scheduler.latest_plan:
            return None
        tail = self.scheduler.tail
        return self.scheduler.waits.get(request) or tail._replace(since=max(tail.since, request.arrival))

    def restart(self, now: float) -> None:
        self.scheduler.restart(now)

    def take_events(self) -> list[Event]:
        events = self.scheduler.events
        self.scheduler.events = []
        return events

    def _finish(
        self, request: Request, reason: FinishReason, now: float, detail: str = "", *, is_refused: bool = False
    ) -> None:
        request.progress.finish(reason)
        del self.requests[request.id]
        if request.deadline < math.inf:
            self._with_deadline -= 1
            if len(self._deadlines) > 2 * self._with_deadline:
                self._deadlines = list({entry for entry in self._deadlines if self._is_live(*entry)})
                heapq.heapify(self._deadlines)
        self.scheduler.remove(request, now)
        self.scheduler.events.append(Finished(request, now, reason, detail, is_refused))
        self.on_finished(request)

    def _is_live(self, deadline: float, request_id: int) -> bool:
        request = self.requests.get(request_id)
        return request is not None and request.deadline == deadline
