from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

import msgspec

from skipjoin.adapters import Adapter
from skipjoin.core.request import Request
from skipjoin.core.step import StepPlan, StepResult
from skipjoin.exec.adapters import load_adapter
from skipjoin.exec.grammars_ahead import GrammarsAhead
from skipjoin.exec.graphs import DecodeGraphs
from skipjoin.exec.kv_store import KVStore
from skipjoin.exec.ranks.messages import (
    AdapterDone,
    AdapterMessage,
    Done,
    FromRank,
    MaskBegun,
    MaskDone,
    RankFailed,
    StepMasks,
)
from skipjoin.exec.ranks.plan_messages import MaskOrder, OutOfStepError, PlanReader
from skipjoin.exec.sampling import is_constrained
from skipjoin.exec.transfer import Copier
from skipjoin.exec.worker import Worker
from skipjoin.model.causal_lm import CausalLM
from skipjoin.model.cuda import is_out_of_memory
from skipjoin.model.errors import AdapterError
from skipjoin.model.grammar_mask import GrammarMask, GrammarState
from skipjoin.model.grammars import Grammars
from skipjoin.model.parallel import GroupError

_log = logging.getLogger(__name__)


class Rank:
    """Answers every plan, in order, from one thread. Masks ahead of the steps are answered when they are computed.

    A failed rank leaves the group, so that waiting ranks fail immediately. It computes nothing afterward, because its
    KV no longer matches. `send` is called by one thread at a time.
    """

    def __init__(
        self,
        model: CausalLM,
        store: KVStore,
        send: Callable[[bytes], object],
        *,
        grammars: Grammars,
        graphs: DecodeGraphs | None = None,
        copier: Copier | None = None,
    ) -> None:
        self._ahead = GrammarsAhead(GrammarMask(grammars), self._on_begin)
        self._worker = Worker(
            model, store, copier=copier, graphs=graphs, grammars=grammars, limit_of=self._ahead.state_of
        )
        self._plans = PlanReader()
        self._orders: dict[Request, int] = {}
        self._send_bytes, self._sending = send, threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()
        self._failure: RankFailed | None = None

    def run(self, message: bytes) -> None:
        """Run a message, and send the answer to a plan. Raises what `send` raises, and nothing else."""
        answer: FromRank | None = self._failure
        if answer is None:
            try:
                received = self._plans.read(message)
                for request in self._plans.finished:
                    self._on_finished(request)
                if isinstance(received, MaskOrder):
                    self._order(received)
                elif isinstance(received, AdapterMessage):
                    answer = self._adapt(received)
                else:
                    answer = self._answer(received, self._worker.run(received))
            except Exception as error:
                answer = self._fail(error)
        if answer is not None:
            self._send(answer)

    def close(self) -> None:
        self._ahead.close()
        self._worker.model.group.close()
        self._worker.close()

    def _send(self, answer: FromRank) -> None:
        with self._sending:
            self._send_bytes(self._encoder.encode(answer))

    def _on_finished(self, request: Request) -> None:
        self._worker.on_finished(request)
        self._ahead.on_finished(request)
        self._orders.pop(request, None)

    def _order(self, order: MaskOrder) -> None:
        number, request = order
        if not self._worker.model.shard.is_last:
            return
        self._orders[request] = number
        is_new = self._ahead.state_of(request) is None
        future = self._ahead.start(request) if is_new else self._ahead.advance(request)
        if future is None:
            self._send(MaskDone(number, is_slow=False, seconds=0.0))
        else:
            future.add_done_callback(lambda done: self._on_mask(number, done))

    def _adapt(self, order: AdapterMessage) -> AdapterDone | None:
        model = self._worker.model
        if not order.folder:
            model.adapters.unload(order.number)
            return None
        try:
            return AdapterDone(order.number, load_adapter(model, Adapter(order.number, order.name, order.folder)))
        except AdapterError as error:
            return AdapterDone(order.number, 0, str(error))

    def _on_begin(self, request: Request) -> None:
        if (number := self._orders.get(request)) is not None:
            with suppress(OSError):  # the connection is lost, which ends this process
                self._send(MaskBegun(number))

    def _on_mask(self, number: int, done: Future[GrammarState]) -> None:
        with suppress(OSError):
            if done.cancelled():
                self._send(MaskDone(number, is_slow=False, seconds=0.0))
            elif (error := done.exception()) is not None:
                self._send(self._failure or self._fail(error))
            else:
                state = done.result()
                self._send(MaskDone(number, state.is_slow, _uncharged_s(state)))

    def _masks(self, plan: StepPlan) -> list[StepMasks]:
        masks = []
        for index, slice_ in enumerate(plan.slices):
            if not slice_.samples or not is_constrained(slice_.request.sampling):
                continue
            if (state := self._ahead.state_of(slice_.request)) is not None:
                masks.append(StepMasks(index, state.is_slow, _uncharged_s(state)))
        return masks

    def _answer(self, plan: StepPlan, result: StepResult) -> Done:
        shard, plans = self._worker.model.shard, self._plans
        return Done(
            plan=plan.id,
            checksum=plans.checksum,
            tokens=list(result.tokens) if shard.is_last else [],
            seconds=result.seconds,
            idle=sum(stage.idle for stage in result.stages),
            moving=result.moving,
            completed=plans.numbers_of(result.completed),
            failed=plans.numbers_of(result.failed),
            details=dict(result.details) if shard.tp_rank == 0 else {},  # type: ignore[arg-type]
            dropped=dict(result.dropped),
            refused=list(result.refused),
            masks=self._masks(plan) if shard.is_last else [],
        )

    def _fail(self, error: BaseException) -> RankFailed:
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


def _uncharged_s(state: GrammarState) -> float:
    seconds, state.uncharged_s = state.uncharged_s, 0.0
    return seconds
