from __future__ import annotations

import signal
import sys

ENGINE_COMMAND = (sys.executable, "-m", "skipjoin.server.engines.engine_process")
# Limits the busy waiting of OpenMP's threads. The default of several milliseconds slows steps down many times as soon
# as another process, such as the API process, uses a core. A value in the environment takes precedence.
THREAD_WAITING = {"GOMP_SPINCOUNT": "2000"}
LESS_MEMORY = "lower --kv-cache-gib, --swap-space or --max-num-batched-tokens, or give the process more memory"
# Exit code of an engine whose API process does not answer or has exited during the start.
ORPHANED = 3


# Cause and remedy by the signal that killed the engine.
_HELP = {
    signal.SIGKILL: "by the kernel for lack of memory, or by another process: the kernel's log (dmesg) says which. If "
    f"memory ran out, {LESS_MEMORY}",
    signal.SIGBUS: "a mapped file was cut off, or memory for it ran out: look for a full disk or a full /dev/shm",
    signal.SIGSEGV: "a fault in native code; the stacks of its threads are in the log above",
    signal.SIGILL: "an instruction that this CPU does not have: compiled operations of another machine in the cache "
    "folder, perhaps",
    signal.SIGABRT: "a library aborted the process; the log above names it",
}


def describe_end(code: int, *, is_out_of_memory: bool = False) -> str:
    """Return the cause and the remedy. A negative `code` is a signal."""
    if code >= 0:
        return f"the engine process ended with exit code {code}"
    number = signal.Signals(-code)
    if number is signal.SIGKILL and is_out_of_memory:
        return f"the engine process was killed by the kernel, because memory ran out (SIGKILL): {LESS_MEMORY}"
    why = f" ({_HELP[number]})" if number in _HELP else ""
    return f"the engine process was killed by {number.name}{why}"


def describe_error(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    return f"{text}; {LESS_MEMORY}" if _is_out_of_memory(error) else text


def _is_out_of_memory(error: Exception) -> bool:
    # Compare the name of torch's error, because this module must not import torch.
    is_allocation = isinstance(error, RuntimeError) and "allocate memory" in str(error)
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or is_allocation
