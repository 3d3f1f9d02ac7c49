"""Servers that fork from a process that has imported serve.py, because the imports take most of a server's start.

python forked_servers.py SOCKET_DESCRIPTOR

Those of models fork from a copy of this process, which has imported torch, and so do their engines.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

sys.path.append(str(Path(__file__).parents[1]))

from support.forks import fork
from support.small_disk import join

_MESSAGE_BYTES = 1 << 17
# Modules that a server would import when it uses them.
_LAZY = (
    *("alembic.command", "aiosqlite", "sqlalchemy.dialects.sqlite", "pydantic.v1"),
    "skipjoin.server.relay",
    *("skipjoin.server.batches.database", "skipjoin.server.batches.service", "skipjoin.forecast.owners"),
)


class ForkedServer:
    """Stands in for the `subprocess.Popen` of a server.

    Args:
        arguments: As of serve.py.
        namespace: File of the mounts that it sees, or "" for those of this process.
    """

    def __init__(self, arguments: Sequence[str], namespace: str = "") -> None:
        self.returncode: int | None = None
        (own_out, out), (own_err, err) = os.pipe(), os.pipe()
        place = {"environment": dict(os.environ), "folder": os.getcwd(), "namespace": namespace}
        task = {"arguments": [*arguments], **place}
        self._parent = _parent_of_models() if _has_model(arguments) else _parent()
        self.pid: int = self._parent.ask(task, out, err)
        self._exit = os.pidfd_open(self.pid)
        os.close(out)
        os.close(err)
        self.stdout: IO[str] = os.fdopen(own_out)
        self.stderr: IO[str] = os.fdopen(own_err)

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._exit, select.POLLIN)
            if not poll.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired("serve.py", timeout or 0.0)
            self.returncode = self._parent.ask({"exited": self.pid})
            os.close(self._exit)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._exit, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _has_model(arguments: Sequence[str]) -> bool:
    """Return whether a server has an engine of its own that computes. Those of Ray are programs."""
    kind, first, *rest = arguments
    if kind == "command":
        return first == "serve" and "--kv-cache-gib" in rest
    return kind == "model" and not any(word.startswith("replicas=") for word in rest)


class _Parent:
    """Client of a process that forks, which exits with this one.

    Args:
        is_copy: The process is a copy of this one, in place of a program that imports serve.py.
    """

    def __init__(self, *, is_copy: bool) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        descriptor = theirs.fileno()
        if is_copy:
            pid = fork("servers", os.environ, {descriptor: descriptor}, lambda: _copied(descriptor))
            self._wait = functools.partial(os.waitpid, pid, 0)
        else:
            command = [sys.executable, __file__, str(descriptor)]
            self._wait = subprocess.Popen(command, pass_fds=[descriptor], stdin=subprocess.DEVNULL).wait
        theirs.close()
        atexit.register(self.close)

    def close(self) -> None:
        self._socket.close()
        self._wait()

    def ask(self, task: dict[str, Any], *files: int) -> int:
        socket.send_fds(self._socket, [json.dumps(task).encode()], files)
        answer = self._socket.recv(_MESSAGE_BYTES)
        assert answer, "the process that forks servers has exited"
        return int(answer)


@functools.cache
def _parent() -> _Parent:
    return _Parent(is_copy=False)


@functools.cache
def _parent_of_models() -> _Parent:
    return _Parent(is_copy=True)


def start_parent_of_models() -> None:
    """Copy this process. Later its modules and settings may be those of a test."""
    _parent_of_models()


def _copied(descriptor: int) -> int:
    """Serve in a copy of a process that runs tests, and leave what that process removes at its end."""
    faulthandler.disable()
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    for finalizer in [*weakref.finalize._registry]:
        finalizer.detach()
    try:
        return _serve(socket.socket(fileno=descriptor))
    finally:
        weakref.finalize._exitfunc()  # of a server, which has forked


def _serve(own: socket.socket) -> int:
    """Fork servers until the client exits, and return the exit code of each process."""
    import forked_engines  # noqa: PLC0415 (only in this process)
    import serve  # noqa: PLC0415

    for module in _LAZY:
        with contextlib.suppress(ImportError):  # of extras that are not installed
            importlib.import_module(module)
    gc.freeze()
    while True:
        message, files, _, _ = socket.recv_fds(own, _MESSAGE_BYTES, 2)
        if not message:
            return 0
        task = json.loads(message)
        if "exited" in task:
            answer = os.waitstatus_to_exitcode(os.waitpid(task["exited"], 0)[1])
        elif (answer := os.fork()) == 0:
            own.close()
            for target, file in enumerate(files, 1):
                os.dup2(file, target)
                os.close(file)
            if task["namespace"]:
                join(task["namespace"])
            os.chdir(task["folder"])
            os.environ.clear()
            os.environ.update(task["environment"])
            sys.argv[1:] = task["arguments"]
            forked_engines.fork_engines()
            return serve.main()
        for file in files:
            os.close(file)
        own.send(str(answer).encode())


if __name__ == "__main__":
    sys.exit(_serve(socket.socket(fileno=int(sys.argv[1]))))
