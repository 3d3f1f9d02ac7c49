from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from skipjoin.core.request import Request


class LazySequence(Sequence[Request]):
    """Sequence that advances an iterator only as far as it is read."""

    def __init__(self, found: Iterator[Request]) -> None:
        self._read: list[Request] = []
        self._rest = found
        self._is_read = False

    def __iter__(self) -> Iterator[Request]:
        return iter(self._read) if self._is_read else self._reading()

    def _reading(self) -> Iterator[Request]:
        read, rest = self._read, self._rest
        at = 0
        while True:
            if at == len(read):
                found = next(rest, None)
                if found is None:
                    return
                read.append(found)
            yield read[at]
            at += 1

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Request]: ...
    def __getitem__(self, index: int | slice) -> Request | Sequence[Request]:
        return self._all()[index]

    def __len__(self) -> int:
        return len(self._all())

    def _all(self) -> list[Request]:
        if not self._is_read:
            self._read += self._rest
            self._is_read = True
        return self._read
