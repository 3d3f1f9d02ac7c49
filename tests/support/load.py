"""Single requests, and loads drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from skipjoin.core.forecast import Forecast
from skipjoin.core.prefixes import ContentPrefix
from skipjoin.core.request import NO_TARGET, Request, RequestOptions, ServiceClass, Target

# The block size of the worlds that run these loads.
BLOCK_SIZE = 4


def make(
    number: int,
    prompt: int = 8,
    max_tokens: int = 4,
    *,
    arrival: float = 0.0,
    priority: int = 0,
    deadline: float | None = None,
    best_effort: bool = False,
    target: Target = NO_TARGET,
    client: str = "",
    forecast: Forecast | None = None,
    **rest: Any,
) -> Request:
    options = RequestOptions(
        service=ServiceClass.BEST_EFFORT if best_effort else ServiceClass.REAL_TIME,
        priority=priority,
        deadline_s=None if deadline is None else deadline - arrival,
        target=target,
        client=client,
    )
    request = Request(number, arrival, range(prompt), max_tokens, options=options, **rest)
    request.progress.expect(forecast)
    return request


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
    best_effort: float = 0.0,
    texts: int = 0,
) -> list[Request]:
    """Return `count` requests with Poisson arrivals and uniform lengths, the same for the same arguments.

    Args:
        best_effort: Share of best-effort requests.
        texts: Number of texts that prompts begin with, for some blocks; with 0, requests share no KV.
    """
    draw = random.Random(seed)
    numbers = tuple(priorities)
    now = 0.0
    requests = []
    for number in range(first_id, first_id + count):
        now += draw.expovariate(rate)
        request = make(
            number,
            draw.randint(*prompts),
            draw.randint(*outputs),
            arrival=now,
            priority=draw.choice(numbers),
            stop_tokens=stop_tokens,
            best_effort=bool(best_effort) and draw.random() < best_effort,
        )
        requests.append(with_common_prefix(request, draw, texts) if texts else request)
    return requests


def with_common_prefix(request: Request, draw: random.Random, texts: int) -> Request:
    """Give the request a prompt that begins with one of the texts, and let it share KV."""
    text, common = 1000 * draw.randrange(1, texts + 1), draw.choice((0, 9, 20, 60))
    length = len(request.prompt)
    prompt = [text + place if place < common else 1000 * (10 + request.id) + place for place in range(length)]
    return changed(request, prompt=prompt, prefix=ContentPrefix(BLOCK_SIZE))


def changed(request: Request, **changes: Any) -> Request:
    """Return a request that has not begun with other fields or options."""
    of_options = {name: value for name, value in changes.items() if name in RequestOptions.__slots__}
    rest = {name: value for name, value in changes.items() if name not in of_options}
    version = replace(request, options=replace(request.options, **of_options), **rest)
    version.progress.expect(request.progress.forecast)
    return version
