"""Requests for tests: single ones, and whole loads drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from skipjoin.core.request import Request, RequestOptions


def make(
    number: int,
    prompt: int = 8,
    max_tokens: int = 4,
    *,
    arrival: float = 0.0,
    priority: int = 0,
    deadline: float | None = None,
    **rest: Any,
) -> Request:
    """A request with a prompt of `prompt` tokens."""
    options = RequestOptions(priority=priority, deadline_s=None if deadline is None else deadline - arrival)
    return Request(number, arrival, range(prompt), max_tokens, options=options, **rest)


def load(
    seed: int,
    count: int = 24,
    *,
    rate: float = 60.0,
    prompts: tuple[int, int] = (1, 60),
    outputs: tuple[int, int] = (1, 40),
    priorities: Iterable[int] = (0,),
    stop_tokens: frozenset[int] = frozenset(),
    first_id: int = 0,
) -> list[Request]:
    """`count` requests with Poisson arrivals and uniform lengths; the same for the same arguments."""
    draw = random.Random(seed)
    numbers = tuple(priorities)
    now = 0.0
    requests = []
    for number in range(first_id, first_id + count):
        now += draw.expovariate(rate)
        requests.append(
            make(
                number,
                draw.randint(*prompts),
                draw.randint(*outputs),
                arrival=now,
                priority=draw.choice(numbers),
                stop_tokens=stop_tokens,
            )
        )
    return requests
