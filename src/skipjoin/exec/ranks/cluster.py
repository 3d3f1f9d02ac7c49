"""The Ray cluster: a private one on this machine, or a running one. Ray places and starts processes and reports when
they end; tokens and plans do not pass through it.

A private cluster ends with this process, however that ends. Ray's processes listen on all interfaces, but accept only
connections with a token, which every process that starts a cluster generates.
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

# Address of a private cluster. Ray replaces 127.0.0.1 by the machine's outward address.
LOCAL_IP = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"
# Ray's minimum for shared objects; Skipjoin shares none.
_OBJECT_BYTES = 80 << 20
# Prefix of the name of a private cluster's folder; the id of the owning process follows.
_FOLDER = "skipjoin-ray-"
# Timeout of the connection test of a cluster's address, in seconds.
_ANSWER_S = 3.0
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # report no usage statistics
    # Give up an address without a Ray cluster after two tries of about ten seconds, not twenty of forty.
    "RAY_NUM_REDIS_GET_RETRIES": "2",
    "RAY_py_gcs_connect_timeout_s": "5",
    # Detect a node that is cut off within seconds: the requests on it wait for that.
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}


class ClusterError(Exception):
    """The cluster cannot be used. The text names the setting to change, or what to install."""


class Cluster:
    """A connection to Ray, made by `start` and `join`. A process that already uses Ray keeps its connection.

    address: for other processes of this machine to join. ip: this machine's, in the cluster. folder: files of a private
    cluster. is_ours: whether `close` disconnects.
    """

    def __init__(self, address: str, ip: str, folder: Path | None = None, *, is_ours: bool = True) -> None:
        self.address, self.ip = address, ip
        self._is_ours = is_ours
        self._guard = ProcessGuard(folder) if folder is not None else None

    @classmethod
    def start(cls, cpus: int) -> Cluster:
        """Start a private cluster on this machine, closed to other machines. cpus: CPUs that the cluster declares.

        The number only limits how many processes can be placed, and may exceed the machine's CPUs. If this process
        already uses Ray, that cluster is returned unchanged. Raises `ClusterError`.
        """
        if (used := _used()) is not None:
            return used
        folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-"))
        # Processes that this one starts inherit it and can join. Ray reads it once.
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
        """Join the cluster at host:port. Raises `ClusterError`, after a few seconds if no connection can be made."""
        host, _, port = address.rpartition(":")
        if not (host and port.isdecimal() and 0 < int(port) < 65536):
            raise ClusterError(f"ray_address must be host:port of a running Ray cluster, got {address!r}")
        if (used := _used()) is not None:
            if used.address != address:
                raise ClusterError(f"ray_address {address}: this process already uses Ray at {used.address}")
            return used
        try:
            # Ray itself tries for minutes.
            socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
        except OSError as error:
            raise ClusterError(f"ray_address {address}: no connection ({error.strerror or error})") from error
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
        """Disconnect. Processes that this one started in the cluster end; a private cluster ends too."""
        if not self._is_ours:
            return
        import_ray().shutdown()
        if self._guard is not None:
            self._guard.close()


def import_ray() -> ModuleType:
    """Import Ray, with Skipjoin's settings. Raises `ClusterError` if it is not installed."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)  # the user's settings take precedence
    try:
        import ray  # noqa: PLC0415 (an optional back end, which reads its settings when it is imported)
    except ImportError as error:
        raise ClusterError("several ranks or replicas need Ray: pip install 'skipjoin[distributed]'") from error
    return ray


def _used() -> Cluster | None:
    """The cluster that this process is already connected to."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    return Cluster(ray.get_runtime_context().gcs_address, ray.util.get_node_ip_address(), is_ours=False)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
