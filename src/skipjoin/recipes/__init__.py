"""Serving systems by name: decorated functions of this package, of a user's file, or of an installed package."""

from skipjoin.policies.fairness import OUTPUT_WEIGHT
from skipjoin.policies.ordering import BEST_EFFORT_WAIT_S
from skipjoin.recipes import adaptive, alise, baselines, bros, econoserve, fastserve
from skipjoin.recipes.files import located_errors
from skipjoin.recipes.registry import (
    RECIPES,
    EngineLimits,
    Forecasts,
    Params,
    Recipe,
    Settings,
    absolute,
    build,
    check_recipe,
    find,
    in_file,
    listed,
    read_assignments,
    recipe,
    recipes_of,
)
from skipjoin.recipes.spelling import names_in

for _module in (adaptive, alise, baselines, bros, econoserve, fastserve):
    RECIPES.update(recipes_of(_module.__name__))

# Default recipe of an engine.
DEFAULT = "adaptive"

__all__ = [
    "BEST_EFFORT_WAIT_S",
    "DEFAULT",
    "OUTPUT_WEIGHT",
    "RECIPES",
    "EngineLimits",
    "Forecasts",
    "Params",
    "Recipe",
    "Settings",
    "absolute",
    "adaptive",
    "alise",
    "baselines",
    "bros",
    "build",
    "check_recipe",
    "econoserve",
    "fastserve",
    "find",
    "in_file",
    "listed",
    "located_errors",
    "names_in",
    "read_assignments",
    "recipe",
]
