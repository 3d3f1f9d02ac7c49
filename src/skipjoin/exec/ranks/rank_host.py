from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any

from skipjoin.exec.ranks.links import Address
from skipjoin.system.garbage import without_garbage_collection

if TYPE_CHECKING:
    from skipjoin.exec.ranks.rank_process import RankProcess


class RankHost:
    """Target of an engine's calls: `open_store` on rank 0 of several, and then methods of `RankProcess`.

    torch is imported only when the rank gets a model, so that ranks start without delay.
    """

    def __init__(self, ip: str) -> None:
        self._ip = ip
        self._store_socket: socket.socket | None = None
        self._process: RankProcess | None = None
        self._creating = threading.Lock()

    def call(self, method: str, *arguments: Any) -> Any:
        target = self if method == "open_store" else self._created()
        return getattr(target, method)(*arguments)

    def open_store(self) -> Address:
        family = socket.AF_INET6 if ":" in self._ip else socket.AF_INET
        self._store_socket = socket.create_server((self._ip, 0), family=family)
        address: Address = self._store_socket.getsockname()[:2]
        return address

    def _created(self) -> RankProcess:
        with self._creating:
            if self._process is None:
                # Collections would visit the many objects that importing torch creates for good.
                with without_garbage_collection():
                    from skipjoin.exec.ranks.rank_process import RankProcess  # noqa: PLC0415
                self._process = RankProcess(self._ip, self._store_socket)
            return self._process
