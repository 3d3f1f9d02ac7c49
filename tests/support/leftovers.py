"""What programs leave behind: processes are known by a mark in their environment, which they inherit."""

from __future__ import annotations

import os
import secrets
import time

import psutil

_NAME = "SKIPJOIN_TEST_MARK"


class Mark:
    """`environment` marks a program and all that it starts, however far away from it."""

    def __init__(self) -> None:
        self._value = secrets.token_hex(8)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, _NAME: self._value}

    def processes(self, name: str = "") -> list[psutil.Process]:
        """Those that run, and have this in their names."""
        found = []
        for process in psutil.process_iter():
            try:
                if name in process.name() and process.environ().get(_NAME) == self._value:
                    found.append(process)
            except (psutil.Error, OSError):  # gone, or on its way
                continue
        return found

    def seconds_until_gone(self, most: float) -> float:
        """Until none of them runs. Raises AssertionError after `most`."""
        begin = time.monotonic()
        while left := self.processes():
            assert time.monotonic() - begin < most, f"after {most:g} s there are {left}"
            time.sleep(0.05)
        return time.monotonic() - begin
