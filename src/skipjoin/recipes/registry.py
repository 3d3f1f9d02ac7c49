"""Recipes and their registry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from enum import StrEnum
from inspect import getdoc, signature
from typing import Self, TypeVar, get_type_hints, overload

from skipjoin.core.policy import CostModel, Policies
from skipjoin.options import ConfigError, Setting, Value, check, nearest, settings_of
from skipjoin.policies.cost import LinearCost
from skipjoin.policies.ordering import BEST_EFFORT_WAIT_S
from skipjoin.recipes.files import RecipeFile, load, parse

# Acceptable seconds per output token: FastServe's objective of normalized latency.
DEFAULT_SLO_S = 0.3
# Placeholder for an unknown machine.
_ANY_COST = LinearCost(floor=0.01, prefill_token=1e-5)


class Forecasts(StrEnum):
    """What a recipe expects in `Request.forecast`, set by an engine or a simulation."""

    NONE = "none"  # not read
    LEARNT = "learnt"  # a forecaster's prediction; requests without one are served, too
    TRUE = "true"  # the true output length, for oracles of experiments


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Capacity limits of an engine.

    Attributes:
        requests: Maximum number of unfinished requests; None is unlimited.
        max_len: Maximum tokens of a request.
        device_blocks, host_blocks: KV blocks of `block_size` tokens on the device and CPU tiers.
        depth: Plans in flight.
    """

    requests: int | None
    max_len: int
    device_blocks: int
    host_blocks: int
    block_size: int
    depth: int


