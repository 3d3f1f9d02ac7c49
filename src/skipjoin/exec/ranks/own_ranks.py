"""Ranks as processes of the engine's own, all on this machine. They end with the engine, however it ends."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from skipjoin.exec.base import RankError
from skipjoin.exec.ranks.launch import START_S, GroupSizes
from skipjoin.exec.ranks.rank_program import LOCAL_IP
from skipjoin.model.cuda import choose_device, cuda_facts
from skipjoin.system.container import oom_kills

_log = logging.getLogger(__name__)

_PROGRAM = (sys.executable, "-m", "skipjoin.exec.ranks.rank_program")
_CARDS = "CUDA_VISIBLE_DEVICES"


class _OwnRank:
    def __init__(self, rank: int, environment: Mapping[str, str]) -> None:
        self._rank = rank
        self._calls: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self._lost: RankError | None = None
        self._is_closing = False
        self._lock = threading.Lock()
        self._oom_kills = oom_kills()
        self._socket, theirs = socket.socketpair()
        with theirs:
            level = logging.getLogger("skipjoin").getEffectiveLevel()
            self._process = subprocess.Popen(
                (*_PROGRAM, str(theirs.fileno()), str(level)),
                stdin=subprocess.DEVNULL,
                stdout=2,  # what libraries print is for the operator
                env={**os.environ, **environment},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C must not end it before the engine has finished its requests
            )
        # Has a descriptor of its own, so that `close` can wake the thread.
        self._connection = Connection(os.dup(self._socket.fileno()))
        self._reader = threading.Thread(target=self._read, name=f"skipjoin-rank-{rank}", daemon=True)
        self._reader.start()

    def begin(self, method: str, arguments: tuple[Any, ...]) -> Future[Any]:
        call, number = Future[Any](), next(self._numbers)
        with self._lock:
            if self._lost is not None:
                call.set_exception(self._lost)
                return call
            self._calls[number] = call
            with suppress(OSError):  # the process has exited, which fails the call
                self._connection.send((number, method, arguments))
        return call

    def kill(self) -> None:
        self._is_closing = True
        self._process.kill()

    def join(self) -> None:
        """Wait for the end of a killed process, which frees its memory, and close its connection."""
        self._process.wait()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._socket.close()
        self._connection.close()

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                number, answer = self._connection.recv()
                if number is None:
                    name, level, text = answer
                    logging.getLogger(name).log(level, "rank %d: %s", self._rank, text)
                elif isinstance(answer, Exception):
                    self._calls.pop(number).set_exception(answer)
                else:
                    self._calls.pop(number).set_result(answer)
        how = self._describe_end(self._process.wait())
        if not self._is_closing:
            _log.warning("%s", how)
        with self._lock:
            self._lost = RankError(f"a rank was lost: {how}")
        for call in self._calls.values():
            call.set_exception(self._lost)

    def _describe_end(self, code: int) -> str:
        if code >= 0:
            return f"the process of rank {self._rank} ended with exit code {code}"
        out_of_memory = ", because memory ran out" if code == -signal.SIGKILL and oom_kills() > self._oom_kills else ""
        return f"the process of rank {self._rank} was killed by {signal.Signals(-code).name}{out_of_memory}"


class OwnRanks:
    def __init__(self, environments: Sequence[Mapping[str, str]]) -> None:
        self.nodes = ["this machine"] * len(environments)
        self._ranks: list[_OwnRank] = []
        try:
            for rank, environment in enumerate(environments):
                self._ranks.append(_OwnRank(rank, environment))
        except OSError as error:
            self.close()
            raise RankError(f"a rank cannot start: {error}") from error

    def begin(self, rank: int, method: str, *arguments: Any) -> Future[Any]:
        return self._ranks[rank].begin(method, arguments)

    def wait(self, calls: Sequence[Future[Any]], timeout_s: float) -> tuple[list[Future[Any]], list[Future[Any]]]:
        done, waiting = wait(calls, timeout_s, FIRST_COMPLETED)
        return list(done), list(waiting)

    def answers(self, calls: Sequence[Future[Any]]) -> list[Any]:
        done, waiting = wait(calls, START_S, FIRST_EXCEPTION)
        for call in calls:
            if call in done and (error := call.exception()) is not None:
                raise error
        if waiting:
            raise RankError(f"a rank did not answer within {START_S:g} s")
        return [call.result() for call in calls]

    def close(self) -> None:
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.join()


class OwnLauncher:
    """Starts ranks on this machine. On GPUs, each sees one of those that this process sees."""

    ip = LOCAL_IP

    def start(self, sizes: GroupSizes, device: str, patience_s: float) -> OwnRanks:
        environments: list[dict[str, str]] = [{} for _ in range(sizes.ranks)]
        if choose_device(device) == "cuda":
            for environment, card in zip(environments, _cards(sizes), strict=True):
                environment[_CARDS] = card
        return OwnRanks(environments)

    def close(self) -> None: ...


def _cards(sizes: GroupSizes) -> list[str]:
    given, usable = os.environ.get(_CARDS), len(cuda_facts().cards)
    names = [str(number) for number in range(usable)] if given is None else given.split(",")[:usable]
    if len(names) < sizes.ranks:
        raise RankError(f"{sizes} needs {sizes.ranks} GPUs, this machine has {len(names)} that can be used")
    return names[: sizes.ranks]
