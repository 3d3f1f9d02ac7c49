from __future__ import annotations

import pytest

from skipjoin.core.events import Started
from skipjoin.core.request import Request, RequestOptions, ServiceClass, Target
from support.load import make
from support.watch import Stepper, World
from support.worlds import each_recipe

# An objective that was missed already does not put an urgent request behind others.
MISSED = Target(ttft_s=1e-6, tpot_s=1e-6)
URGENT = RequestOptions(is_urgent=True, priority=5, target=MISSED)
FLEX = RequestOptions(service=ServiceClass.BEST_EFFORT, priority=-5)


def order_of_start(recipe: str, arrivals: tuple[RequestOptions, ...]) -> list[RequestOptions]:
    """Return the order in which these requests begin after another one leaves the only slot."""
    stepper = Stepper(World(recipe, max_seqs=1).core())
    stepper.add(make(0, 8, 20))
    stepper.step()
    stepper.add(*(Request(number, 0.0, range(8), 6, options=asked) for number, asked in enumerate(arrivals, 1)))
    stepper.drain()
    started = dict.fromkeys(event.request.id for event in stepper.events if isinstance(event, Started))
    return [arrivals[number - 1] for number in started if number]


@pytest.mark.parametrize("recipe", each_recipe())
@pytest.mark.parametrize("target", [MISSED, Target(ttft_s=9.0)], ids=["late", "patient"])
def test_a_single_slot_goes_to_the_request_of_the_earliest_band(recipe: str, target: Target) -> None:
    default = RequestOptions(target=target)
    # In three rotations, each class arrives before and after each other one.
    first = (URGENT, default, FLEX) if target is MISSED else (FLEX, default, URGENT)
    for begin in range(3):
        arrivals = first[begin:] + first[:begin]
        order = order_of_start(recipe, arrivals)
        assert order.index(URGENT) < order.index(default)
        # Round robin serves all classes in turn, and BROS gives a slot to best effort if the default request can wait.
        if recipe != "round-robin" and not recipe.startswith("bros"):
            assert order[-1] is FLEX
