from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence

from skipjoin.core.engine import EngineCore
from skipjoin.core.events import Event
from skipjoin.core.policy import Fact
from skipjoin.core.request import Request, ServiceClass
from skipjoin.observe.explanation import standing
from skipjoin.observe.histories import HistoryLog
from skipjoin.observe.steps import StepLog
from skipjoin.policies.cost import LinearCost
from skipjoin.server.engines import messages

# Events that are observed at once, which bounds how long that takes.
MAX_EVENTS = 512
# Time after a question for steps in which the engine records them.
WATCHED_S = 5.0
# Finished requests in one reply.
MAX_FINISHED = 256


class EventBuffer:
    """Collects events, because steps evict observers from the processor's caches: a visit each would cost more."""

    def __init__(self, observers: Sequence[Callable[[Sequence[Event]], None]] = ()) -> None:
        self._observers = observers
        self._events: list[Event] = []

    def add(self, events: Sequence[Event]) -> None:
        self._events += events
        if len(self._events) >= MAX_EVENTS:
            self.flush()

    def flush(self) -> None:
        events, self._events = self._events, []
        for observe in self._observers if events else ():
            observe(events)


class EngineObserver:
    def __init__(self) -> None:
        self._histories = HistoryLog()
        self._steps = StepLog()
        self._watched_until = -math.inf

    def observe(self, events: Sequence[Event]) -> None:
        if not events:
            return
        self._histories.observe(events)
        if self._watched_until > -math.inf:
            self._steps.observe(events)

    def describe(
        self,
        question: messages.DescribeRequests,
        core: EngineCore,
        now: float,
        cost: LinearCost | None = None,
        between_steps_s: float = 0.0,
    ) -> messages.RequestStates:
        histories, after, begin = self._histories, question.finished_after, time.thread_time()
        if question.has_steps:
            self._watched_until = now + WATCHED_S
        elif now > self._watched_until:
            self._watched_until = -math.inf
        return messages.RequestStates(
            question.id,
            describe(core, now, question.rows, has_facts=question.has_facts),
            group(core.requests.values(), core),
            now,
            histories.finished.total,
            [] if after is None else histories.finished.after(after, MAX_FINISHED),
            self._steps.take() if question.has_steps else [],
            time.thread_time() - begin,
            cost,
            between_steps_s,
        )

    def find(self, question: messages.FindHistories, core: EngineCore, now: float) -> messages.HistoriesFound:
        histories = self._histories
        if question.numbers is None:
            recent = histories.recent(now - question.since_s, now)
            return messages.HistoriesFound(
                question.id, now, [history for history, _ in zip(recent, range(question.most), strict=False)]
            )
        found = [
            history
            for number in question.numbers
            if (history := histories.find(number, now, core.requests.get(number))) is not None
        ]
        competitors = {history.number: histories.competitors(history, now) for history in found}
        live, policies = core.requests, core.scheduler.policies
        asked = [live[history.number] for history in found if history.number in live]
        standings = {
            request.id: standing(request, live.values(), policies.ordering, policies.explain(request, now, core.kv))
            for request in asked
        }
        return messages.HistoriesFound(question.id, now, found, competitors, standings)


def describe(
    core: EngineCore, now: float, rows: int | None = None, *, has_facts: bool = False
) -> list[messages.RequestReport]:
    # `Ordering.rank` has no side effects. `Ordering.ranked` may promote requests.
    requests = sorted(core.requests.values(), key=core.scheduler.policies.ordering.rank)
    explain = core.scheduler.policies.explain
    return [
        _describe(core, request, place, now, explain(request, now, core.kv) if has_facts else [])
        for place, request in enumerate(requests[:rows])
    ]


def group(requests: Iterable[Request], core: EngineCore) -> list[messages.RequestGroup]:
    counts: dict[tuple[ServiceClass, str, str | None], list[int]] = {}
    for request in requests:
        held, wait = core.kv.blocks_of(request), core.wait_of(request)
        key = (request.options.service, state_name(core, request), None if wait is None else wait.reason.value)
        count = counts.setdefault(key, [0, 0, 0])
        count[0] += 1
        if held is not None:
            count[1] += len(held.device)
            count[2] += len(held.cpu)
    return [messages.RequestGroup(*key, *count) for key, count in counts.items()]


def _describe(core: EngineCore, request: Request, place: int, now: float, facts: list[Fact]) -> messages.RequestReport:
    held, wait = core.kv.blocks_of(request), core.wait_of(request)
    blocks = {} if held is None else {"device_blocks": len(held.device), "cpu_blocks": len(held.cpu)}
    if wait is not None:
        blocks["short_blocks"] = wait.short
    return messages.RequestReport.of(
        request,
        now,
        state_name(core, request),
        place,
        wait_reason=wait and wait.reason.value,
        wait_s=wait and now - wait.since,
        facts=facts,
        **blocks,
    )


def state_name(core: EngineCore, request: Request) -> str:
    if request.progress.last_plan >= core.scheduler.latest_plan:
        return "running"
    held = core.kv.blocks_of(request)
    if held is not None and (held.cpu or held.moving is not None):
        return "swapped"
    progress = request.progress
    has_run = progress.computed or progress.evictions or len(progress.output) > len(request.resumed)
    return "preempted" if has_run else "waiting"
