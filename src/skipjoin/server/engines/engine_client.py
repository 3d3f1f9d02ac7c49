from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import NamedTuple

from skipjoin.core.forecast import Forecast
from skipjoin.core.prefixes import ContentPrefix
from skipjoin.core.request import DEFAULT_OPTIONS, FinishReason, Request, RequestOptions
from skipjoin.engine.text import Output
from skipjoin.observe.metric_snapshot import Snapshot, merged
from skipjoin.policies.dispatch import PrefixAware
from skipjoin.sampling import SamplingParams, TokenDetail
from skipjoin.server.engines import messages
from skipjoin.server.engines.connected_engine import (
    ConnectedEngine,
    EngineAdapters,
    LiveRequest,
    LiveRequests,
    Question,
    Replies,
    live_requests,
    waiting_request,
)
from skipjoin.server.engines.crash_isolation import CrashIsolation
from skipjoin.server.engines.errors import EngineDeadError, LostRequestError, NoReplicaError, RefusedError
from skipjoin.server.engines.sequences import EngineSequence, OnEnd, OutputQueue
from skipjoin.server.metrics import Metrics

logger = logging.getLogger(__name__)

# Time that a sequence waits for an engine to start.
PATIENCE_S = 60.0
# Time after a deadline in which the engine can end the sequence itself.
_DEADLINE_GRACE_S = 0.05


class EngineLoad(NamedTuple):
    running: int
    waiting: int
    usage: float


