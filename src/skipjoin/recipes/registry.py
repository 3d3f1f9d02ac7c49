"""What a recipe is, what it is built from, and those that there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from inspect import getdoc, signature
from typing import Self, TypeVar, get_type_hints

from skipjoin.core.policy import CostModel, LengthPredictor, Policies
from skipjoin.knobs import ConfigError, Setting, Value, check, nearest, settings_of
from skipjoin.policies.cost import LinearCost

# Seconds per output token that users accept: FastServe's objective of the normalized latency.
DEFAULT_SLO_S = 0.3
# Stands for a machine that is not known yet.
_ANY_COST = LinearCost(floor=0.01, prefill_token=1e-5)


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
    output token that users accept. predictor: the true output lengths; None: they are not known. stages: of a pipeline,
    between which batches are shared out; as many plans must be in flight, without overlap. limits: None: not known yet.
    """

    cost: CostModel
    max_seqs: int = 256
    max_tokens: int = 2048
    _: KW_ONLY
    slo_s: float = DEFAULT_SLO_S
    predictor: LengthPredictor | None = None
    stages: int = 1
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
    and, if it has parameters, these.
    """

    name: str
    summary: str
    params: type[Params]
    function: Callable[..., Policies]

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
        return self.function(s) if self.params is Params else self.function(s, params)


RECIPES: dict[str, Recipe] = {}
_Make = TypeVar("_Make", bound=Callable[..., Policies])


def recipe(make: _Make) -> _Make:
    """Register a recipe under its function's name, with hyphens. The function takes `Settings`, and as a second
    argument the recipe's parameters, if it has any, whose class is the argument's annotation."""
    name = make.__name__.replace("_", "-")
    annotations = [get_type_hints(make)[argument] for argument in signature(make).parameters]
    params = annotations[1] if len(annotations) > 1 else Params
    summary = (getdoc(make) or "").split("\n\n")[0].replace("\n", " ")
    RECIPES[name] = Recipe(name, summary, params, make)
    return make


def find(name: str) -> Recipe:
    """The recipe of that name. Raises `ConfigError`, naming those that exist, if there is none."""
    if name not in RECIPES:
        known = sorted(RECIPES)
        raise ConfigError(f"recipe must be one of {', '.join(known)}, got {name!r}{nearest(name, known)}")
    return RECIPES[name]


def build(name: str, settings: Settings, given: Mapping[str, Value] | None = None) -> Policies:
    """The policies of the recipe called `name`, with some parameters. Raises `ConfigError` where there is no such
    recipe or parameter, and where the recipe needs something that the settings lack."""
    return find(name).build(settings, given or {})


def check_recipe(name: str, given: Mapping[str, Value]) -> None:
    """Raise `ConfigError` for a recipe and parameters that no engine can have, as far as can be said before a model is
    loaded."""
    build(name, Settings(_ANY_COST), given)


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
        problem = f"{name} needs recipe {', '.join(owners)}" if owners else f"there is no parameter {name!r}"
        raise ConfigError(f"{problem}: {described(recipes)}")


def described(recipes: Sequence[Recipe]) -> str:
    """The names of the parameters that recipes have, for errors."""
    return "; ".join(f"{one.name} has {', '.join(one.parameters) or 'no parameters'}" for one in recipes)
