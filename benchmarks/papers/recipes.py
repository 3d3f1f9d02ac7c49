"""Labels of recipes in the papers' figures and in tests, and what each is: variants by parameters, baselines in files.

The file `recipes.py` in a paper's folder has its baselines, whose labels are their names there.
"""

from __future__ import annotations

from pathlib import Path

from skipjoin.recipes import RECIPES, find, in_file

_FILES = sorted(Path(__file__).resolve().parent.glob("*/recipes.py"))
_VARIANTS = {
    "alise-defer": "alise[eviction=defer]",
    "alise-reactive": "alise[eviction=reactive]",
    "alise-recompute": "alise[eviction=recompute]",
    "bros-recompute": "bros[eviction=recompute]",
    "bros-swap": "bros[eviction=swap]",
    "bros-unshared": "bros[eviction=partial]",
    "econoserve-sdo": "econoserve[sharing=off]",
    "fastserve-defer": "fastserve[eviction=defer]",
    "fastserve-reactive": "fastserve[eviction=reactive]",
    "fastserve-recompute": "fastserve[eviction=recompute]",
}
# What `--recipe` accepts, by label.
SPELLED = {
    **{name: name for name in RECIPES},
    **_VARIANTS,
    **{name: f"{path}:{name}" for path in _FILES for name in in_file(path)},
}
# Recipes by label.
LABELLED = {label: find(name) for label, name in SPELLED.items()}
_LABELS = {name: label for label, recipe in LABELLED.items() for name in (recipe.name, SPELLED[label])}


def label_of(name: str) -> str:
    """Return the label of a recipe as it is spelled or called in results; others keep their name."""
    return _LABELS.get(name, name)
