"""Serving systems by name, each a composition of policies.

A recipe is a decorated function in a module of this package; its parameters are a dataclass next to it.
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

# Default recipe of an engine.
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
