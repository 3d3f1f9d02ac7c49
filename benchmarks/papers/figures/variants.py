"""What figures compare: a recipe with what foresees its lengths."""

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
    """A recipe with what foresees its lengths.

    name: in pictures and tables. recipe: its label in `papers.recipes`. predictor: None: the recipe reads no forecasts,
    or reads true ones. params: of the recipe, those that it does not have are left out.
    """

    name: str
    recipe: str
    predictor: str | None = None
    params: Mapping[str, Value] = field(default_factory=dict)

    def on(self, machine: Machine, *, batch_cap: int = BATCH_CAP, **settings: object) -> System:
        """The variant on a machine. settings: further fields of `System`."""
        (found,) = machine.systems(SPELLED[self.recipe], predictor=self.predictor, max_num_seqs=batch_cap, **settings)
        return replace(found, recipe_params=self.params) if self.params else found


def plain(*recipes: str) -> list[Variant]:
    """Recipes that read no forecasts, or true ones."""
    return [Variant(recipe, recipe) for recipe in recipes]


def lasting(options: Options, times: float) -> Options:
    """The same with a multiple of the duration."""
    return replace(options, duration_s=times * options.duration_s)


def named(plans: Mapping[str, Kept] | Sequence[tuple[str, Kept]]) -> list[Record]:
    """The records of plans, each with the name of its variant."""
    pairs = plans.items() if isinstance(plans, Mapping) else plans
    return [{"variant": name, **record} for name, plan in pairs for record in plan.records]
