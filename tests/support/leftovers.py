"""Detection of processes that a program leaves running, by a mark in the environment that they inherit."""

from __future__ import annotations

import os
import secrets

import psutil

_NAME = "SKIPJOIN_TEST_MARK"


class Mark:
    def __init__(self) -> None:
        self._value = secrets.token_hex(8)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, _NAME: self._value}

    def processes(self, name: str = "") -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if name in process.name() and process.environ().get(_NAME) == self._value:
                    found.append(process)
            except (psutil.Error, OSError):  # It has exited or is exiting.
                continue
        return found
