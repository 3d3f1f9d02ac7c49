"""The engine process as a program: its command, and its exit codes."""

from __future__ import annotations

import signal
import sys

ENGINE_COMMAND = (sys.executable, "-m", "skipjoin.server.engines.engine_process")
# How long OpenMP's threads spin for more work before they sleep. Its default, milliseconds, makes steps many times
# slower as soon as another process uses a core, the API process included. A value in the environment wins.
THREAD_WAITING = {"GOMP_SPINCOUNT": "2000"}
LESS_MEMORY = "lower --kv-cache-gib, --swap-space or --max-num-batched-tokens, or give the process more memory"
# The exit code of an engine whose API process does not answer, or has ended while it started.
ORPHANED = 3


# What helps against an end, by its signal.
_HELP = {
    signal.SIGKILL: "by the kernel for lack of memory, or by another process: the kernel's log (dmesg) tells which. If "
    f"memory ran out, {LESS_MEMORY}",
    signal.SIGBUS: "a mapped file was cut off, or memory for it ran out: look for a full disk or a full /dev/shm",
    signal.SIGSEGV: "a fault in native code; the stacks of its threads are in the log above",
    signal.SIGILL: "an instruction that this CPU does not have: compiled operations of another machine in the cache "
    "folder, perhaps",
    signal.SIGABRT: "a library gave up; the log above says which",
}


def describe_end(code: int, *, is_out_of_memory: bool = False) -> str:
    """How the process ended, why, and what helps. code: negative for a signal. is_out_of_memory: whether the kernel
    killed a process for lack of memory meanwhile."""
    if code >= 0:
        return f"the engine process ended with exit code {code}"
    number = signal.Signals(-code)
    if number is signal.SIGKILL and is_out_of_memory:
        return f"the engine process was killed by the kernel, because memory ran out (SIGKILL): {LESS_MEMORY}"
    why = f" ({_HELP[number]})" if number in _HELP else ""
    return f"the engine process was killed by {number.name}{why}"


def describe_error(error: Exception) -> str:
    """What an engine that fails tells the operator."""
    text = f"{type(error).__name__}: {error}"
    return f"{text}; {LESS_MEMORY}" if _is_out_of_memory(error) else text


def _is_out_of_memory(error: Exception) -> bool:
    # torch's error is told by its name: this module is imported where torch is not.
    is_allocation = isinstance(error, RuntimeError) and "allocate memory" in str(error)
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or is_allocation
