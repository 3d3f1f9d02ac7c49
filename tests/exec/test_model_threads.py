"""Calls that run on the thread that asks for their results."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skipjoin.exec.model_threads import CallerThread

MODEL: Any = SimpleNamespace(ops=SimpleNamespace(use_threads=lambda count: torch.set_num_threads(1)))


@pytest.fixture
def torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_calls_run_in_order_on_the_thread_that_asks() -> None:
    thread, ran = CallerThread(MODEL, 2), list[tuple[int, int]]()

    def call(number: int) -> int:
        ran.append((number, threading.get_ident()))
        return number

    first, second = (thread.submit(lambda number=number: call(number)) for number in (1, 2))
    thread.after_these(lambda: call(3))
    assert not ran
    with ThreadPoolExecutor(1) as another:
        assert another.submit(second.result).result() == 2
    assert first.result() == 1
    thread.after_these(lambda: call(4))
    assert [number for number, _ in ran] == [1, 2, 3, 4]
    assert len({ident for _, ident in ran[:3]} | {threading.get_ident()}) == 2


def test_result_raises_the_error_and_later_calls_run() -> None:
    thread = CallerThread(MODEL, 2)
    failing, later = thread.submit(lambda: 1 // 0), thread.submit(lambda: 1)
    with pytest.raises(ZeroDivisionError):
        failing.result()
    assert later.result() == 1


@pytest.mark.usefixtures("torch_threads")
def test_the_caller_keeps_its_number_of_torch_threads() -> None:
    thread = CallerThread(MODEL, 2)
    for _ in range(2):
        assert thread.submit(torch.get_num_threads).result() == 1
        assert torch.get_num_threads() == 2
