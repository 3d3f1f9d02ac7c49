"""How long an output gets stays hidden: runs whose workloads differ in one length are the same, in all that policies
and dispatch rules can see, until the shorter output ends."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from skipjoin.core.events import Event, Token
from skipjoin.observe.record import NO_SLO, Slo
from skipjoin.recipes import Forecasts
from skipjoin.sim.experiments.simulation import Cell, Extent, run
from skipjoin.sim.experiments.system import System
from skipjoin.workload.traces import Trace, TraceRow
from skipjoin.workload.workload import Replay
from support.recipes import RECIPES, SPELLED
from support.simulated import SYSTEM

ORACLES = {name for name, recipe in RECIPES.items() if recipe.forecasts is Forecasts.TRUE}
SHORT, LONG = 50, 1500
SCALED = Slo(jct_scale=2.0)
# Room for some six requests, for which arrivals are too many.
SMALL = replace(SYSTEM, kv_blocks=110, host_blocks=40, max_num_seqs=8)


class ShortOutputEndsError(Exception):
    """What ends a run at that moment."""


def workload(output: int) -> Replay:
    """Thirty requests, of which the first one's output has this length."""
    draw = random.Random(0)
    others = [TraceRow(number * 0.05, draw.randint(8, 200), draw.randint(4, 120)) for number in range(1, 30)]
    return Replay(Trace("lengths", (TraceRow(0.0, 40, output), *others)))


def seen(system: System, output: int, slo: Slo = NO_SLO) -> list[str]:
    """All events, with all fields of their requests, until the instant of the first request's last token but for a
    short output."""
    told: list[str] = []

    def note(events: list[Event]) -> None:
        if any(isinstance(one, Token) and one.request.id == 0 and len(one.request.output) == SHORT for one in events):
            raise ShortOutputEndsError
        told.extend(map(repr, events))

    with pytest.raises(ShortOutputEndsError):
        run(Cell(system, workload(output), Extent(None, None, 0), slo), on_events=note)
    return told


@pytest.mark.parametrize("slo", [NO_SLO, SCALED], ids=["", "deadlines"])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("recipe", sorted(set(RECIPES) - ORACLES))
def test_recipes_cannot_see_the_length_of_an_output(recipe: str, stages: int, slo: Slo) -> None:
    system = replace(SMALL, recipe=SPELLED[recipe], stages=stages)
    assert seen(system, SHORT, slo) == seen(system, LONG, slo)


@pytest.mark.parametrize("dispatch", ["round-robin", "least-work"])
def test_dispatch_cannot_see_the_length_of_an_output(dispatch: str) -> None:
    system = replace(SMALL, replicas=2, dispatch=dispatch)
    assert seen(system, SHORT) == seen(system, LONG)


@pytest.mark.parametrize(
    "told",
    [{"recipe": "srpt"}, {"replicas": 2, "dispatch": "least-work-oracle"}, {"max_tokens": "exact"}],
    ids=lambda told: next(reversed(told.values())),
)
def test_what_is_declared_to_tell_lengths_does(told: dict[str, Any]) -> None:
    system = replace(SMALL, **told)
    assert seen(system, SHORT) != seen(system, LONG)
