from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from skipjoin.adapters import Adapter
from skipjoin.config.profile import Transfer
from skipjoin.core.request import Request
from skipjoin.core.step import LINK, Direction, StepPlan
from skipjoin.exec.base import RankError
from skipjoin.exec.rank_model import LOADING, OnProgress, RankModel
from skipjoin.exec.rank_spec import MemoryBudget, RankSpec
from skipjoin.exec.ranks.cluster import Cluster, ClusterError, import_ray
from skipjoin.exec.ranks.links import RankListener
from skipjoin.exec.ranks.nodes import Node, excluding, known_nodes, silent
from skipjoin.exec.ranks.rank_actor import RankActor, RankPlace, versions
from skipjoin.exec.ranks.rank_masks import RankMasks
from skipjoin.exec.ranks.sharded import ShardedExecutor, ShardedHandle
from skipjoin.model.config import AdapterError, ModelError
from skipjoin.model.parallel import Shard

_log = logging.getLogger(__name__)

# Maps the ranks' specs and memory budgets to the numbers of KV blocks on the device and in the CPU tier.
PoolsFor = Callable[[Sequence[RankSpec], Sequence[MemoryBudget]], tuple[int, int]]

# Timeouts in seconds: placement, a call of a rank, a connection, a plan.
_PLACE_S, _START_S, _CONNECT_S, _PLAN_S = 30.0, 120.0, 10.0, 120.0
# Intervals in seconds: progress reports, and checks that the nodes of pending calls are reachable.
_LOOK_S, _WATCH_S = 0.1, 1.0
# `max_restarts` bounds the restarts within this many seconds. Attempts are a second apart, in which Ray detects lost
# nodes.
_WINDOW_S, _BREATH_S = 600.0, 1.0


class GroupSizes(NamedTuple):
    tp: int
    pp: int

    @property
    def ranks(self) -> int:
        return self.tp * self.pp


