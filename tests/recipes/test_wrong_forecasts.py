"""With any forecasts of output lengths, a recipe that uses them takes at most twice as long as `fcfs`."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest

from skipjoin.core.events import Finished
from skipjoin.core.forecast import Forecast
from skipjoin.core.request import Request
from support.load import make
from support.watch import World, run
from support.worlds import checkered

MAX_OUTPUT = 40
# Forecast of an output of a number of tokens; None makes no forecast.
FORECASTS: dict[str, Callable[[int, random.Random], float | None]] = {
    "none": lambda tokens, draw: None,
    "true": lambda tokens, draw: tokens,
    "random": lambda tokens, draw: draw.randint(1, MAX_OUTPUT),
    "inverted": lambda tokens, draw: MAX_OUTPUT + 1 - tokens,
    "short": lambda tokens, draw: 1,
    "long": lambda tokens, draw: 1e6,
}
# Relative to `fcfs`. The worst is 1.9: the mean latency of ALISE if it takes long outputs for short and vice versa.
MAX_SLOWDOWN = 2.0


class Figures(NamedTuple):
    """Times to the last token, and the time until all requests finished."""

    mean_s: float
    longest_s: float
    all_s: float


@cache
def figures(recipe: str, forecasts: str) -> Figures:
    """Run a load of about three times the capacity, in which recomputation delays other requests."""
    draw, now = random.Random(3), 0.0
    requests: list[Request] = []
    for number in range(40):
        now += draw.expovariate(40.0)
        prompt, tokens = draw.randint(1, 60), draw.randint(1, MAX_OUTPUT)
        predicted = FORECASTS[forecasts](tokens, draw)
        requests.append(
            make(
                number,
                prompt,
                MAX_OUTPUT,
                arrival=now,
                stop_tokens=frozenset([prompt + tokens - 1]),
                forecast=None if predicted is None else Forecast(predicted, "test"),
            )
        )
    done = run(World(recipe, device_blocks=60), requests)
    ends = {event.request: event.now for event in done.events if isinstance(event, Finished)}
    times = [ends[request] - request.arrival for request in requests]
    return Figures(statistics.mean(times), max(times), done.end)


@pytest.mark.parametrize(
    ("forecasts", "recipe"), checkered([*FORECASTS], ["adaptive", "alise", "synccoupled", "econoserve"], colors=4)
)
def test_no_forecast_makes_a_recipe_twice_as_slow_as_fcfs(recipe: str, forecasts: str) -> None:
    found, base = figures(recipe, forecasts), figures("fcfs", "none")
    worse = tuple(one / other for one, other in zip(found, base, strict=True))
    assert max(worse) <= MAX_SLOWDOWN, worse


def test_true_forecasts_reduce_latency() -> None:
    """This shows that forecasts matter in the load."""
    assert figures("alise", "true").mean_s < 0.9 * figures("alise", "random").mean_s
