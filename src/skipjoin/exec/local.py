"""The executor that runs the model in this process, on one device."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch

from skipjoin.core.step import Direction, StepPlan, StepResult
from skipjoin.exec.graphs import DecodeGraphs
from skipjoin.exec.kv_store import KVStore
from skipjoin.exec.rank_spec import measure_transfers, rank_spec_of, touch
from skipjoin.exec.transfer import Copier
from skipjoin.exec.worker import InFlightStep, Worker
from skipjoin.model.causal_lm import CausalLM
from skipjoin.profile import Transfer


class LocalHandle:
    """A plan on its way through the model."""

    def __init__(self, worker: Worker, begun: Future[InFlightStep]) -> None:
        self._worker, self._begun = worker, begun
        self._result: StepResult | None = None

    def done(self) -> bool:
        if not self._begun.done():
            return False
        # A plan that failed has nothing more to wait for.
        return self._begun.exception() is not None or self._worker.is_done(self._begun.result())

    def result(self) -> StepResult:
        """See `Handle`; handles are asked in the order of their plans."""
        if self._result is None:
            self._result = self._worker.finish(self._begun.result())
        return self._result


class LocalExecutor:
    """Runs plans one after the other on a thread of its own, so that the engine decides, and talks to the world,
    while the model runs. On a GPU that thread only queues work: with two plans in flight the next is queued while one
    runs, and the GPU goes from one to the other without a pause.

    Every request's `sampling` is a `Sampling`. threads: CPU threads of the model; None: torch's default. copier,
    graphs: see `Worker`.
    """

    def __init__(
        self,
        model: CausalLM,
        store: KVStore,
        *,
        threads: int | None = None,
        copier: Copier | None = None,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self.model = model
        self.store = store
        self._worker = Worker(model, store, copier=copier, graphs=graphs)
        threads = threads or torch.get_num_threads()
        self._thread = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="skipjoin-model",
            # OpenMP keeps its thread count per calling thread.
            initializer=torch.set_num_threads,
            initargs=(threads,),
        )
        self.parts = (rank_spec_of(model, store.device.block_size, threads),)

    @property
    def pools(self) -> tuple[int, int, int]:
        """See `ModelExecutor`."""
        store = self.store
        return store.device.num_blocks, store.host.num_blocks if store.host else 0, store.device.block_size

    def touch(self, blocks: int) -> None:
        """See `ModelExecutor`."""
        touch(self.store.device, blocks)

    def transfers(self, seconds: float) -> dict[Direction, Transfer]:
        """See `ModelExecutor`."""
        return measure_transfers(self.model, self.store.device.block_size, seconds)

    def submit(self, plan: StepPlan, now: float) -> LocalHandle:
        return LocalHandle(self._worker, self._thread.submit(self._worker.begin, plan))

    def check(self) -> None:
        """See `ModelExecutor`."""

    def restart(self, reason: Exception) -> None:
        """The one rank is this process."""
        raise reason

    def close(self) -> None:
        """Wait for the running step and the running copy and end the threads. Plans that have not begun are
        cancelled, and so are moves."""
        self._thread.shutdown(cancel_futures=True)
        self._worker.close()
