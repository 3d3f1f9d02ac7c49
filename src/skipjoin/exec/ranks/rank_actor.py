"""Ray actor of a rank. Imports torch only when the rank gets a model, so that ranks are placed without delay."""

from __future__ import annotations

import platform
import runpy
import socket
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from skipjoin.exec.base import RankError
from skipjoin.exec.ranks.cluster import import_ray
from skipjoin.exec.ranks.links import Address
from skipjoin.system.garbage import without_garbage_collection
from skipjoin.version import VERSION

if TYPE_CHECKING:
    from skipjoin.exec.ranks.rank_process import RankProcess


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


class RankActor:
    """Ray actor of one rank. Call `place`, `open_store` on rank 0, then methods of `RankProcess` by `call`."""

    def __init__(self) -> None:
        self._ip: str = import_ray().util.get_node_ip_address()
        self._store_socket: socket.socket | None = None
        self._process: RankProcess | None = None
        self._creating = threading.Lock()

    def place(self) -> RankPlace:
        return RankPlace(import_ray().get_runtime_context().get_node_id(), self._ip, versions())

    def open_store(self) -> Address:
        family = socket.AF_INET6 if ":" in self._ip else socket.AF_INET
        self._store_socket = socket.create_server((self._ip, 0), family=family)
        address: Address = self._store_socket.getsockname()[:2]
        return address

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._created(), method)(*arguments)

    def _created(self) -> RankProcess:
        with self._creating:
            if self._process is None:
                # Collections would visit the many objects that importing torch creates for good.
                with without_garbage_collection():
                    from skipjoin.exec.ranks.rank_process import RankProcess  # noqa: PLC0415
                self._process = RankProcess(self._ip, self._store_socket)
            return self._process