class RankGroup:
    """One generation of ranks, which start and end together. A constructor that raises leaves nothing running."""

    def __init__(
        self,
        cluster: Cluster,
        model: RankModel,
        sizes: GroupSizes,
        pools_for: PoolsFor,
        on_progress: OnProgress,
        *,
        patience_s: float = 0.0,
    ) -> None:
        self._ray = import_ray()
        self._sizes = sizes
        self._placed: Any = None
        self._nodes: list[Node] = []  # nodes that have a rank
        self._actors: list[Any] = []
        self._executor: ShardedExecutor | None = None
        try:
            self._start(cluster, model, pools_for, on_progress, patience_s)
        except BaseException:
            self.close()
            raise

    @property
    def executor(self) -> ShardedExecutor:
        assert self._executor is not None
        return self._executor

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return self._answers([actor.call.remote(method, *arguments) for actor in self._actors])

    def close(self) -> None:
        if self._executor is not None:
            self._executor.close()
        for actor in self._actors:
            self._ray.kill(actor)
        if self._placed is not None:
            self._ray.util.remove_placement_group(self._placed)
        self._executor, self._actors, self._placed = None, [], None

    # -- starting -----------------------------------------------------------------------------------------

    def _start(
        self, cluster: Cluster, model: RankModel, pools_for: PoolsFor, on_progress: OnProgress, patience_s: float
    ) -> None:
        sizes = self._sizes
        on_progress("placing ranks", 0.0)
        self._place(model.load.device, patience_s)
        self.places: list[RankPlace] = self._answers([actor.place.remote() for actor in self._actors])
        self._check_versions()
        meeting = self._answers([self._actors[0].open_store.remote()])[0] if sizes.ranks > 1 else None
        here = Counter(place.node for place in self.places)
        loading = [
            actor.call.remote("load", model, Shard.of_rank(rank, *sizes), meeting, here[self.places[rank].node])
            for rank, actor in enumerate(self._actors)
        ]
        self._follow(loading, on_progress)
        found: list[tuple[RankSpec, MemoryBudget]] = self._answers(loading)
        self.rank_specs = tuple(spec for spec, _ in found)
        self.blocks = pools_for(self.rank_specs, [budget for _, budget in found])
        if not all(self.call("make_pools", *self.blocks)):
            self.call("forget_graphs")
        listener = RankListener(cluster.ip)
        try:
            for actor in self._actors:
                actor.call.remote("serve", listener.address, listener.secret)
            links = listener.accept(sizes.ranks, _CONNECT_S)
        finally:
            listener.close()
        self._executor = ShardedExecutor(links, tp_size=sizes.tp, timeout_s=_PLAN_S)

    def _place(self, device: str, patience_s: float) -> None:
        ray, sizes = self._ray, self._sizes
        nodes, cut_off, kind = self._usable_nodes(device, patience_s)
        stage = {"CPU": float(sizes.tp), kind: float(sizes.tp)}
        self._placed = ray.util.placement_group(
            [stage] * sizes.pp,
            strategy="PACK",
            bundle_label_selector=[excluding(cut_off)] * sizes.pp if cut_off else None,
        )
        if not self._placed.wait(_PLACE_S):
            raise RankError(f"the cluster has no free {kind}s for {self._layout()} at present")
        chosen = set(ray.util.placement_group_table(self._placed)["bundles_to_node_id"].values())
        self._nodes = [node for node in nodes if node.name in chosen]
        # Without max_restarts: all ranks restart together, and Ray gives up actors that exit with code 0.
        actor = ray.remote(num_cpus=1, num_gpus=int(kind == "GPU"), max_concurrency=2)(RankActor)
        for rank in range(sizes.ranks):
            strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                self._placed, placement_group_bundle_index=rank // sizes.tp
            )
            self._actors.append(actor.options(scheduling_strategy=strategy).remote())

    def _usable_nodes(self, device: str, patience_s: float) -> tuple[list[Node], list[Node], str]:
        deadline = time.monotonic() + patience_s
        while True:
            known = known_nodes()
            cut_off = silent(known)
            nodes = [node for node in known if node not in cut_off]
            kind = (
                "GPU" if device == "cuda" or (device == "auto" and any("GPU" in node.has for node in nodes)) else "CPU"
            )
            if sum(int(node.has.get(kind, 0.0)) // self._sizes.tp for node in nodes) >= self._sizes.pp:
                return nodes, cut_off, kind
            if time.monotonic() >= deadline:
                break
            time.sleep(_WATCH_S)
        have = ", ".join(f"{amount:g}" for amount in sorted((node.has.get(kind, 0.0) for node in nodes), reverse=True))
        lost = f"; {_ips(cut_off)} cannot be reached" if cut_off else ""
        raise ClusterError(
            f"{self._layout()} needs {self._sizes.pp} times {self._sizes.tp} {kind}s on one node, "
            f"the cluster's nodes have {have}{lost}"
        )

    def _layout(self) -> str:
        return f"tensor_parallel_size {self._sizes.tp} x pipeline_parallel_size {self._sizes.pp}"

    def _check_versions(self) -> None:
        for place in self.places:
            for name, ours in versions().items():
                if (theirs := place.versions[name]) != ours:
                    raise ClusterError(f"node {place.ip} has {name} {theirs}, this node has {ours}; they must be equal")

    def _follow(self, loading: Sequence[Any], on_progress: OnProgress) -> None:
        waiting = list(loading)
        while waiting:
            done, waiting = self._ray.wait(waiting, num_returns=1, timeout=_LOOK_S)
            self._answers(done)
            on_progress(LOADING, min(self.call("progress")) if waiting else 1.0)

    def _answers(self, calls: Sequence[Any]) -> list[Any]:
        errors = self._ray.exceptions
        deadline = time.monotonic() + _START_S
        try:
            while True:
                try:
                    return list(self._ray.get(list(calls), timeout=_WATCH_S))
                except errors.GetTimeoutError as late:
                    if cut_off := silent(self._nodes):
                        raise RankError(f"a rank was lost: {_ips(cut_off)} cannot be reached") from late
                    if time.monotonic() > deadline:
                        raise RankError(f"a rank did not answer within {_START_S:g} s") from late
        except errors.RayTaskError as failed:
            cause = failed.cause
            if isinstance(cause, ModelError | RankError):
                raise cause from None
            raise RankError(f"a rank cannot start: {type(cause).__name__}: {cause}") from failed
        except errors.RayError as gone:
            lines = str(gone).strip().splitlines()
            raise RankError(f"a rank was lost: {lines[0] if lines else type(gone).__name__}") from gone


def _ips(nodes: Sequence[Node]) -> str:
    return ", ".join(f"node {node.ip}" for node in nodes)


class RankedExecutor:
    """`ModelExecutor` on separate processes. Restarts reuse the result of `pools_for`."""

    def __init__(
        self,
        model: RankModel,
        sizes: GroupSizes,
        pools_for: PoolsFor,
        *,
        address: str | None,
        max_restarts: int,
        on_progress: OnProgress,
    ) -> None:
        self._model, self._sizes = model, sizes
        self._max_restarts = max_restarts
        self._on_progress = on_progress
        self._restarts: list[float] = []  # times of restarts
        on_progress("starting Ray" if address is None else "joining Ray", 0.0)
        self._cluster = Cluster.start(sizes.ranks) if address is None else Cluster.join(address)
        self._group: RankGroup | None = None
        try:
            self._group = RankGroup(self._cluster, model, sizes, pools_for, on_progress)
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
                    self._cluster,
                    self._model._replace(adapters=()),
                    self._sizes,
                    lambda rank_specs, budgets: blocks,
                    self._on_progress,
                    patience_s=_PLACE_S,
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
                sum(max(one[direction].floor for one in stage) for stage in stages),
                sum(max(one[direction].block for one in stage) for stage in stages),
            )
            for direction in LINK
        }

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
        self._cluster.close()

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
