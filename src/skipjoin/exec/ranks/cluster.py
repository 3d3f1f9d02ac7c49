"""Ray cluster: a private one on this machine, or an existing one.

Ray only places and starts processes. Those of a private cluster listen on loopback, require a generated token, and have
their files in a folder that no other user can enter.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skipjoin.exec.ranks.guard import ProcessGuard
from skipjoin.version import needs

if TYPE_CHECKING:
    from types import ModuleType

# Address of a private cluster: the only one for which Ray listens on loopback alone.
LOCAL_IP = "127.0.0.1"
# Ray's variable that allows a cluster of several machines. If set, Ray replaces 127.0.0.1 by an outward address.
_SEVERAL_MACHINES = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
# Ray's minimum for shared objects; Skipjoin shares none.
_OBJECT_BYTES = 80 << 20
# Prefix of a private cluster's folder name; the owner's process id follows.
_FOLDER = "skipjoin-ray-"
# Ray gives its processes 30 s to start, which is too short on a busy machine and not configurable.
_MAX_STARTS = 3
_TIMED_OUT = "timed out during startup"
# Timeout in seconds for testing a cluster's address.
_ANSWER_S = 3.0
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # report no usage statistics
    # Abandon an address without a Ray cluster after two tries of about ten seconds, not twenty of forty.
    "RAY_NUM_REDIS_GET_RETRIES": "2",
    "RAY_py_gcs_connect_timeout_s": "5",
    # Detect an unreachable node within seconds, because its requests wait for that.
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    # A process handles SIGTERM itself. Ray's own handler would print its stack and abort it.
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",
    # Ray would run engines and ranks at niceness 15, below everything else on the machine, including the API process.
    "RAY_worker_niceness": "0",
}
# Methods of Ray's node that start its autoscaler, the reader of its logs and the server of its dashboard, which Ray
# starts even without a dashboard. Nothing here uses these three Python processes, which are half of a start.
_UNUSED = ("start_monitor", "start_log_monitor", "start_api_server")


class ClusterError(Exception):
    pass


class Cluster:
    """Connection to Ray. A process that already uses Ray keeps its connection."""

    def __init__(
        self,
        address: str,
        ip: str,
        guard: ProcessGuard | None = None,
        settings: ExitStack | None = None,
        *,
        is_ours: bool = True,
    ) -> None:
        self.address, self.ip = address, ip
        self._is_ours = is_ours
        self._guard = guard
        self._settings = settings or ExitStack()

    @classmethod
    def start(cls, cpus: int) -> Cluster:
        """Start a private cluster, or return the one in use. `cpus` limits how many processes can be placed."""
        if (used := _used()) is not None:
            return used
        ray = import_ray()
        # Only this user can enter this folder. Ray opens its own folder to all users, so that one is inside.
        folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-"))
        # Started before Ray, which takes seconds to start, since this process may be killed meanwhile.
        guard = ProcessGuard(folder)
        with ExitStack() as settings:
            settings.enter_context(_private_settings())
            for tries_left in reversed(range(_MAX_STARTS)):
                try:
                    with _sigterm_kept(), _without_unused_processes():
                        found = ray.init(
                            address="local",
                            num_cpus=cpus,
                            include_dashboard=False,
                            log_to_driver=False,
                            logging_level="error",
                            object_store_memory=_OBJECT_BYTES,
                            _node_ip_address=LOCAL_IP,
                            _temp_dir=str(folder / "ray"),
                        )
                    break
                except Exception as error:
                    ray.shutdown()  # stops what has already started
                    if tries_left and _TIMED_OUT in str(error):
                        continue
                    guard.close()
                    raise ClusterError(f"Ray does not start on this machine: {_first_line(error)}") from error
            return cls(found.address_info["address"], LOCAL_IP, guard, settings.pop_all())

    @classmethod
    def join(cls, address: str) -> Cluster:
        host, _, port = address.rpartition(":")
        if not (host and port.isdecimal() and 0 < int(port) < 65536):
            raise ClusterError(f"ray_address must be host:port of a running Ray cluster, got {address!r}")
        if (used := _used()) is not None:
            if used.address != address:
                raise ClusterError(f"ray_address {address}: this process already uses Ray at {used.address}")
            return used
        try:
            # Ray itself would retry for minutes.
            socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
        except OSError as error:
            raise ClusterError(f"ray_address {address}: no connection ({error.strerror or error})") from error
        ray = import_ray()
        if _is_open(address):
            raise ClusterError(
                f"ray_address {address}: the cluster asks for no token, so that any process that reaches it can run "
                "code on its nodes; stop it, and start Ray on every node, and this program, with RAY_AUTH_MODE=token "
                "and the same RAY_AUTH_TOKEN (openssl rand -hex 32)"
            )
        try:
            with _sigterm_kept():
                ray.init(address=address, log_to_driver=False, logging_level="error")
        except Exception as error:
            raise ClusterError(
                f"ray_address {address} cannot be joined: {_first_line(error)} (is it a Ray cluster? does one of its "
                "nodes run on this machine? if it wants a token, are RAY_AUTH_MODE=token and RAY_AUTH_TOKEN set?)"
            ) from error
        return cls(address, ray.util.get_node_ip_address())

    def close(self) -> None:
        if not self._is_ours:
            return
        import_ray().shutdown()
        if self._guard is not None:
            self._guard.close()
        self._settings.close()


@contextmanager
def _private_settings() -> Iterator[None]:
    constants: Any = import_module("ray._private.ray_constants")
    had_several = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False  # Ray read the variable when it was imported
    try:
        with _environment({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), _SEVERAL_MACHINES: "0"}):
            yield
    finally:
        constants.ENABLE_RAY_CLUSTER = had_several


@contextmanager
def _without_unused_processes() -> Iterator[None]:
    """Keep Ray from starting a head node's unused processes. A Ray that starts them otherwise starts all."""
    try:
        node: Any = import_module("ray._private.node").Node
    except (ImportError, AttributeError):
        node = None
    before = {name: getattr(node, name) for name in _UNUSED if hasattr(node, name)}
    for name in before:
        setattr(node, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(node, name, method)


@contextmanager
def _environment(ours: Mapping[str, str]) -> Iterator[None]:
    raylet: Any = import_module("ray._raylet")

    def reread() -> None:
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()

    before = {name: os.environ.pop(name, None) for name in ours}
    os.environ.update(ours)
    reread()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        reread()


def _is_open(address: str) -> bool:
    raylet: Any = import_module("ray._raylet")
    with _environment({"RAY_AUTH_MODE": "disabled"}):
        try:
            raylet.GcsClient(address=address).internal_kv_keys(b"", None, _ANSWER_S)
        except Exception:  # the client is refused, or there is no cluster, which `ray.init` explains
            return False
    return True


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Restore the SIGTERM handler, which Ray replaces when a main thread joins a cluster."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        # Ray replaces the handler in the main thread only. None means that it is not Python's, and then Ray has not
        # replaced it.
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def import_ray() -> ModuleType:
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)  # the user's settings take precedence
    try:
        import ray  # noqa: PLC0415 (an optional back end, which reads its settings when it is imported)
    except ImportError as error:
        raise ClusterError(needs("more than one machine or replica", "ray", "distributed")) from error
    return ray


def _used() -> Cluster | None:
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    return Cluster(ray.get_runtime_context().gcs_address, ray.util.get_node_ip_address(), is_ours=False)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
