from __future__ import annotations

import platform
import runpy
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from skipjoin.exec.base import RankError
from skipjoin.exec.ranks.cluster import Cluster, ClusterError, import_ray
from skipjoin.exec.ranks.launch import START_S, GroupSizes
from skipjoin.exec.ranks.nodes import Node, excluding, known_nodes, silent
from skipjoin.exec.ranks.rank_host import RankHost
from skipjoin.model.errors import ModelError
from skipjoin.version import VERSION

# Timeout in seconds for placement, and interval of checks that the nodes of pending calls are reachable.
_PLACE_S, _WATCH_S = 30.0, 1.0


class RankPlace(NamedTuple):
    node: str
    ip: str
    versions: dict[str, str]


def versions() -> dict[str, str]:
    return {
        "Skipjoin": VERSION,
        "Python": platform.python_version(),
        "torch": _torch_version(),
        "Ray": import_ray().__version__,
    }


def _torch_version() -> str:
    if (found := find_spec("torch")) is None or found.origin is None:
        raise RankError(f"torch is not installed for {sys.executable}")
    version: str = runpy.run_path(str(Path(found.origin).with_name("version.py")))["__version__"]
    return version


class RankActor(RankHost):
    def __init__(self) -> None:
        self._node_ip: str = import_ray().util.get_node_ip_address()
        super().__init__(self._node_ip)

    def place(self) -> RankPlace:
        return RankPlace(import_ray().get_runtime_context().get_node_id(), self._node_ip, versions())

    def call(self, method: str, *arguments: Any) -> Any:
        answer = super().call(method, *arguments)
        if method == "serve":  # its connection broke, and so has the group
            import_ray().actor.exit_actor()
        return answer


class RayRanks:
    def __init__(self, sizes: GroupSizes, device: str, patience_s: float) -> None:
        self._ray = import_ray()
        self._sizes = sizes
        self._placed: Any = None
        self._used: list[Node] = []  # nodes that have a rank
        self._actors: list[Any] = []
        try:
            self._place(device, patience_s)
            places: list[RankPlace] = self.answers([actor.place.remote() for actor in self._actors])
            _check_versions(places)
        except BaseException:
            self.close()
            raise
        self.nodes = [place.node for place in places]

    def begin(self, rank: int, method: str, *arguments: Any) -> Any:
        return self._actors[rank].call.remote(method, *arguments)

    def wait(self, calls: Sequence[Any], timeout_s: float) -> tuple[list[Any], list[Any]]:
        done, waiting = self._ray.wait(list(calls), num_returns=1, timeout=timeout_s)
        return list(done), list(waiting)

    def answers(self, calls: Sequence[Any]) -> list[Any]:
        errors = self._ray.exceptions
        deadline = time.monotonic() + START_S
        try:
            while True:
                try:
                    return list(self._ray.get(list(calls), timeout=_WATCH_S))
                except errors.GetTimeoutError as late:
                    if cut_off := silent(self._used):
                        raise RankError(f"a rank was lost: {_ips(cut_off)} cannot be reached") from late
                    if time.monotonic() > deadline:
                        raise RankError(f"a rank did not answer within {START_S:g} s") from late
        except errors.RayTaskError as failed:
            cause = failed.cause
            if isinstance(cause, ModelError | RankError):
                raise cause from None
            raise RankError(f"a rank cannot start: {type(cause).__name__}: {cause}") from failed
        except errors.RayError as gone:
            lines = str(gone).strip().splitlines()
            raise RankError(f"a rank was lost: {lines[0] if lines else type(gone).__name__}") from gone

    def close(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        if self._placed is not None:
            self._ray.util.remove_placement_group(self._placed)
        self._actors, self._placed = [], None

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
            raise RankError(f"the cluster has no free {kind}s for {sizes} at present")
        chosen = set(ray.util.placement_group_table(self._placed)["bundles_to_node_id"].values())
        self._used = [node for node in nodes if node.name in chosen]
        # Without max_restarts: all ranks restart together, and Ray gives up actors that exit with code 0.
        actor = ray.remote(num_cpus=1, num_gpus=int(kind == "GPU"), max_concurrency=2)(RankActor)
        for rank in range(sizes.ranks):
            strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                self._placed, placement_group_bundle_index=rank // sizes.tp
            )
            self._actors.append(actor.options(scheduling_strategy=strategy).remote())

    def _usable_nodes(self, device: str, patience_s: float) -> tuple[list[Node], list[Node], str]:
        deadline, sizes = time.monotonic() + patience_s, self._sizes
        while True:
            known = known_nodes()
            cut_off = silent(known)
            nodes = [node for node in known if node not in cut_off]
            kind = (
                "GPU" if device == "cuda" or (device == "auto" and any("GPU" in node.has for node in nodes)) else "CPU"
            )
            if sum(int(node.has.get(kind, 0.0)) // sizes.tp for node in nodes) >= sizes.pp:
                return nodes, cut_off, kind
            if time.monotonic() >= deadline:
                break
            time.sleep(_WATCH_S)
        have = ", ".join(f"{amount:g}" for amount in sorted((node.has.get(kind, 0.0) for node in nodes), reverse=True))
        lost = f"; {_ips(cut_off)} cannot be reached" if cut_off else ""
        raise ClusterError(
            f"{sizes} needs {sizes.pp} times {sizes.tp} {kind}s on one node, the cluster's nodes have {have}{lost}"
        )


class RayLauncher:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.ip = cluster.ip

    def start(self, sizes: GroupSizes, device: str, patience_s: float) -> RayRanks:
        return RayRanks(sizes, device, patience_s)

    def close(self) -> None:
        self._cluster.close()


def _check_versions(places: Sequence[RankPlace]) -> None:
    for place in places:
        for name, ours in versions().items():
            if (theirs := place.versions[name]) != ours:
                raise ClusterError(f"node {place.ip} has {name} {theirs}, this node has {ours}; they must be equal")


def _ips(nodes: Sequence[Node]) -> str:
    return ", ".join(f"node {node.ip}" for node in nodes)
