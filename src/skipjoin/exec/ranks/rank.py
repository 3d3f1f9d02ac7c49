from __future__ import annotations

import logging

import msgspec

from skipjoin.core.step import StepPlan, StepResult
from skipjoin.exec.ranks.messages import Done, FromRank, RankFailed
from skipjoin.exec.ranks.plan_messages import OutOfStepError, PlanReader
from skipjoin.exec.worker import Worker
from skipjoin.model.cuda import is_out_of_memory
from skipjoin.model.parallel import GroupError

_log = logging.getLogger(__name__)


class Rank:
    """Answers every plan, in order, from one thread.

    A rank that fails leaves the group, so that ranks waiting for it fail immediately. It computes nothing afterward,
    because its KV no longer matches.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._plans = PlanReader()
        self._encoder = msgspec.msgpack.Encoder()
        self._failure: RankFailed | None = None

    def run(self, message: bytes) -> bytes:
        """Run a plan and return an encoded `FromRank`. Never raises."""
        answer: FromRank
        if self._failure is not None:
            answer = self._failure
        else:
            try:
                plan = self._plans.read(message)
                for request in self._plans.finished:
                    self._worker.on_finished(request)
                answer = self._answer(plan, self._worker.run(plan))
            except Exception as error:
                answer = self._fail(error)
        return self._encoder.encode(answer)

    def close(self) -> None:
        self._worker.model.group.close()
        self._worker.close()

    def _answer(self, plan: StepPlan, result: StepResult) -> Done:
        shard, plans = self._worker.model.shard, self._plans
        return Done(
            plan=plan.id,
            checksum=plans.checksum,
            tokens=list(result.tokens) if shard.is_last else [],
            seconds=result.seconds,
            idle=sum(stage.idle for stage in result.stages),
            moving=result.moving,
            landed=plans.numbers_of(result.landed),
            failed=plans.numbers_of(result.failed),
            details=dict(result.details) if shard.tp_rank == 0 else {},  # type: ignore[arg-type]
            dropped=dict(result.dropped),
            refused=list(result.refused),
        )

    def _fail(self, error: Exception) -> RankFailed:
        group = self._worker.model.group
        _log.error("%s failed: %s", group.shard.name, error, exc_info=error)
        group.close()
        self._failure = RankFailed(
            f"{type(error).__name__}: {error}",
            lost_peer=isinstance(error, GroupError),
            out_of_step=isinstance(error, OutOfStepError),
            out_of_memory=is_out_of_memory(error),
        )
        return self._failure
