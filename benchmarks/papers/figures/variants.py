"""Variants that figures compare: a recipe with its forecaster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from papers.figures.runs import Kept, Options
from papers.recipes import SPELLED
from skipjoin.observe.record import Record
from skipjoin.options import Value
from skipjoin.sim.experiments.machines import Machine
from skipjoin.sim.experiments.system import System

# "As large as possible according to the GPU memory capacity" (ALISE section 4.1): memory limits batches before this.
BATCH_CAP = 256


@dataclass(frozen=True, slots=True)
class Variant:
    """A recipe with its forecaster.

    Attributes:
        name: Name in pictures and tables.
        recipe: Label in `papers.recipes`.
        predictor: Forecaster, or None if the recipe reads no forecasts or true lengths.
        params: Parameters of the recipe; unknown ones are ignored.
        settings: Further fields of `System`.
    """

    name: str
    recipe: str
    predictor: str | None = None
    params: Mapping[str, Value] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)

    def on(self, machine: Machine, *, batch_cap: int = BATCH_CAP, **settings: object) -> System:
        given = {"max_num_seqs": batch_cap, **self.settings, **settings}
        (found,) = machine.systems(SPELLED[self.recipe], predictor=self.predictor, **given)
        return replace(found, recipe_params=self.params) if self.params else found


def plain(*recipes: str) -> list[Variant]:
    """Return variants of recipes that read no forecasts, or true lengths."""
    return [Variant(recipe, recipe) for recipe in recipes]


def lasting(options: Options, times: float) -> Options:
    return replace(options, duration_s=times * options.duration_s if options.lasting_s is None else options.lasting_s)


def named(plans: Mapping[str, Kept] | Sequence[tuple[str, Kept]]) -> list[Record]:
    pairs = plans.items() if isinstance(plans, Mapping) else plans
    return [{"variant": name, **record} for name, plan in pairs for record in plan.records]
