"""Ray Serve as the supervisor of replicas: it starts them, checks their health, and replaces those that die.

Nothing else of Serve is used: there is no proxy, and no request goes through it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from skipjoin.exec.ranks.cluster import ClusterError, import_ray
from skipjoin.version import install_command

# Seconds between two health checks by Serve; after three failures it replaces the replica.
_HEALTH_S = 0.5
# Seconds without an answer after which Serve replaces a replica, whose machine may be busy.
_HEALTH_TIMEOUT_S = 20.0
# Seconds that a replica has to end before it is killed.
_END_S = 5.0
# Failed starts after which Serve reports the first start of all replicas as failed.
_TRIES = 3


class Needs(NamedTuple):
    """The resources of one replica.

    cpus: of its engine, on one node. device: auto, cpu or cuda; with a GPU the engine takes one. ranks: processes that
    the engine places itself, each with a CPU, and with the GPUs; 0: the engine has the model in its own process.
    """

    cpus: int
    device: str
    ranks: int = 0

    @property
    def all_cpus(self) -> int:
        """CPUs of the replica and its ranks together."""
        return 1 + self.ranks if self.ranks else self.cpus


class ReplicaSupervisor:
    """Keeps replicas alive in the cluster that this process has joined. All calls block, and are made by one thread.

    name: of the application, unique in the cluster. is_alone: whether the cluster is this program's own, and ends with
    it.
    """

    def __init__(self, name: str, *, is_alone: bool) -> None:
        self.name = name
        self._is_alone = is_alone

    def deploy(self, kind: type, arguments: Sequence[Any], *, replicas: int, needs: Needs) -> None:
        """Start replicas of a class with these arguments. Its `check_health` raises if the replica is unhealthy.

        Raises `ClusterError` if the cluster has too few CPUs or GPUs.
        """
        serve = _import_serve()
        nodes = [node["Resources"] for node in import_ray().nodes() if node["Alive"]]
        gpus = check_room(replicas, needs, nodes)
        quiet = {"log_level": "ERROR", "enable_access_log": False}
        serve.start(proxy_location="Disabled", logging_config=quiet)
        deployment = serve.deployment(
            kind,
            name="replica",
            num_replicas=replicas,
            ray_actor_options={"num_cpus": 1 if needs.ranks else needs.cpus, "num_gpus": gpus},
            health_check_period_s=_HEALTH_S,
            health_check_timeout_s=_HEALTH_TIMEOUT_S,
            graceful_shutdown_timeout_s=_END_S,
            graceful_shutdown_wait_loop_s=0.1,
            max_constructor_retry_count=_TRIES,
            logging_config=quiet,
        )
        target = serve.RunTarget(deployment.bind(*arguments), self.name, route_prefix=None, logging_config=quiet)
        serve.run_many([target], wait_for_applications_running=False, wait_for_ingress_deployment_creation=False)

    def trouble(self) -> str | None:
        """Why Serve will not start the replicas; None while it tries."""
        serve = _import_serve()
        try:
            found = serve.status().applications.get(self.name)
        except Exception as error:
            return f"Ray Serve does not answer: {type(error).__name__}"
        if found is None:
            return "the application was deleted from Ray Serve"
        return found.message if found.status == "DEPLOY_FAILED" else None

    def close(self) -> None:
        """End the replicas on a shared cluster, and Serve with its last application."""
        if self._is_alone:
            return
        serve = _import_serve()
        with suppress(Exception):  # this process leaves the cluster whatever fails there
            serve.delete(self.name)
            if not serve.status().applications:
                serve.shutdown()


def delete(name: str) -> None:
    """End the application soon, with all its replicas. Called in a replica."""
    _import_serve().delete(name, _blocking=False)


def check_room(replicas: int, needs: Needs, nodes: Sequence[Mapping[str, float]]) -> int:
    """Refuse more replicas than the cluster can hold when nothing else runs on it. nodes: the resources of each.

    Returns the GPUs that each engine's own process takes. Raises `ClusterError`.
    """
    wants_gpus = needs.device == "cuda" or (needs.device == "auto" and any(node.get("GPU", 0) >= 1 for node in nodes))
    each = {"CPU": needs.all_cpus} | ({"GPU": needs.ranks or 1} if wants_gpus else {})
    if needs.ranks:  # ranks may be on other nodes than the engine
        places: Sequence[Mapping[str, float]] = [{name: sum(node.get(name, 0) for node in nodes) for name in each}]
    else:
        places = nodes
    room = sum(min(int(place.get(name, 0) // much) for name, much in each.items()) for place in places)
    if replicas > room:
        takes = " and ".join(f"{much} {name}" for name, much in each.items())
        have = "; ".join(", ".join(f"{node.get(name, 0):g} {name}" for name in each) for node in nodes)
        raise ClusterError(
            f"replicas must be at most {room}: each takes {takes}, and the cluster's nodes have {have}; got {replicas}"
        )
    return int(wants_gpus and not needs.ranks)


def _import_serve() -> Any:
    import_ray()
    try:
        from ray import serve  # noqa: PLC0415 (an optional back end)
    except ImportError as error:
        raise ClusterError(f"replicas need Ray Serve ({error}): {install_command('distributed')}") from error
    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # it logs every start
    return serve
