"""The settings of ALISE's evaluation: its machines, and what is compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from figures.runs import Kept, Options
from skipjoin.bench.machine import Machine
from skipjoin.bench.system import System
from skipjoin.observe.record import Record

# The paper's bound where it names one (section 4.2), and FastServe's, for the figures that both evaluations have.
BOUND, FASTSERVE_BOUND = "normalized_latency_s.mean<=0.2", "normalized_latency_s.mean<=0.3"
# "As large as possible according to the GPU memory capacity" (section 4.1): memory limits every batch here before this.
BATCH_CAP = 256
# Two GPUs share 1,024 GB of DRAM; half of each share is for swapped KV.
_V100_SWAP_GIB = 256.0
# KV is what the weights leave of 32 GiB less a tenth.
V100 = {
    model: Machine(model=model, hardware="v100-32gb", swap_gib=_V100_SWAP_GIB)
    for model in ("opt-2.7b", "opt-6.7b", "opt-13b", "llama-7b", "llama-13b", "pythia-12b")
}
# The setting of `benchmarks/fastserve`.
A100 = Machine(model="opt-13b", hardware="a100-40gb", kv_gib=11.0, swap_gib=128.0)


@dataclass(frozen=True, slots=True)
class Variant:
    """A recipe with what foresees its lengths.

    name: in pictures and tables. predictor: None: the recipe reads no forecasts, or reads true ones.
    """

    name: str
    recipe: str
    predictor: str | None = None

    def on(self, machine: Machine, *, batch_cap: int = BATCH_CAP, **settings: object) -> System:
        """The variant on a machine. settings: further fields of `System`."""
        (found,) = machine.systems(
            self.recipe,
            predictor=self.predictor,
            max_num_seqs=batch_cap,
            **settings,
        )
        return found


def alise(predictor: str, recipe: str = "alise") -> Variant:
    """A recipe of ALISE with forecasts of this predictor."""
    return Variant(f"{recipe} {predictor}", recipe, predictor)


def plain(*recipes: str) -> list[Variant]:
    """Recipes that read no forecasts, or true ones."""
    return [Variant(recipe, recipe) for recipe in recipes]


# What a predictor of text is like to know of lengths: `benchmarks/alise/texts` measures it.
NEAR_TRUE = alise("noise:0.2")
REGRESSED = tuple(alise(f"regress:{correlation}") for correlation in (0.8, 0.6, 0.3))


def lasting(options: Options, times: float) -> Options:
    """The same with a multiple of the duration."""
    return replace(options, duration_s=times * options.duration_s)


def named(plans: Mapping[str, Kept] | Sequence[tuple[str, Kept]]) -> list[Record]:
    """The records of plans, each with the name of its variant."""
    pairs = plans.items() if isinstance(plans, Mapping) else plans
    return [{"variant": name, **record} for name, plan in pairs for record in plan.records]
