from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from skipjoin.adapters import Adapter
from skipjoin.config.profile import Transfer
from skipjoin.core.request import Request
from skipjoin.core.step import LINK, Direction, StepPlan
from skipjoin.exec.base import RankError
from skipjoin.exec.rank_model import LOADING, OnProgress, RankModel
from skipjoin.exec.rank_spec import MemoryBudget, RankSpec
from skipjoin.exec.ranks.cluster import ClusterError
from skipjoin.exec.ranks.launch import GroupSizes, Launcher
from skipjoin.exec.ranks.links import RankListener
from skipjoin.exec.ranks.rank_masks import RankMasks
from skipjoin.exec.ranks.sharded import ShardedExecutor, ShardedHandle
from skipjoin.model.errors import AdapterError, ModelError
from skipjoin.model.parallel import Shard

_log = logging.getLogger(__name__)

# Maps the ranks' specs and memory budgets to the numbers of KV blocks on the device and in the CPU tier.
PoolsFor = Callable[[Sequence[RankSpec], Sequence[MemoryBudget]], tuple[int, int]]

# Timeouts in seconds: machines for ranks that restart, a connection, a plan.
_PATIENCE_S, _CONNECT_S, _PLAN_S = 30.0, 10.0, 120.0
# Interval in seconds of progress reports.
_LOOK_S = 0.1
# `max_restarts` bounds the restarts within this many seconds. Attempts are a second apart, in which Ray detects lost
# nodes.
_WINDOW_S, _BREATH_S = 600.0, 1.0


class RankGroup:
    """Ranks that start and end together. A constructor that raises leaves nothing running."""

    def __init__(
        self,
        launcher: Launcher,
        model: RankModel,
        sizes: GroupSizes,
        pools_for: PoolsFor,
        on_progress: OnProgress,
        *,
        patience_s: float = 0.0,
    ) -> None:
        self._executor: ShardedExecutor | None = None
        on_progress("starting ranks", 0.0)
        self.started = launcher.start(sizes, model.load.device, patience_s)
        try:
            self._start(launcher.ip, model, sizes, pools_for, on_progress)
        except BaseException:
            self.close()
            raise

    @property
    def executor(self) -> ShardedExecutor:
        assert self._executor is not None
        return self._executor

    def call(self, method: str, *arguments: Any) -> list[Any]:
        started = self.started
        return started.answers([started.begin(rank, method, *arguments) for rank in range(len(started.nodes))])

    def close(self) -> None:
        if self._executor is not None:
            self._executor.close()
        self.started.close()

    def _start(
        self, ip: str, model: RankModel, sizes: GroupSizes, pools_for: PoolsFor, on_progress: OnProgress
    ) -> None:
        started = self.started
        meeting = started.answers([started.begin(0, "open_store")])[0] if sizes.ranks > 1 else None
        here = Counter(started.nodes)
        loading = [
            started.begin(rank, "load", model, Shard.of_rank(rank, *sizes), meeting, here[node])
            for rank, node in enumerate(started.nodes)
        ]
        self._follow(loading, on_progress)
        found: list[tuple[RankSpec, MemoryBudget]] = started.answers(loading)
        self.rank_specs = tuple(spec for spec, _ in found)
        self.blocks = pools_for(self.rank_specs, [budget for _, budget in found])
        if not all(self.call("make_pools", *self.blocks)):
            self.call("forget_graphs")
        listener = RankListener(ip)
        try:
            for rank in range(sizes.ranks):
                started.begin(rank, "serve", listener.address, listener.secret)
            links = listener.accept(sizes.ranks, _CONNECT_S)
        finally:
            listener.close()
        self._executor = ShardedExecutor(links, tp_size=sizes.tp, timeout_s=_PLAN_S)

    def _follow(self, loading: Sequence[Any], on_progress: OnProgress) -> None:
        waiting = list(loading)
        while waiting:
            done, waiting = self.started.wait(waiting, _LOOK_S)
            self.started.answers(done)
            on_progress(LOADING, min(self.call("progress")) if waiting else 1.0)


