from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

import torch

from skipjoin.adapters import Adapter
from skipjoin.config.profile import Transfer
from skipjoin.core.request import Request
from skipjoin.core.step import Direction, StateSizes, StepPlan, StepResult
from skipjoin.exec.adapters import load_adapter
from skipjoin.exec.grammars_ahead import GrammarsAhead
from skipjoin.exec.graphs import DecodeGraphs
from skipjoin.exec.kv_store import KVStore
from skipjoin.exec.model_threads import CallerThread, OwnThread
from skipjoin.exec.rank_spec import measure_transfers, rank_spec_of, touch
from skipjoin.exec.transfer import Copier
from skipjoin.exec.worker import InFlightStep, Worker
from skipjoin.model.causal_lm import CausalLM
from skipjoin.model.cuda import use_device
from skipjoin.model.grammar_mask import GrammarMask
from skipjoin.model.grammars import Grammars


class LocalHandle:
    def __init__(self, worker: Worker, in_flight: Future[InFlightStep]) -> None:
        self._worker, self._in_flight = worker, in_flight
        self._result: StepResult | None = None

    def done(self) -> bool:
        if not self._in_flight.done():
            return False
        # A failed plan is done.
        return self._in_flight.exception() is not None or self._worker.is_done(self._in_flight.result())

    def result(self) -> StepResult:
        """Return the plan's result. Call in submission order."""
        if self._result is None:
            self._result = self._worker.finish(self._in_flight.result())
        return self._result


class LocalExecutor:
    """Runs plans on a thread, which only queues work on a GPU; if `is_deferred`, on the one that asks for a result."""

    def __init__(
        self,
        model: CausalLM,
        store: KVStore,
        *,
        threads: int | None = None,
        copier: Copier | None = None,
        graphs: DecodeGraphs | None = None,
        grammars: Grammars | None = None,
        is_deferred: bool = False,
    ) -> None:
        self.model = model
        self.store = store
        self.grammars = grammars
        self.ahead = GrammarsAhead(GrammarMask(grammars)) if grammars is not None else None
        self._worker = Worker(
            model,
            store,
            copier=copier,
            graphs=graphs,
            grammars=grammars,
            limit_of=self.ahead.state_of if self.ahead is not None else lambda request: None,
        )
        threads = threads or torch.get_num_threads()
        self._thread: OwnThread | CallerThread = (CallerThread if is_deferred else OwnThread)(model, threads)
        self.rank_specs = (rank_spec_of(model, store.device.block_size, threads, store.swap_dtype),)

    @property
    def pools(self) -> tuple[int, int, int]:
        store = self.store
        return store.device.num_blocks, store.cpu.num_blocks if store.cpu else 0, store.device.block_size

    @property
    def states(self) -> StateSizes | None:
        return self.store.states

    def touch(self, blocks: Sequence[int]) -> None:
        touch(self.store.device, blocks)

    def transfers(self, seconds: float) -> dict[Direction, Transfer]:
        use_device(self.model.device)  # the calling thread launches the copies
        return measure_transfers(self.model, self.store.device.block_size, seconds, self.store.swap_dtype)

    def submit(self, plan: StepPlan, now: float) -> LocalHandle:
        return LocalHandle(self._worker, self._thread.submit(partial(self._worker.begin, plan)))

    def on_finished(self, request: Request) -> None:
        self._thread.after_these(partial(self._forget, request))

    def _forget(self, request: Request) -> None:
        self._worker.on_finished(request)
        if self.ahead is not None:
            self.ahead.on_finished(request)

    def load_adapter(self, adapter: Adapter) -> int:
        return self._thread.submit(partial(load_adapter, self.model, adapter)).result()

    def unload_adapter(self, number: int) -> None:
        self._thread.after_these(partial(self.model.adapters.unload, number))

    def check(self) -> None: ...

    def restart(self, reason: Exception) -> None:
        raise reason

    def close(self) -> None:
        if self.ahead is not None:
            self.ahead.close()
        self._thread.close()
        self._worker.close()
