"""Program of a rank that is its engine's child: `python -m skipjoin.exec.ranks.rank_program SOCKET LEVEL`.

SOCKET is an inherited descriptor, LEVEL that of the log. Calls, answers and log records go over the socket, which
breaks when the engine ends and so ends this process.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from skipjoin.exec.base import RankError
from skipjoin.exec.ranks.rank_host import RankHost

LOCAL_IP = "127.0.0.1"
# Calls at a time: one serves plans until the engine ends.
_CALLS = 2
_log = logging.getLogger("skipjoin.exec.ranks.rank_program")


class _Sender(logging.Handler):
    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection, self._sending = connection, threading.Lock()

    def send(self, call: int | None, answer: Any) -> None:
        with self._sending, suppress(OSError):  # the engine has exited
            self._connection.send((call, answer))

    def emit(self, record: logging.LogRecord) -> None:
        self.send(None, (record.name, record.levelno, self.format(record)))


def _answer(host: RankHost, method: str, arguments: tuple[Any, ...]) -> Any:
    try:
        return host.call(method, *arguments)
    except Exception as error:
        from skipjoin.model.errors import ModelError  # noqa: PLC0415 (imports numpy)

        if isinstance(error, ModelError | RankError):
            return error
        _log.exception("a rank cannot start")
        return RankError(f"a rank cannot start: {type(error).__name__}: {error}")


def _run(host: RankHost, sender: _Sender, call: int, method: str, arguments: tuple[Any, ...]) -> None:
    sender.send(call, _answer(host, method, arguments))
    if method == "serve":  # its connection broke, and so has the group
        os._exit(0)


def main(number: int, level: int) -> None:
    os.set_inheritable(number, False)
    faulthandler.enable()
    connection = Connection(number)
    sender = _Sender(connection)
    sender.setFormatter(logging.Formatter("%(message)s"))
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[sender])
    logging.getLogger("skipjoin").setLevel(level)
    logging.captureWarnings(True)
    host, threads = RankHost(LOCAL_IP), ThreadPoolExecutor(_CALLS)
    with suppress(EOFError, OSError):
        while True:
            threads.submit(_run, host, sender, *connection.recv())
    os._exit(0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