@dataclass(frozen=True, slots=True)
class Settings:
    """Input of every recipe.

    Attributes:
        cost: Profile of model and machine.
        max_seqs, max_tokens: Limits of a step.
        slo_s: Acceptable seconds per output token.
        best_effort_wait_s: Age from which a best-effort request is served as real-time.
        fair_output_weight: Weight of a generated token relative to a prompt token for fairness between clients; None
            disables fairness.
        has_true_forecasts: Whether forecasts are the true output lengths.
        stages: Pipeline stages, with as many plans in flight and without overlap.
        lossless_swap: Whether swapping preserves KV exactly.
        limits: None if not known yet.
    """

    cost: CostModel
    max_seqs: int = 256
    max_tokens: int = 2048
    _: KW_ONLY
    slo_s: float = DEFAULT_SLO_S
    best_effort_wait_s: float = BEST_EFFORT_WAIT_S
    fair_output_weight: float | None = None
    has_true_forecasts: bool = False
    stages: int = 1
    lossless_swap: bool = True
    limits: EngineLimits | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """Parameters of a recipe, none by default. Subclasses add fields with options.

    Raises:
        ConfigError: A value is out of bounds.
    """

    def __post_init__(self) -> None:
        check(self)

    def resolved(self, s: Settings, policies: Policies) -> Self:
        """Return the parameters with derived values filled in.

        Args:
            policies: What the recipe builds from these parameters.

        Raises:
            ConfigError: Values exclude each other or are infeasible for this engine.
        """
        return self

    def notice(self, s: Settings) -> str:
        """Return a message for the operator about resolved parameters when the engine is ready; empty for none."""
        return ""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Serving system.

    Attributes:
        summary: One-line description.
        params: Class of its parameters.
        function: Builds the policies from `Settings` and, if there are any, the parameters.
        forecasts: What it expects in `Request.forecast`.
        needs_lossless_swap: Whether swapping must preserve KV exactly.
    """

    name: str
    summary: str
    params: type[Params]
    function: Callable[..., Policies]
    forecasts: Forecasts = Forecasts.NONE
    needs_lossless_swap: bool = False

    @property
    def parameters(self) -> Mapping[str, Setting]:
        """Parameters by name."""
        return settings_of(self.params)

    def read(self, given: Mapping[str, Value]) -> Params:
        """Return the parameters with the given values.

        Raises:
            ConfigError: A parameter is unknown or invalid.
        """
        check_names([self], given)
        return self.params(**given)

    def resolve(self, s: Settings, given: Mapping[str, Value]) -> Params:
        """Return all parameters as an engine uses them; see `Params.resolved`."""
        params = self.read(given)
        return params.resolved(s, self.make(s, params))

    def build(self, s: Settings, given: Mapping[str, Value]) -> Policies:
        """Build the policies with the given parameters.

        Raises:
            ConfigError: A parameter or setting is invalid.
        """
        return self.make(s, self.resolve(s, given))

    def make(self, s: Settings, params: Params) -> Policies:
        """Build the policies with all parameters.

        Raises:
            ConfigError: The recipe does not fit the settings.
        """
        if self.needs_lossless_swap and not s.lossless_swap:
            raise ConfigError(
                f"recipe {self.name} needs KV that returns from the host as it left: swap_dtype must be auto"
            )
        return self.function(s) if self.params is Params else self.function(s, params)


RECIPES: dict[str, Recipe] = {}
_FROM_FILES: dict[RecipeFile, Recipe] = {}
_Make = TypeVar("_Make", bound=Callable[..., Policies])


@overload
def recipe(make: _Make) -> _Make: ...
@overload
def recipe(*, forecasts: Forecasts = Forecasts.NONE, needs_lossless_swap: bool = False) -> Callable[[_Make], _Make]: ...
def recipe(
    make: _Make | None = None, *, forecasts: Forecasts = Forecasts.NONE, needs_lossless_swap: bool = False
) -> _Make | Callable[[_Make], _Make]:
    """Register a recipe under its function's name, with hyphens: `@recipe`, or `@recipe(...)` with fields of `Recipe`.

    The function takes `Settings` and, if the recipe has parameters, these as a second argument, whose annotation is
    their class.
    """

    def register(make: _Make) -> _Make:
        name = make.__name__.replace("_", "-")
        annotations = [get_type_hints(make)[argument] for argument in signature(make).parameters]
        params = annotations[1] if len(annotations) > 1 else Params
        summary = (getdoc(make) or "").split("\n\n")[0].replace("\n", " ")
        RECIPES[name] = Recipe(name, summary, params, make, forecasts, needs_lossless_swap)
        return make

    return register if make is None else register(make)


def find(name: str) -> Recipe:
    """Return a recipe by its name or, as in `./my_policy.py:edf`, from a file, which runs once per process.

    Raises:
        ConfigError: There is no such recipe; the error lists those that exist.
    """
    if (file := parse(name)) is not None:
        if file not in _FROM_FILES:
            _FROM_FILES[file] = replace(load(file, RECIPES), name=file.short)
        return _FROM_FILES[file]
    if name not in RECIPES:
        known = sorted(RECIPES)
        raise ConfigError(
            f"recipe must be one of {', '.join(known)}, or FILE.py:NAME, got {name!r}{nearest(name, known)}"
        )
    return RECIPES[name]


def build(name: str, settings: Settings, given: Mapping[str, Value] | None = None) -> Policies:
    """Build the policies of the recipe `name`.

    Raises:
        ConfigError: The recipe or a parameter is unknown or invalid, or the settings lack something it needs.
    """
    return find(name).build(settings, given or {})


def check_recipe(
    name: str, given: Mapping[str, Value], *, lossless_swap: bool = True, fair_output_weight: float | None = None
) -> None:
    """Raise `ConfigError` for a recipe and parameters that are invalid whatever the model."""
    settings = Settings(_ANY_COST, fair_output_weight=fair_output_weight, lossless_swap=lossless_swap)
    build(name, settings, given)


def own(name: str, given: Mapping[str, Value]) -> dict[str, Value]:
    """Return those of the given parameters that the recipe `name` has."""
    parameters = find(name).parameters
    return {parameter: value for parameter, value in given.items() if parameter in parameters}


def check_names(recipes: Sequence[Recipe], names: Iterable[str]) -> None:
    """Raise `ConfigError` for a parameter that none of the recipes has."""
    for name in names:
        if any(name in recipe.parameters for recipe in recipes):
            continue
        owners = [recipe.name for recipe in RECIPES.values() if name in recipe.parameters]
        hint = nearest(name, [known for recipe in recipes for known in recipe.parameters])
        problem = f"{name} needs recipe {', '.join(owners)}" if owners else f"there is no parameter {name!r}{hint}"
        raise ConfigError(f"{problem}: {described(recipes)}")


def described(recipes: Sequence[Recipe]) -> str:
    """Return the names of the recipes' parameters, for errors."""
    return "; ".join(f"{one.name} has {', '.join(one.parameters) or 'no parameters'}" for one in recipes)
