"""What a recipe is, what it is built from, and those that there are."""

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

# Seconds per output token that users accept: FastServe's objective of the normalized latency.
DEFAULT_SLO_S = 0.3
# Stands for a machine that is not known yet.
_ANY_COST = LinearCost(floor=0.01, prefill_token=1e-5)


class Forecasts(StrEnum):
    """What a recipe reads in `Request.forecast`: what an engine, or a simulation, has to put there."""

    NONE = "none"  # nothing
    LEARNT = "learnt"  # what a forecaster expects; a request without a forecast is served, too
    TRUE = "true"  # the true output length: the recipe is an oracle of experiments


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """The most that can come together in an engine.

    requests: live at once; None: any number. max_len: tokens of a request. device_blocks, host_blocks: KV blocks of
    block_size tokens on each tier. depth: plans in flight.
    """

    requests: int | None
    max_len: int
    device_blocks: int
    host_blocks: int
    block_size: int
    depth: int


@dataclass(frozen=True, slots=True)
class Settings:
    """What every recipe is built from.

    cost: the profile of model and machine. max_seqs, max_tokens: most requests and tokens in a step. slo_s: seconds per
    output token that users accept. best_effort_wait_s: after which a best-effort request is served as a real-time one.
    fair_output_weight: clients get equal service, of which a generated token is so much as so many of prompts; None:
    they are not told apart. has_true_forecasts: whether requests come with forecasts that are their true output
    lengths. stages: of a pipeline, between which batches are shared out; as many plans must be in flight, without
    overlap. lossless_swap: whether KV returns from the host as it left. limits: None: not known yet.
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
    """What only some recipes understand: none of it here. Subclasses add fields with knobs.

    Raises `ConfigError` on a value outside its bounds.
    """

    def __post_init__(self) -> None:
        check(self)

    def resolved(self, s: Settings, policies: Policies) -> Self:
        """The parameters with every value that follows from others. policies: what the recipe builds from these.

        Raises `ConfigError` for values that exclude each other or that such an engine cannot keep.
        """
        return self

    def notice(self, s: Settings) -> str:
        """What the operator is told when the engine is ready, of parameters that are resolved; empty: nothing."""
        return ""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A serving system.

    summary: one line about it. params: the class of its parameters. function: what makes the policies, from `Settings`
    and, if it has parameters, these. forecasts: what it reads in `Request.forecast`. needs_lossless_swap: whether KV
    must return from the host as it left, whatever the engine's or the simulation's other recipes do.
    """

    name: str
    summary: str
    params: type[Params]
    function: Callable[..., Policies]
    forecasts: Forecasts = Forecasts.NONE
    needs_lossless_swap: bool = False

    @property
    def parameters(self) -> Mapping[str, Setting]:
        """Its parameters by name."""
        return settings_of(self.params)

    def read(self, given: Mapping[str, Value]) -> Params:
        """The parameters, of which some are given. Raises `ConfigError`."""
        check_names([self], given)
        return self.params(**given)

    def resolve(self, s: Settings, given: Mapping[str, Value]) -> Params:
        """All parameters as they hold in an engine; see `Params.resolved`."""
        params = self.read(given)
        return params.resolved(s, self.make(s, params))

    def build(self, s: Settings, given: Mapping[str, Value]) -> Policies:
        """The policies. Raises `ConfigError`."""
        return self.make(s, self.resolve(s, given))

    def make(self, s: Settings, params: Params) -> Policies:
        """The policies with all of the parameters. Raises `ConfigError`."""
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

    The function takes `Settings`, and as a second argument the recipe's parameters, if it has any, whose class is the
    argument's annotation."""

    def register(make: _Make) -> _Make:
        name = make.__name__.replace("_", "-")
        annotations = [get_type_hints(make)[argument] for argument in signature(make).parameters]
        params = annotations[1] if len(annotations) > 1 else Params
        summary = (getdoc(make) or "").split("\n\n")[0].replace("\n", " ")
        RECIPES[name] = Recipe(name, summary, params, make, forecasts, needs_lossless_swap)
        return make

    return register if make is None else register(make)


def find(name: str) -> Recipe:
    """The recipe of that name, or one in a file, as `./my_policy.py:edf`, which is run once in a process.

    Raises `ConfigError`, naming those that exist, if there is none.
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
    """The policies of the recipe called `name`, with some parameters. Raises `ConfigError` where there is no such
    recipe or parameter, and where the recipe needs something that the settings lack."""
    return find(name).build(settings, given or {})


def check_recipe(
    name: str, given: Mapping[str, Value], *, lossless_swap: bool = True, fair_output_weight: float | None = None
) -> None:
    """Raise `ConfigError` for a recipe and parameters that no engine can have, as far as can be said before a model is
    loaded."""
    settings = Settings(_ANY_COST, fair_output_weight=fair_output_weight, lossless_swap=lossless_swap)
    build(name, settings, given)


def own(name: str, given: Mapping[str, Value]) -> dict[str, Value]:
    """Of these parameters, those that the recipe called `name` has."""
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
    """The names of the parameters that recipes have, for errors."""
    return "; ".join(f"{one.name} has {', '.join(one.parameters) or 'no parameters'}" for one in recipes)
