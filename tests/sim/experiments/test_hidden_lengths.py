"""Output lengths stay hidden: if workloads differ in one length, policies and dispatch rules see the same run until the
shorter output ends."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from skipjoin.core.events import Event, Token
from skipjoin.observe.record import NO_SLO, Slo
from skipjoin.recipes import Forecasts
from skipjoin.sim.experiments.cell import Cell, Extent
from skipjoin.sim.experiments.simulation import run
from skipjoin.sim.experiments.system import System
from skipjoin.workload.traces import Trace, TraceRow
from skipjoin.workload.workload import Replay
from support.policies import SYSTEMS
from support.recipes import RECIPES, SPELLED
from support.simulated import SYSTEM
from support.worlds import combinations

ORACLES = {name for name, recipe in RECIPES.items() if recipe.forecasts is Forecasts.TRUE}
SHORT, LONG = 50, 1500
SCALED = Slo(jct_scale=2.0)
# The KV has space for about six requests, which is too little for the arrivals.
SMALL = replace(SYSTEM, kv_blocks=110, cpu_blocks=40, max_num_seqs=8)


class ShortOutputEndsError(Exception):
    """Ends a run when the short output is complete."""


def workload(output: int) -> Replay:
    draw = random.Random(0)
    others = [TraceRow(number * 0.05, draw.randint(8, 200), draw.randint(4, 120)) for number in range(1, 20)]
    return Replay(Trace("lengths", (TraceRow(0.0, 40, output), *others)))


def observed(system: System, output: int, slo: Slo = NO_SLO) -> list[str]:
    """Return all events with all fields of their requests until the first request has a short output."""
    found: list[str] = []

    def record(events: list[Event]) -> None:
        if any(
            isinstance(event, Token) and event.request.id == 0 and len(event.request.progress.output) == SHORT
            for event in events
        ):
            raise ShortOutputEndsError
        found.extend(map(repr, events))

    with pytest.raises(ShortOutputEndsError):
        run(Cell(system, workload(output), Extent(None, None, 0), slo), on_events=record)
    return found


def cases() -> list[Any]:
    """Return test parameters. Variants of a recipe with another eviction policy run with a pipeline only."""
    found = []
    for values, marks in combinations(sorted(set(RECIPES) - ORACLES), (1, 2), (NO_SLO, SCALED), parts=2):
        recipe, stages, slo = values
        name = "-".join((recipe, str(stages), *["deadlines"] * (slo is SCALED)))
        # Deadlines are read where targets are, whatever evicts.
        is_rare = (stages == 1 or slo is SCALED) and recipe not in SYSTEMS
        found.append(pytest.param(*values, id=name, marks=pytest.mark.exhaustive if is_rare else marks))
    return found


@pytest.mark.parametrize(("recipe", "stages", "slo"), cases())
def test_recipes_cannot_see_the_length_of_an_output(recipe: str, stages: int, slo: Slo) -> None:
    system = replace(SMALL, recipe=SPELLED[recipe], stages=stages)
    assert observed(system, SHORT, slo) == observed(system, LONG, slo)


@pytest.mark.parametrize("dispatch", ["round-robin", "least-work"])
def test_dispatch_cannot_see_the_length_of_an_output(dispatch: str) -> None:
    system = replace(SMALL, replicas=2, dispatch=dispatch)
    assert observed(system, SHORT) == observed(system, LONG)


@pytest.mark.parametrize(
    "settings",
    [{"recipe": "srpt"}, {"replicas": 2, "dispatch": "least-work-oracle"}, {"max_tokens": "exact"}],
    ids=lambda settings: next(reversed(settings.values())),
)
def test_oracles_see_the_length_of_an_output(settings: dict[str, Any]) -> None:
    system = replace(SMALL, **settings)
    assert observed(system, SHORT) != observed(system, LONG)
