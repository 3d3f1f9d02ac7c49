from __future__ import annotations

import time
from collections import deque
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from skipjoin.adapters import Adapter
from skipjoin.core.request import Request
from skipjoin.core.step import Move, StageTime, StepPlan, StepResult
from skipjoin.exec.base import RankError, RankMemoryError
from skipjoin.exec.ranks.links import TcpLink
from skipjoin.exec.ranks.messages import (
    FROM_RANK_DECODER,
    AdapterDone,
    AdapterMessage,
    Done,
    MaskBegun,
    MaskDone,
    RankFailed,
)
from skipjoin.exec.ranks.plan_messages import OutOfStepError, PlanWriter
from skipjoin.exec.ranks.rank_masks import RankMasks
from skipjoin.model.errors import AdapterError
from skipjoin.model.parallel import Shard

# Seconds that the other ranks have to report the cause after a rank reported that it lost another.
_GRACE_S = 2.0
# Interval in seconds at which the other ranks are checked while one is awaited: a failed rank may be the cause.
_LOOK_S = 0.1


class ShardedHandle:
    def __init__(self, executor: ShardedExecutor, plan: StepPlan, checksum: bytes) -> None:
        self.plan, self.checksum = plan, checksum
        self.outcome: StepResult | None = None
        self._executor = executor

    def done(self) -> bool:
        return self._executor.settle(self, wait=False)

    def result(self) -> StepResult:
        self._executor.settle(self, wait=True)
        assert self.outcome is not None
        return self.outcome


@dataclass(slots=True)
class _OnWay:
    move: Move
    ranks: int
    failed: bool = False


