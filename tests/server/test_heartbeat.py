from __future__ import annotations

import os
import signal

import pytest

from skipjoin.server.engines.engine_program import describe_end, describe_error
from skipjoin.server.engines.heartbeat import HEARTBEAT_INTERVAL_S, HeartbeatReader


def test_silence_excludes_time_when_reader_did_not_run() -> None:
    now = 0.0
    reader = HeartbeatReader(clock=lambda: now)
    os.write(reader.engine_fd, b".")
    assert reader.wait()
    for _ in range(10):
        now += HEARTBEAT_INTERVAL_S
        silent_s = reader.silent_s()
    assert silent_s == 10 * HEARTBEAT_INTERVAL_S
    now += 3600
    assert reader.silent_s() == silent_s + 2 * HEARTBEAT_INTERVAL_S
    os.write(reader.engine_fd, b"...")
    assert reader.silent_s() == 0
    reader.started()
    now += HEARTBEAT_INTERVAL_S
    assert reader.silent_s() == HEARTBEAT_INTERVAL_S  # exits are detected elsewhere
    reader.close()
    reader.close()


@pytest.mark.parametrize(
    ("code", "is_out_of_memory", "parts"),
    [
        (7, True, ("exit code 7",)),
        (-signal.SIGKILL, True, ("memory ran out", "SIGKILL", "lower --kv-cache-gib")),
        (-signal.SIGKILL, False, ("SIGKILL", "or by another process", "dmesg", "lower --kv-cache-gib")),
        (-signal.SIGSEGV, True, ("SIGSEGV", "native code")),
        (-signal.SIGUSR2, False, ("SIGUSR2",)),
    ],
)
def test_exit_description_names_cause_and_remedy(code: int, is_out_of_memory: bool, parts: tuple[str, ...]) -> None:
    text = describe_end(code, is_out_of_memory=is_out_of_memory)
    assert not [part for part in parts if part not in text]


def test_out_of_memory_error_names_remedy() -> None:
    errors = [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")]
    assert all("lower --kv-cache-gib" in describe_error(error) for error in errors)
    assert describe_error(ValueError("no")) == "ValueError: no"
