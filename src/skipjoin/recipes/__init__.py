"""Serving systems by name. Each is a composition of policies; none has a class of its own.

A recipe is a function in a module of this package, with a decorator; its parameters are a dataclass beside it.
"""

from skipjoin.policies.fairness import OUTPUT_WEIGHT
from skipjoin.policies.ordering import BEST_EFFORT_WAIT_S
from skipjoin.recipes import alise, baselines, bros, coupled, econoserve, fastserve
from skipjoin.recipes.files import absolute
from skipjoin.recipes.registry import (
    DEFAULT_SLO_S,
    RECIPES,
    EngineLimits,
    Forecasts,
    Params,
    Recipe,
    Settings,
    build,
    check_names,
    check_recipe,
    described,
    find,
    own,
    recipe,
)

# What an engine runs if nothing else is said.
DEFAULT = "fastserve"

__all__ = [
    "BEST_EFFORT_WAIT_S",
    "DEFAULT",
    "DEFAULT_SLO_S",
    "OUTPUT_WEIGHT",
    "RECIPES",
    "EngineLimits",
    "Forecasts",
    "Params",
    "Recipe",
    "Settings",
    "absolute",
    "alise",
    "baselines",
    "bros",
    "build",
    "check_names",
    "check_recipe",
    "coupled",
    "described",
    "econoserve",
    "fastserve",
    "find",
    "own",
    "recipe",
]
