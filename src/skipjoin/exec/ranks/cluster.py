"""Ray as this program's cluster: one of our own on this machine, or one that runs already. Ray places and starts
processes and says when they are gone; tokens and plans do not go through it.

A cluster of our own lives and dies with this process, however it ends. Ray's processes listen on all interfaces, but
they talk only to those who know a token, which every process that starts one makes anew.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from skipjoin.exec.ranks.guard import ProcessGuard

if TYPE_CHECKING:
    from types import ModuleType

# Where a cluster of our own has its address. Ray replaces 127.0.0.1 by the machine's outward address.
LOCAL_IP = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"
# Ray wants at least so much for the objects that processes share; we share none.
_OBJECT_BYTES = 80 << 20
# Begins the name of a cluster's folder of files; the process that it belongs to follows.
_FOLDER = "skipjoin-ray-"
# Longest that a cluster's address may take to answer, in seconds.
_ANSWER_S = 3.0
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is reported to anybody
    # An address at which not Ray answers is given up after two tries of some ten seconds, not twenty of forty.
    "RAY_NUM_REDIS_GET_RETRIES": "2",
    "RAY_py_gcs_connect_timeout_s": "5",
    # A node that is cut off must be known as gone before requests that it served have waited too long.
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}


class ClusterError(Exception):
    """The cluster cannot be used. The text names the setting at fault, or what to install."""


class Cluster:
    """A connection to Ray; `start` and `join` make it. A program that uses Ray already has one, and keeps it.

    address: by which other processes of this machine join. ip: this machine's, as the cluster knows it. folder: of the
    files of a cluster of our own. is_ours: whether to end it with `close`.
    """

    def __init__(self, address: str, ip: str, folder: Path | None = None, *, is_ours: bool = True) -> None:
        self.address, self.ip = address, ip
        self._is_ours = is_ours
        self._guard = ProcessGuard(folder) if folder is not None else None

    @classmethod
    def start(cls, cpus: int) -> Cluster:
        """A cluster of our own on this machine: nothing outside may use it. cpus: how many processes may ask for one.

        They are a count and nothing else, and may be more than the machine has. A process that uses Ray already goes
        on with what it uses, as it is. Raises `ClusterError`.
        """
        if (used := _used()) is not None:
            return used
        folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-"))
        # Known to all processes that this one starts, which is how they may join. Ray reads it once.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        ray = import_ray()
        try:
            found = ray.init(
                address="local",
                num_cpus=cpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="error",
                object_store_memory=_OBJECT_BYTES,
                _node_ip_address=LOCAL_IP,
                _temp_dir=str(folder),
            )
        except Exception as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise ClusterError(f"Ray does not start on this machine: {_first_line(error)}") from error
        return cls(found.address_info["address"], LOCAL_IP, folder)

    @classmethod
    def join(cls, address: str) -> Cluster:
        """The cluster at host:port. Raises `ClusterError`, after a few seconds if nobody answers there."""
        host, _, port = address.rpartition(":")
        if not (host and port.isdecimal() and 0 < int(port) < 65536):
            raise ClusterError(f"ray_address must be host:port of a running Ray cluster, got {address!r}")
        if (used := _used()) is not None:
            if used.address != address:
                raise ClusterError(f"ray_address {address}: this process uses Ray at {used.address} already")
            return used
        try:
            # Ray itself would try for minutes.
            socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
        except OSError as error:
            raise ClusterError(f"ray_address {address}: nobody answers there ({error.strerror or error})") from error
        ray = import_ray()
        try:
            ray.init(address=address, log_to_driver=False, logging_level="error")
        except Exception as error:
            raise ClusterError(
                f"ray_address {address} cannot be joined: {_first_line(error)} (is it a Ray cluster? does one of its "
                "nodes run on this machine? if it wants a token, are RAY_AUTH_MODE=token and RAY_AUTH_TOKEN set?)"
            ) from error
        return cls(address, ray.util.get_node_ip_address())

    def close(self) -> None:
        """Leave. What this process started in the cluster ends, and so does a cluster of our own."""
        if not self._is_ours:
            return
        import_ray().shutdown()
        if self._guard is not None:
            self._guard.close()


def import_ray() -> ModuleType:
    """Ray, told once and for all how we use it. Raises `ClusterError` if it is not installed."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)  # who knows better sets it
    try:
        import ray  # noqa: PLC0415 (an optional back end, which reads its settings when it is imported)
    except ImportError as error:
        raise ClusterError("several ranks or replicas need Ray: pip install 'skipjoin[distributed]'") from error
    return ray


def _used() -> Cluster | None:
    """The cluster that this process uses already."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    return Cluster(ray.get_runtime_context().gcs_address, ray.util.get_node_ip_address(), is_ours=False)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
