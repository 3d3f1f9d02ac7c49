"""Copies in batches pass a driver what it expects, and copy one by one where it refuses or copies wrongly."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_int, c_size_t, c_uint64, c_void_p
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skipjoin.model import run_copies
from skipjoin.model.ops.block_copy import runs_of
from skipjoin.model.run_copies import RunBatch, batch_call

NUMBERS = POINTER(c_uint64)
SHARED = (NUMBERS, NUMBERS, NUMBERS, c_size_t, POINTER(c_int), POINTER(c_size_t), c_size_t)
# CUDA_ERROR_INVALID_VALUE.
INVALID = 1


class Driver:
    """The driver's functions by name, as CUDA 12.8 and 13 declare them, on CPU memory."""

    def __init__(self, *names: str) -> None:
        self.streams: list[int | None] = []
        self.code, self.is_wrong = 0, False
        for name in names:
            setattr(self, name, self._function(has_index=not name.endswith("_v2")))

    def _function(self, *, has_index: bool) -> Callable[..., int]:
        def run(*given: Any) -> int:
            to, source, sizes, count, attributes, first, kinds, *rest = given
            # One entry for all copies: in the order of the stream, with no hint and no flag.
            assert [attributes[place] for place in range(6)] == [1, 0, 0, 0, 0, 0]
            assert (first[0], kinds, len(rest)) == (0, 1, 1 + has_index)
            self.streams.append(rest[-1])
            if not rest[-1]:
                return INVALID  # the default stream
            if not self.code:
                for place in range(count):
                    ctypes.memmove(to[place], source[place], sizes[place] // (1 + self.is_wrong))
            return self.code

        index = (POINTER(c_size_t),) if has_index else ()
        return Plain(ctypes.CFUNCTYPE(c_int, *SHARED, *index, c_void_p)(run))


class Plain:
    """A function of a library: untyped until `argtypes` is set."""

    def __init__(self, declared: Any) -> None:
        self._declared = declared
        self.argtypes: list[Any] | None = None
        self.restype: Any = None

    def __call__(self, *arguments: Any) -> int:
        assert self.restype is c_int
        typed = ctypes.CFUNCTYPE(c_int, *(self.argtypes or ()))(ctypes.cast(self._declared, c_void_p).value)
        code: int = typed(*arguments)
        return code


class Stream:
    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle
        self.waited: list[int] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other.cuda_stream)

    def synchronize(self) -> None: ...


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    found = SimpleNamespace(current=Stream(7), aside=Stream(9))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: found.aside)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: found.current)
    return found


CPU = torch.device("cpu")
BOTH = ("cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2")


@given(data=st.data(), names=st.sampled_from([BOTH[:1], BOTH]), default=st.booleans())
def test_a_batch_copies_what_single_copies_do(data: st.DataObject, names: tuple[str, ...], default: bool) -> None:
    rows = data.draw(st.integers(1, 12))
    to, source = (data.draw(st.permutations(range(12)))[:rows] for _ in range(2))
    have = torch.randn(12, 5, generator=torch.Generator().manual_seed(rows))
    expected, found = torch.zeros(2, 12, 5)
    expected[to] = have[source]
    driver, current = Driver(*names), Stream(0 if default else 7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", lambda device: Stream(9))
        patch.setattr(torch.cuda, "current_stream", lambda device: current)
        call = batch_call(driver)
        assert call is not None
        assert RunBatch(call, CPU).copies(found, have, list(runs_of(to, source)))
    assert torch.equal(found, expected)
    assert driver.streams == [9 if default else 7]
    assert current.waited == ([9] if default else [])


def test_a_refused_batch_is_reported_once_and_not_tried_again(
    streams: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(*BOTH)
    call = batch_call(driver)
    assert call is not None
    batch, pool = RunBatch(call, CPU), torch.zeros(4, 8)
    driver.code = 801  # CUDA_ERROR_NOT_SUPPORTED
    for _ in range(2):
        assert not batch.copies(pool, torch.ones(4, 8), [(0, 1, 1), (2, 0, 1)])
    assert len(driver.streams) == len(caplog.records) == 1
    assert batch_call(Driver()) is None


@pytest.mark.parametrize(("code", "is_wrong"), [(0, False), (801, False), (0, True)])
def test_a_driver_is_tested_before_it_is_used(
    streams: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, code: int, is_wrong: bool
) -> None:
    driver = Driver(*BOTH)
    driver.code, driver.is_wrong = code, is_wrong
    monkeypatch.setattr(run_copies.ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    assert (run_copies.run_batch.__wrapped__(CPU) is None) == bool(code or is_wrong)