class EngineClient:
    """Submits sequences to engines, and moves them to another engine after a crash.

    A moved sequence continues after its tokens, and waits up to `patience_s` for an engine. `dead` is True if no engine
    runs and none will start.
    """

    def __init__(
        self,
        metrics: Metrics,
        *,
        wanted: int = 1,
        seed: int = 0,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._seeds = random.Random(seed)
        self._patience_s = patience_s
        self._clock = clock
        self._replicas: dict[int, ConnectedEngine] = {}
        self._places: dict[int, ConnectedEngine | None] = {}  # by id of the sequence; None while it waits
        self._waiting: dict[int, EngineSequence] = {}
        self._isolation = CrashIsolation(self._place)
        self._dispatch = PrefixAware.learning()
        self._gone = Snapshot.zero()  # metrics of engines that have exited, so that counters never decrease
        self._joined = 0
        # Not the ids of clients, which may collide.
        self._ids = itertools.count(1)
        self._questions = itertools.count()
        self.adapters = EngineAdapters(self._replicas.values(), self.ask)
        self.wanted = wanted
        self.steps = 0
        self.dead = False
        self._tell_replicas()

    @property
    def active(self) -> int:
        return len(self._places)

    @property
    def alive(self) -> int:
        return len(self._replicas)

    @property
    def is_hung(self) -> bool:
        return bool(self._replicas) and all(replica.is_hung for replica in self._replicas.values())

    def load(self) -> EngineLoad:
        replicas = self._replicas.values()
        stats = [replica.stats for replica in replicas]
        blocks = sum(replica.info.device_blocks for replica in replicas)
        return EngineLoad(
            sum(stat.running for stat in stats),
            sum(stat.waiting for stat in stats),
            sum(stat.blocks_used for stat in stats) / blocks if blocks else 0.0,
        )

    # -- engines ------------------------------------------------------------------------------------------

    def join(self, info: messages.Ready, send: Callable[[messages.ToEngine], None]) -> ConnectedEngine:
        number = next(number for number in itertools.count() if number not in self._replicas)
        replica = self._replicas[number] = ConnectedEngine(number, info, send)
        self._dispatch.join(number, info.cost, info.cache_blocks, info.block_size)
        self._joined += 1
        self._tell_replicas()
        # Before any request; one whose adapter cannot be loaded again is refused.
        self.adapters.repeat(replica, self._questions)
        waiting, self._waiting = self._waiting, {}
        for sequence in waiting.values():
            assert sequence.patience is not None
            sequence.patience.cancel()
            sequence.patience = None
            self._place(sequence)
        return replica

    def lose(self, replica: ConnectedEngine) -> int:
        if self._replicas.get(replica.number) is not replica:
            return 0
        del self._replicas[replica.number]
        self._dispatch.leave(replica.number)
        self._gone = merged([self._gone, replica.stats.metrics.at_rest()])
        orphans, replica.sequences = replica.sequences, {}
        self._places.update(dict.fromkeys(orphans))
        for question in replica.questions.values():
            question.cancel()
        self._metrics.count("requests_moved_total", n=len(orphans))
        self._tell_replicas()
        self._tell_numbers()
        self._blame(orphans.values())
        for sequence in orphans.values():
            if sequence.id in self._places:
                self._place(sequence)
        self._isolation.next()
        return len(orphans)

    def died(self) -> None:
        self.dead = True
        self._metrics.count("requests_lost_total", "engine_dead", self.active)
        self.fail_all(EngineDeadError())
        for replica in list(self._replicas.values()):
            self.lose(replica)

    def receive(self, replica: ConnectedEngine, message: messages.FromEngine) -> None:
        if isinstance(message, messages.StepOutputs):
            self.steps += 1
            self._deliver(replica, message)
        elif isinstance(message, messages.PromptScores):
            if (sequence := replica.sequences.get(message.id)) is not None:
                sequence.scores.extend(message.scores)
        elif isinstance(message, messages.Stats):
            if self._replicas.get(replica.number) is replica:
                replica.stats = message
                self._tell_numbers()
        elif isinstance(message, messages.RequestStates | messages.HistoriesFound | messages.AdapterLoaded):
            if (question := replica.questions.pop(message.id, None)) is not None and not question.done():
                question.set_result(message)
        elif isinstance(message, messages.Refused) and (sequence := replica.sequences.get(message.id)) is not None:
            sequence.mailbox.fail(RefusedError(message.text, message.param))
            self._close(sequence, FinishReason.ABORT)

    # -- sequences ----------------------------------------------------------------------------------------

    def submit(
        self,
        mailbox: OutputQueue,
        index: int,
        prompt: list[int],
        params: SamplingParams,
        *,
        options: RequestOptions = DEFAULT_OPTIONS,
        forecast: Forecast | None = None,
        label: str = "",
        owner: str = "",
        adapter: str = "",
        like: EngineSequence | None = None,
        on_start: Callable[[], None] | None = None,
        on_end: OnEnd | None = None,
    ) -> EngineSequence:
        """Submit a sequence, or raise `EngineDeadError` or `NoReplicaError`.

        The prefix hashes of `like`, with the same prompt, are reused. `on_start` is called once at each engine.
        """
        if self.dead:
            raise EngineDeadError
        if not self._replicas:
            raise NoReplicaError
        if params.seed is None:
            params = replace(params, seed=self._seeds.getrandbits(63))
        now = self._clock()
        info = next(iter(self._replicas.values())).info
        request = Request(
            next(self._ids),
            now,
            prompt,
            params.output_limit,
            options=options,
            prefix=self._prefix(info, params, options, like),
        )
        request.progress.expect(forecast)
        sequence = EngineSequence(request, params, mailbox, index, label, owner, adapter, on_start, on_end)
        if options.deadline_s is not None:
            # The engine ends it between two steps unless the engine hangs, which this timer covers.
            delay = options.deadline_s + _DEADLINE_GRACE_S
            sequence.alarm = asyncio.get_running_loop().call_later(delay, self._expire, sequence)
        self._place(sequence)
        return sequence

    def reforecast(self, sequence: EngineSequence, forecast: Forecast) -> None:
        sequence.request.progress.expect(forecast)
        if (replica := self._places.get(sequence.id)) is not None:
            replica.send(messages.Reforecast(sequence.id, forecast))

    def abort(self, sequences: list[EngineSequence]) -> None:
        """Abort the unfinished ones. They get no more outputs."""
        self._end(sequences, FinishReason.ABORT)

    def complete(self, sequence: EngineSequence) -> None:
        """Finish a sequence at a stop string, which the engine does not know."""
        self._end([sequence], FinishReason.STOP)

    def fail_all(self, error: Exception) -> None:
        held = [replica.sequences for replica in self._replicas.values()]
        sequences = [sequence for some in (*held, self._waiting, self._isolation.held) for sequence in some.values()]
        for sequence in sequences:
            sequence.mailbox.fail(error)
        self.abort(sequences)

    # -- questions ----------------------------------------------------------------------------------------

    async def ask(self, make: Callable[[int, ConnectedEngine], Question], timeout_s: float) -> Replies:
        number = next(self._questions)
        asked = {replica: replica.ask(make(number, replica)) for replica in self._replicas.values()}
        if asked:
            await asyncio.wait(asked.values(), timeout=timeout_s)
        for replica in asked:
            replica.questions.pop(number, None)
        done = {replica: answer for replica, answer in asked.items() if answer.done() and not answer.cancelled()}
        return Replies(
            {replica: answer.result() for replica, answer in done.items()},
            [replica.number for replica in asked if replica not in done],
        )

    def without_engine(self) -> list[LiveRequest]:
        now = self._clock()
        return [
            waiting_request(sequence, now) for sequence in (*self._waiting.values(), *self._isolation.held.values())
        ]

    async def describe(self, timeout_s: float) -> LiveRequests:
        replies = await self.ask(lambda number, engine: messages.DescribeRequests(number, has_facts=True), timeout_s)
        found = self.without_engine()
        for replica, reply in replies.by_engine.items():
            assert isinstance(reply, messages.RequestStates)
            found += live_requests(replica, reply)
        return LiveRequests(found, replies.silent)

    # -- inside -------------------------------------------------------------------------------------------

    def _prefix(
        self, info: messages.Ready, params: SamplingParams, options: RequestOptions, like: EngineSequence | None
    ) -> ContentPrefix | None:
        if self.wanted == 1 or not info.caches_prefixes or params.prompt_logprobs is not None:
            return None
        if like is not None and isinstance(like.request.prefix, ContentPrefix):
            return like.request.prefix.copy()
        return ContentPrefix(info.block_size, options.kv_salt)

    def _place(self, sequence: EngineSequence) -> None:
        sequence.scores.clear()
        request, now = sequence.request, self._clock()
        if not self._replicas:
            wait = min(max(0.0, request.deadline - now), self._patience_s)
            sequence.patience = asyncio.get_running_loop().call_later(wait, self._fail_waiting, sequence)
            self._waiting[sequence.id] = sequence
            self._places[sequence.id] = None
            return
        if not self._isolation.enter(sequence):
            self._places[sequence.id] = None
            return
        replica = self._replicas[self._dispatch.choose(request)]
        replica.sequences[sequence.id] = sequence
        self._places[sequence.id] = replica
        replica.send(sequence.message(now))

    def _blame(self, orphans: Collection[EngineSequence]) -> None:
        for sequence in self._isolation.blame(orphans):
            self._metrics.count("requests_lost_total", "engine_lost")
            text = "%s is not tried again: engines ended %d times while they ran it, %d of them without a token since"
            logger.warning(text, sequence.label or f"request {sequence.id}", sequence.deaths, sequence.stuck)
            sequence.mailbox.fail(LostRequestError(sequence.deaths))
            self._close(sequence, FinishReason.ERROR)

    # -- ends of sequences --------------------------------------------------------------------------------

    def _expire(self, sequence: EngineSequence) -> None:
        sequence.mailbox.put(Output(sequence.index, reason=FinishReason.DEADLINE))
        self._end([sequence], FinishReason.DEADLINE)

    def _fail_waiting(self, sequence: EngineSequence) -> None:
        if sequence.request.deadline <= self._clock():
            sequence.mailbox.put(Output(sequence.index, reason=FinishReason.DEADLINE))
        else:
            self._metrics.count("requests_lost_total", "no_replica")
            sequence.mailbox.fail(NoReplicaError())
        self._close(sequence, FinishReason.ABORT)

    def _deliver(self, replica: ConnectedEngine, step: messages.StepOutputs) -> None:
        sequences, details, generated = replica.sequences, step.details, self._dispatch.generated
        for request_id in step.started:
            if (sequence := sequences.get(request_id)) is not None:
                cached = step.cached.get(request_id, 0)
                self._dispatch.found(sequence.request, cached)
                sequence.started(cached)
        ended = {request_id: FinishReason(reason) for request_id, reason in step.ended}
        for position, (request_id, token) in enumerate(zip(step.ids, step.tokens, strict=True)):
            sequence = sequences.get(request_id)
            if sequence is None:  # aborted while the step ran
                continue
            request = sequence.request
            request.progress.append(token)
            generated(request)
            if sequence.stuck:
                self._isolation.passed(sequence)
            reason = ended.pop(request_id, None) if ended else None
            detail = details.get(position) if details else None
            if detail is not None and sequence.scores:
                detail, sequence.scores = TokenDetail(detail.chosen, tuple(sequence.scores)), []
            sequence.mailbox.put(Output(sequence.index, token=token, detail=detail, reason=reason))
            if reason is not None:
                self._close(sequence, reason)
        for request_id, reason in ended.items():
            if (sequence := sequences.get(request_id)) is not None:
                error = step.errors.get(request_id, "")
                is_refused = request_id in step.refused
                sequence.mailbox.put(Output(sequence.index, reason=reason, error=error, is_refused=is_refused))
                self._close(sequence, reason)

    def _end(self, sequences: list[EngineSequence], reason: FinishReason) -> None:
        gone: dict[ConnectedEngine, list[int]] = {}
        for sequence in sequences:
            if sequence.id in self._places and (replica := self._close(sequence, reason)) is not None:
                gone.setdefault(replica, []).append(sequence.id)
        if not self.dead:
            for replica, ids in gone.items():
                replica.send(messages.Abort(ids, reason))

    def _close(self, sequence: EngineSequence, reason: FinishReason) -> ConnectedEngine | None:
        replica = self._places.pop(sequence.id)
        if sequence.alarm is not None:
            sequence.alarm.cancel()
        if sequence.patience is not None:
            sequence.patience.cancel()
        if replica is None:
            self._waiting.pop(sequence.id, None)
        else:
            del replica.sequences[sequence.id]
            self._dispatch.ended(sequence.request, reason)
        if sequence.on_end is not None:
            sequence.on_end(reason, len(sequence.request.progress.output))
        self._isolation.leave(sequence)
        return replica

    def _tell_replicas(self) -> None:
        self._metrics.set("replicas", self.wanted)
        self._metrics.set("replicas_alive", self.alive)
        self._metrics.set("replica_restarts_total", max(0, self._joined - self.wanted))

    def _tell_numbers(self) -> None:
        live = [replica.stats.metrics for replica in self._replicas.values()]
        self._metrics.engine(merged(live, gone=self._gone))
