from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from enum import StrEnum
from inspect import getdoc, signature
from pathlib import Path
from typing import Self, TypeVar, get_type_hints, overload

from skipjoin.core.policy import CostModel
from skipjoin.core.policy_set import Policies
from skipjoin.options import ConfigError, Setting, Value, check, nearest, settings_of, unknown
from skipjoin.policies.cost import LinearCost
from skipjoin.policies.ordering import BEST_EFFORT_WAIT_S
from skipjoin.recipes import files, packages, spelling

# Placeholder for an unknown machine.
_ANY_COST = LinearCost(floor=0.01, prefill_token=1e-5)


class Forecasts(StrEnum):
    """What a recipe expects in `Request.progress.forecast`, set by an engine or a simulation."""

    NONE = "none"  # not read
    LEARNED = "learned"  # a forecaster's prediction; requests without one are served, too
    TRUE = "true"  # the true output length, for oracles of experiments


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    requests: int | None  # None is unlimited
    max_len: int
    device_blocks: int
    cpu_blocks: int
    block_size: int
    depth: int


@dataclass(frozen=True, slots=True)
class Settings:
    """Input of every recipe. `max_seqs` and `max_tokens` limit a step."""

    cost: CostModel
    max_seqs: int = 256
    max_tokens: int = 2048
    _: KW_ONLY
    slo_s: float | None = None  # acceptable seconds per output token; None derives parameters from step times
    best_effort_wait_s: float = BEST_EFFORT_WAIT_S  # age from which a best-effort request is served as real-time
    fair_output_weight: float | None = None  # of a generated token relative to a prompt token; None disables fairness
    has_true_forecasts: bool = False
    stages: int = 1  # pipeline stages, with as many plans in flight and without overlap
    limits: EngineLimits | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """Parameters of a recipe, none by default. Subclasses add fields with options."""

    def __post_init__(self) -> None:
        check(self)

    def resolved(self, s: Settings, policies: Policies) -> Self:
        """Return the parameters with derived values filled in, or raise `ConfigError` if they exclude each other."""
        return self

    def notice(self, s: Settings) -> str:
        """Return a message for the operator when the engine is ready; empty for none."""
        return ""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Scheduler that users choose by name."""

    name: str
    summary: str
    params: type[Params]
    function: Callable[..., Policies]
    forecasts: Forecasts = Forecasts.NONE
    fixed: Mapping[str, Value] = field(default_factory=dict)  # given in the name, as in `fastserve[eviction=recompute]`

    @property
    def parameters(self) -> Mapping[str, Setting]:
        return settings_of(self.params)

    def read(self, given: Mapping[str, Value]) -> Params:
        check_names([self], given)
        if twice := next((name for name in given if name in self.fixed), None):
            raise ConfigError(f"{twice} is given twice: in recipe {self.name} and separately")
        return self.params(**{**self.fixed, **given})

    def fix(self, texts: Iterable[str]) -> Recipe:
        found = read_assignments([self], texts, "a parameter in brackets")
        self.params(**found)
        ordered = {name: found[name] for name in self.parameters if name in found}
        shown = ",".join(f"{name}={_text(value)}" for name, value in ordered.items())
        return replace(self, name=f"{self.name}[{shown}]", fixed=ordered)

    def resolve(self, s: Settings, given: Mapping[str, Value]) -> Params:
        params = self.read(given)
        return params.resolved(s, self.make(s, params))

    def build(self, s: Settings, given: Mapping[str, Value]) -> Policies:
        return self.make(s, self.resolve(s, given))

    def make(self, s: Settings, params: Params) -> Policies:
        with files.located_errors():
            return self.function(s) if self.params is Params else self.function(s, params)


# Built-in recipes by name, filled by the package.
RECIPES: dict[str, Recipe] = {}
_MADE: dict[Callable[..., Policies], Recipe] = {}  # all recipes in this process, by function
_FROM_FILES: dict[Path, dict[str, Recipe]] = {}
_Make = TypeVar("_Make", bound=Callable[..., Policies])


@overload
def recipe(make: _Make) -> _Make: ...
@overload
def recipe(*, forecasts: Forecasts = Forecasts.NONE) -> Callable[[_Make], _Make]: ...
def recipe(make: _Make | None = None, *, forecasts: Forecasts = Forecasts.NONE) -> _Make | Callable[[_Make], _Make]:
    """Make a function a recipe of its name, with hyphens.

    It takes `Settings` and, if it has parameters, these as a second argument, whose annotation is their class.
    """

    def register(make: _Make) -> _Make:
        name = make.__name__.replace("_", "-")
        second = _second_argument(make)
        params = get_type_hints(make)[second] if second else Params
        summary = (getdoc(make) or "").split("\n\n")[0].replace("\n", " ")
        _MADE[make] = Recipe(name, summary, params, make, forecasts)
        return make

    return register if make is None else register(make)


def _second_argument(make: Callable[..., Policies]) -> str:
    """Return the name of the argument of parameters; empty without one."""
    names = list(signature(make).parameters)
    if not 1 <= len(names) <= 2:
        raise TypeError(f"a recipe has one or two arguments, Settings and its parameters, not {len(names)}")
    if len(names) == 2 and names[1] not in get_type_hints(make):
        raise TypeError(f"the argument {names[1]!r} needs an annotation: the class of the recipe's parameters")
    return names[1] if len(names) == 2 else ""


def recipes_of(module: str) -> dict[str, Recipe]:
    return {recipe.name: recipe for make, recipe in _MADE.items() if make.__module__ == module}


def find(name: str) -> Recipe:
    """Return the recipe of a name, such as `bros`, `./my_policy.py:edf` or `fastserve[eviction=recompute,paced=off]`.

    If there is none, the `ConfigError` lists those that exist.
    """
    base, texts = spelling.split(name)
    recipe = _find(base)
    if not texts:
        return recipe
    try:
        return recipe.fix(texts)
    except ConfigError as error:
        raise ConfigError(f"recipe {name!r}: {error}") from error


def _find(name: str) -> Recipe:
    if (file := files.parse(name)) is not None:
        return _from_file(file)
    if name in packages.installed():
        return _installed(name)
    if name in RECIPES:
        return RECIPES[name]
    known = sorted([*RECIPES, *packages.installed()])
    raise ConfigError(f"recipe must be one of {', '.join(known)}, or FILE.py:NAME, got {name!r}{nearest(name, known)}")


def _from_file(file: files.RecipeFile) -> Recipe:
    found = in_file(file.path)
    if not found:
        raise ConfigError(f"recipe: {file.path} has no function with the decorator @recipe of skipjoin.policy")
    if not file.recipe:
        raise ConfigError(f"recipe must be FILE:NAME for a file: {file.path} has {', '.join(found)}")
    if file.recipe not in found:
        raise unknown(f"recipe: {file.path}", file.recipe, found)
    return replace(found[file.recipe], name=f"{file.path.name}:{file.recipe}")


def in_file(path: Path) -> Mapping[str, Recipe]:
    if path not in _FROM_FILES:
        _FROM_FILES[path] = recipes_of(files.run(path))
    return _FROM_FILES[path]


def _installed(name: str) -> Recipe:
    made = packages.load(name, is_builtin=name in RECIPES)
    found = next((recipe for make, recipe in _MADE.items() if make is made), None)
    if found is None:
        raise ConfigError(
            f"recipe {name!r}: {packages.described(name)} is no function with the decorator @recipe of "
            "skipjoin.policy; update or uninstall it"
        )
    return replace(found, name=name)


def listed() -> dict[str, Recipe]:
    return {**RECIPES, **{name: _installed(name) for name in packages.installed()}}


def absolute(name: str) -> str:
    """Return the name with an absolute path, for processes with another working folder."""
    base, _ = spelling.split(name)
    file = files.parse(base)
    return name if file is None else f"{file.path}:{file.recipe}{name.strip().removeprefix(base)}"


def build(name: str, settings: Settings, given: Mapping[str, Value] | None = None) -> Policies:
    return find(name).build(settings, given or {})


def check_recipe(name: str, given: Mapping[str, Value], *, fair_output_weight: float | None = None) -> None:
    build(name, Settings(_ANY_COST, fair_output_weight=fair_output_weight), given)


def own(name: str, given: Mapping[str, Value]) -> dict[str, Value]:
    found = find(name)
    return {name: value for name, value in given.items() if name in found.parameters and name not in found.fixed}


def read_assignments(recipes: Sequence[Recipe], texts: Iterable[str], field: str) -> dict[str, Value]:
    """Parse parameters of recipes from texts such as "starvation_s=3"."""
    found: dict[str, Value] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not (name and equals):
            raise ConfigError(f"{field} must be NAME=VALUE, got {text!r}: {described(recipes)}")
        if name in found:
            raise ConfigError(f"{field}: {name} is given twice")
        check_names(recipes, [name])
        found[name] = next(recipe.parameters[name] for recipe in recipes if name in recipe.parameters).read(value)
    return found


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value).removesuffix(".0")


def check_names(recipes: Sequence[Recipe], names: Iterable[str]) -> None:
    for name in names:
        if any(name in recipe.parameters for recipe in recipes):
            continue
        owners = [recipe.name for recipe in RECIPES.values() if name in recipe.parameters]
        hint = nearest(name, [known for recipe in recipes for known in recipe.parameters])
        problem = f"{name} needs recipe {', '.join(owners)}" if owners else f"there is no parameter {name!r}{hint}"
        raise ConfigError(f"{problem}: {described(recipes)}")


def described(recipes: Sequence[Recipe]) -> str:
    return "; ".join(f"{recipe.name} has {', '.join(recipe.parameters) or 'no parameters'}" for recipe in recipes)
