from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any, NamedTuple

from skipjoin.config import ConfigError
from skipjoin.options import Option, check
from skipjoin.recipes import find
from skipjoin.replay.simulation import Outcome, errors, measured, simulated, system_of, trace_of

MIN_REQUESTS = 2
# Larger errors deserve a warning.
LARGE_ERROR = 0.3


def _tried(help: str, high: int) -> Option:
    return Option(help, low=1, high=high, is_common=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    max_num_seqs: Annotated[int | None, _tried("Slots to try in the recipes (default: the server's).", 1 << 20)] = None
    max_num_batched_tokens: Annotated[
        int | None, _tried("Tokens per step to try in the recipes (default: the server's).", 1 << 24)
    ] = None
    kv_blocks: Annotated[int | None, _tried("KV blocks to try in the recipes (default: the server's).", 1 << 30)] = None

    def __post_init__(self) -> None:
        check(self)

    @property
    def given(self) -> dict[str, int]:
        return {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}


class Comparison(NamedTuple):
    """Outcomes of one load: measured, simulated as the server is, and simulated in other ways."""

    outcomes: list[Outcome]
    errors: dict[str, float]  # relative error of each figure of the second outcome to the first
    between_steps_s: float  # measured time, which simulated times contain, as the next one
    around_s: float  # measured outside the engine

    @property
    def is_far(self) -> bool:
        """True if the simulator is too far from the measurement to trust its absolute times."""
        return any(abs(error) > LARGE_ERROR for error in self.errors.values())


def compare(
    found: Mapping[str, Any],
    recipes: Sequence[str],
    limits: Limits,
    on_progress: Callable[[str, float], None] = lambda doing, share: None,
) -> Comparison:
    """Simulate the load that the server's /debug/arrivals `found` under each recipe.

    Raises:
        ConfigError: There are too few requests, a recipe does not exist, or no request fits.
    """
    arrivals, machine = found["arrivals"], found["machine"]
    own, given = machine["recipe"], limits.given
    params = {own: machine["recipe_params"]}
    if len(arrivals) < MIN_REQUESTS:
        raise ConfigError(
            f"at least {MIN_REQUESTS} requests must have finished in that time, got {len(arrivals)}: "
            "send some, or choose a longer time"
        )
    for name in recipes:
        find(path_of(name, machine))
    changes = "".join(f", {name} {value}" for name, value in given.items())
    tried = [(name, f"{name}{changes}", given) for name in dict.fromkeys(recipes) if name != own or given]
    wanted = [(own, f"{own}, simulated", {}), *tried]
    trace, around_s = trace_of(arrivals), _around_s(arrivals)
    outcomes = [measured(arrivals, own)]
    for at, (recipe, name, changed) in enumerate(wanted):

        def share(part: float, at: int = at, name: str = name) -> None:
            on_progress(name, (at + part) / len(wanted))

        share(0.0)
        outcomes.append(
            simulated(
                system_of(machine, path_of(recipe, machine), changed, params.get(recipe, {})),
                trace,
                name,
                around_s,
                on_share=share,
            )
        )
    return Comparison(outcomes, errors(*outcomes[:2]), machine["between_steps_s"], median(around_s))


def _around_s(arrivals: Sequence[Mapping[str, Any]]) -> list[float]:
    usual = median([arrival["around_s"] for arrival in arrivals if arrival["around_s"] is not None] or [0.0])
    return [usual if arrival["around_s"] is None else arrival["around_s"] for arrival in arrivals]


def path_of(recipe: str, machine: Mapping[str, Any]) -> str:
    """Return the name by which a recipe is found, which for the server's own may be the path of a file."""
    path: str = machine["recipe_path"]
    return path if recipe == machine["recipe"] else recipe