class RankedExecutor:
    """`ModelExecutor` on separate processes. Restarts reuse the result of `pools_for`."""

    def __init__(
        self,
        model: RankModel,
        sizes: GroupSizes,
        pools_for: PoolsFor,
        *,
        launcher: Launcher,
        max_restarts: int,
        on_progress: OnProgress,
    ) -> None:
        self._model, self._sizes = model, sizes
        self._max_restarts = max_restarts
        self._on_progress = on_progress
        self._restarts: list[float] = []  # times of restarts
        self._launcher = launcher
        self._group: RankGroup | None = None
        try:
            self._group = RankGroup(launcher, model, sizes, pools_for, on_progress)
        except BaseException:
            self.close()
            raise
        self.rank_specs = self._group.rank_specs
        self._adapters = {adapter.number: adapter for adapter in model.adapters}
        self.pools = (*self._group.blocks, model.block_size)

    def submit(self, plan: StepPlan, now: float) -> ShardedHandle:
        return self._live.executor.submit(plan, now)

    def on_finished(self, request: Request) -> None:
        if self._group is not None:
            self._group.executor.on_finished(request)

    @property
    def grammars(self) -> None:
        return None

    @property
    def ahead(self) -> RankMasks:
        return self._live.executor.ahead

    def load_adapter(self, adapter: Adapter) -> int:
        found = self._live.executor.load_adapter(adapter)
        self._adapters[adapter.number] = adapter
        return found

    def unload_adapter(self, number: int) -> None:
        self._adapters.pop(number, None)
        self._live.executor.unload_adapter(number)

    def check(self) -> None:
        self._live.executor.check()

    def restart(self, reason: Exception) -> None:
        began, blocks = time.monotonic(), self.pools[:2]
        while True:
            _log.warning("restarting all ranks: %s", reason)
            if self._group is not None:
                self._group.close()
                self._group = None
            self._count(reason)
            try:
                self._group = RankGroup(
                    self._launcher,
                    self._model._replace(adapters=()),
                    self._sizes,
                    lambda rank_specs, budgets: blocks,
                    self._on_progress,
                    patience_s=_PATIENCE_S,
                )
                self._load_again()
            except (RankError, ClusterError, ModelError) as error:
                reason = error
                time.sleep(_BREATH_S)
                continue
            _log.warning("the ranks were restarted in %.1f s", time.monotonic() - began)
            return

    def _load_again(self) -> None:
        for adapter in self._adapters.values():
            try:
                self._live.executor.load_adapter(adapter)
            except AdapterError as error:
                _log.error("requests with this adapter fail from here on: %s", error)

    states = None  # a model with states runs on one rank of this process

    def touch(self, blocks: Sequence[int]) -> None:
        self._live.call("touch", blocks)

    def transfers(self, seconds: float) -> dict[Direction, Transfer]:
        found: list[dict[Direction, Transfer]] = self._live.call("transfers", seconds)
        size = self._sizes.tp
        stages = [found[first : first + size] for first in range(0, len(found), size)]
        return {
            direction: Transfer(
                sum(max(rank[direction].floor for rank in stage) for stage in stages),
                sum(max(rank[direction].block for rank in stage) for stage in stages),
            )
            for direction in LINK
        }

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
        self._launcher.close()

    @property
    def _live(self) -> RankGroup:
        if self._group is None:
            raise RankError("the ranks are not running")
        return self._group

    def _count(self, reason: Exception) -> None:
        now = time.monotonic()
        self._restarts = [at for at in self._restarts if at > now - _WINDOW_S]
        if len(self._restarts) >= self._max_restarts:
            raise RankError(
                f"{reason}; the ranks are not restarted: max_restarts {self._max_restarts} within "
                f"{_WINDOW_S / 60:g} minutes is reached"
            )
        self._restarts.append(now)
