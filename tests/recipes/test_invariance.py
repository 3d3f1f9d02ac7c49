"""On a machine of another speed, every recipe makes the same plans at times that are scaled alike."""

from __future__ import annotations

from dataclasses import fields
from functools import cache

import pytest

from skipjoin.core.forecast import Forecast
from skipjoin.core.request import Target
from skipjoin.core.step import PAUSE_S
from skipjoin.exec import simulated
from skipjoin.policies.cost import LinearCost
from support.load import changed, load
from support.policies import COST
from support.watch import Trace, World, run
from support.worlds import each_recipe, exhaustive

# Promises to people, which scale with the load of a test and not with its machine.
PROMISES_S = {"starvation_s": 0.3, "overtaking_s": 900.0, "overdue_s": 600.0, "ttft_s": 0.4, "tpot_s": 0.2}
# With the last one, constants in seconds that a recipe might have are shorter than a step, so it finds most of them.
FACTORS = (exhaustive(1 / 8), exhaustive(8.0), 4096.0)


def scaled(cost: LinearCost, factor: float) -> LinearCost:
    return LinearCost(**{field.name: getattr(cost, field.name) * factor for field in fields(cost)})


@cache
def trace(recipe: str, factor: float) -> Trace:
    params = tuple((name, seconds * factor) for name, seconds in PROMISES_S.items())
    world = World(
        recipe,
        device_blocks=36,
        cost=scaled(COST, factor),
        best_effort_wait_s=4.0 * factor,
        params=params,
    )
    requests = load(5, 24, rate=40.0 / factor, prompts=(1, 90))
    for number in range(0, 24, 2):
        requests[number] = changed(requests[number], target=Target(jct_s=factor * (0.5 + number % 5)))
    for request in requests:
        request.progress.expect(Forecast(request.max_tokens * (0.5 + request.id % 3), "test"))
    return run(world, requests).trace


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("recipe", each_recipe())
def test_plans_do_not_depend_on_the_speed_of_the_machine(
    recipe: str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trace(recipe, 1.0)
    monkeypatch.setattr(simulated, "PAUSE_S", factor * PAUSE_S)  # of the driver, while nothing but moves is left
    found = trace(recipe, factor)
    for (before, plan), (now, other) in zip(expected, found, strict=True):
        assert plan == other, f"at {before} and {now}"
        assert now == pytest.approx(factor * before)