class ShardedExecutor:
    """Executor that broadcasts plans to ranks, which are in rank order.

    A move has completed once it has completed on every rank, and failed if it failed on any. With pipeline stages, use
    `Scheduler(depth=stages, overlap=False)`: no slice may await a token. `timeout_s` limits a plan, from the call of
    `result`.
    """

    def __init__(self, links: Sequence[TcpLink], *, tp_size: int, timeout_s: float) -> None:
        if not links or len(links) % tp_size:
            raise ValueError(f"{len(links)} ranks cannot form stages of tp_size {tp_size}")
        self._links = links
        self._shards = [Shard.of_rank(rank, tp_size, len(links) // tp_size) for rank in range(len(links))]
        self._timeout_s = timeout_s
        self._writer = PlanWriter()
        self._pending: deque[ShardedHandle] = deque()
        # Per rank, answers to plans that were read from its link ahead of time.
        self._early: list[deque[Done | RankFailed]] = [deque() for _ in links]
        sampling = [shard.rank for shard in self._shards if shard.is_last]
        self.ahead = RankMasks(sampling, self._order, self._receive_masks)
        self._adapted: list[deque[AdapterDone]] = [deque() for _ in links]
        self._on_way: dict[int, _OnWay] = {}
        self._moves = 0
        self._failure: Exception | None = None

    def submit(self, plan: StepPlan, now: float) -> ShardedHandle:
        message = self._writer.write(plan)
        for move in (*plan.blocking, *plan.overlapped):
            self._on_way[self._moves] = _OnWay(move, len(self._links))
            self._moves += 1
        handle = ShardedHandle(self, plan, self._writer.checksum)
        self._pending.append(handle)
        self._broadcast(message)
        return handle

    def on_finished(self, request: Request) -> None:
        self._writer.on_finished(request)
        self.ahead.on_finished(request)

    def load_adapter(self, adapter: Adapter) -> int:
        self._broadcast(self._writer.write_adapter(AdapterMessage(*adapter)))
        deadline = time.monotonic() + self._timeout_s
        answers = [self._adapter_answer(rank, deadline) for rank in range(len(self._links))]
        if errors := [answer.error for answer in answers if answer.error]:
            self.unload_adapter(adapter.number)
            raise AdapterError(errors[0])
        return sum(answer.bytes for answer in answers)

    def unload_adapter(self, number: int) -> None:
        self._broadcast(self._writer.write_adapter(AdapterMessage(number)))

    def check(self) -> None:
        if not self._pending:
            self._receive_masks()

    def close(self) -> None:
        for link in self._links:
            link.close()

    def settle(self, handle: ShardedHandle, *, wait: bool) -> bool:
        """Return whether the handle has its outcome or cannot get one. With `wait`, wait, or raise what prevents it."""
        while handle.outcome is None and self._failure is None:
            try:
                if not wait and not self._can_settle():
                    return False
                self._settle_next()
            except Exception as error:
                self._failure = error
        if wait and handle.outcome is None and self._failure is not None:
            raise self._failure
        return True

    def _broadcast(self, message: bytes) -> None:
        for link in self._links:
            link.send(message)

    def _adapter_answer(self, rank: int, deadline: float) -> AdapterDone:
        early, adapted = self._early[rank], self._adapted[rank]
        while not adapted:
            if early and isinstance(answer := early[-1], RankFailed):
                raise self._error(rank, answer)
            try:
                self._read(rank, max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                name = self._shards[rank].name
                raise RankError(f"{name} did not load an adapter within {self._timeout_s:g} s") from None
        return adapted.popleft()

    def _order(self, request: Request) -> int:
        number, message = self._writer.write_mask(request)
        self._broadcast(message)
        return number

    def _receive_masks(self, rank: int | None = None, timeout_s: float = 0.0) -> None:
        if rank is not None:
            with suppress(TimeoutError):
                self._read(rank, timeout_s)
        for number, link in enumerate(self._links):
            while link.is_ready():
                self._read(number, 0.0)
        if self._pending:
            return
        for number, early in enumerate(self._early):
            if early and isinstance(answer := early[0], RankFailed):
                raise self._cause(answer, number, ())
            if early:
                raise RankError(f"unexpected message of a rank: {early[0]}")

    def _can_settle(self) -> bool:
        """Return whether all ranks have answered or one has failed: with NCCL, others may wait for it for a minute."""
        for rank, (early, link) in enumerate(zip(self._early, self._links, strict=True)):
            while not early and link.is_ready():
                self._read(rank, 0.0)
        return all(self._early) or any(early and isinstance(early[0], RankFailed) for early in self._early)

    def _settle_next(self) -> None:
        answers = self._answers()
        handle = self._pending.popleft()
        plan = handle.plan
        for shard, answer in zip(self._shards, answers, strict=True):
            if answer.plan != plan.id:
                raise OutOfStepError(f"{shard.name} answered plan {answer.plan} in place of plan {plan.id}")
            if answer.checksum != handle.checksum:
                raise OutOfStepError(f"{shard.name} received other plans than were sent, up to plan {plan.id}")
        sampling = [answer for shard, answer in zip(self._shards, answers, strict=True) if shard.is_last]
        if any(answer.tokens != sampling[0].tokens for answer in sampling):
            raise OutOfStepError(f"plan {plan.id}: the ranks of the last stage sampled different tokens")
        size = self._shards[0].tp_size
        stages = [answers[first : first + size] for first in range(0, len(answers), size)]
        # The ranks of a stage wait for each other, so the slowest rank's time is the stage's.
        times = [
            StageTime(max(timing.seconds for timing in stage), min(timing.idle for timing in stage)) for stage in stages
        ]
        completed, failed = self._ended(answers)
        handle.outcome = StepResult(
            plan=plan,
            tokens=sampling[0].tokens,
            seconds=sum(time.busy for time in times),
            details=sampling[0].details,
            moving=sum(max(rank.moving for rank in stage) for stage in stages),
            completed=completed,
            failed=failed,
            stages=tuple(times) if len(times) > 1 else (),
            # A rank may exceed a limit of time before the others.
            dropped={index: why for answer in reversed(sampling) for index, why in answer.dropped.items()},
            refused=sorted({index for answer in sampling for index in answer.refused}),
        )
        for masks in zip(*(answer.masks for answer in sampling), strict=True):
            if (state := self.ahead.state_of(plan.slices[masks[0].slice].request)) is not None:
                state.note([(mask.is_slow, mask.seconds) for mask in masks])

    def _answers(self) -> list[Done]:
        deadline = time.monotonic() + self._timeout_s
        answers: dict[int, Done] = {}
        missing = deque(range(len(self._links)))
        while missing:
            rank, left = missing[0], deadline - time.monotonic()
            try:
                answer = self._receive(rank, max(0.0, min(left, _LOOK_S)))
            except TimeoutError:
                if left <= 0:
                    name = self._shards[min(missing)].name
                    raise RankError(f"{name} did not answer within {self._timeout_s:g} s") from None
                missing.rotate(-1)  # another rank may report the cause
                self._look_at(answers)
                continue
            if isinstance(answer, RankFailed):
                raise self._cause(answer, rank, answers)
            answers[rank] = answer
            missing.popleft()
        return [answers[rank] for rank in range(len(self._links))]

    def _receive(self, rank: int, timeout_s: float) -> Done | RankFailed:
        while not self._early[rank]:
            self._read(rank, timeout_s)
        return self._early[rank].popleft()

    def _read(self, rank: int, timeout_s: float) -> None:
        answer = FROM_RANK_DECODER.decode(self._links[rank].receive(timeout_s))
        if isinstance(answer, MaskBegun | MaskDone):
            self.ahead.on_answer(rank, answer)
        elif isinstance(answer, AdapterDone):
            self._adapted[rank].append(answer)
        else:
            self._early[rank].append(answer)

    def _look_at(self, ranks: Iterable[int]) -> None:
        """Raise `RankError` if a rank that has answered is lost, because its activations may not have arrived."""
        for rank in ranks:
            if self._links[rank].is_ready():
                self._read(rank, 0.0)

    def _cause(self, failure: RankFailed, rank: int, answered: Container[int]) -> Exception:
        failed = self._error(rank, failure)
        if not failure.lost_peer:
            return failed
        deadline = time.monotonic() + _GRACE_S
        for other in range(len(self._links)):
            answer: Done | RankFailed | None = None
            owed = 0 if other == rank else len(self._pending) - (other in answered)
            while owed and not isinstance(answer, RankFailed):
                try:
                    answer = self._receive(other, max(0.0, deadline - time.monotonic()))
                except RankError as gone:
                    return gone
                except TimeoutError:
                    break
                owed -= 1
            if isinstance(answer, RankFailed) and not answer.lost_peer:
                return self._error(other, answer)
        return failed

    def _error(self, rank: int, failure: RankFailed) -> Exception:
        kind: type[Exception] = RankMemoryError if failure.out_of_memory else RankError
        if failure.out_of_step:
            kind = OutOfStepError
        return kind(f"{self._shards[rank].name} failed: {failure.text}")

    def _ended(self, answers: Sequence[Done]) -> tuple[list[Move], list[Move]]:
        completed: list[Move] = []
        failed: list[Move] = []
        for answer in answers:
            for numbers, has_failed in ((answer.completed, False), (answer.failed, True)):
                for number in numbers:
                    on_way = self._on_way[number]
                    on_way.ranks -= 1
                    on_way.failed = on_way.failed or has_failed
                    if not on_way.ranks:
                        (failed if on_way.failed else completed).append(on_way.move)
                        del self._on_way[number]
        return completed, failed
