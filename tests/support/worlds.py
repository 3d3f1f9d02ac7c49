"""Worlds that tests are parametrized with: every combination of recipe, pipeline and eviction, or a pairwise set."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any

import pytest

from support.policies import EVICTIONS
from support.recipes import RECIPES
from support.watch import World

# Plans in flight, whether they overlap, and pipeline stages.
Pipeline = tuple[int, bool, int]
PIPELINES: list[Pipeline] = [(1, False, 1), (2, False, 1), (2, True, 1), (2, False, 2), (3, False, 3)]


def combinations(
    *axes: Sequence[Any], parts: int = 1
) -> Iterator[tuple[tuple[Any, ...], tuple[pytest.MarkDecorator, ...]]]:
    """Yield every combination of the axes' values, and the marks of its test.

    Unmarked combinations are a pairwise set: any two values of two axes occur together in at least one of them. The
    others are marked `exhaustive`. With `parts`, only one in `parts` combinations of the pairwise set is unmarked. Then
    all pairs with a value of the shortest axis still occur, if the other axes are longer by this factor.
    """
    residues = min(map(len, axes)) * parts if len(axes) > 2 else 1
    for places in product(*(range(len(axis)) for axis in axes)):
        marks = () if sum(places) % residues == 0 else (pytest.mark.exhaustive,)
        yield tuple(axis[place] for axis, place in zip(axes, places, strict=True)), marks


def each_recipe(*but: str, parts: int = 1, begin: int = 0) -> list[Any]:
    """Return a test parameter for each recipe except `but`.

    Variants of a recipe are marked `exhaustive`, because `worlds` has the systems and the eviction policies of all. So
    are the others, except one in `parts` from the one numbered `begin`.
    """
    names = sorted(set(RECIPES).difference(but))
    usual = {*[name for name in names if not is_variant(name)][begin::parts]}
    return [pytest.param(name) if name in usual else exhaustive(name) for name in names]


def is_variant(label: str) -> bool:
    base, dash, _ = label.partition("-")
    return bool(dash) and base in RECIPES


def exhaustive(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def halved(cases: Iterable[Any], begin: int = 0) -> list[Any]:
    """Return test parameters, every second of which is marked `exhaustive`; `begin` 1 exchanges them."""
    return one_in(2, cases, begin)


def one_in(parts: int, cases: Iterable[Any], begin: int = 0) -> list[Any]:
    """Return test parameters, of which one in `parts` is not marked `exhaustive`."""
    return [exhaustive(case) if (number + begin) % parts else pytest.param(case) for number, case in enumerate(cases)]


def checkered(one: Sequence[Any], other: Sequence[Any], colors: int = 2) -> list[Any]:
    """Return a test parameter for each pair. Every value is unmarked with one in `colors` of the others' values.

    Neither sequence may be shorter than `colors`, or some values would be unmarked with none.
    """
    return [
        exhaustive(*pair) if sum(places) % colors else pytest.param(*pair)
        for places, pair in zip(product(range(len(one)), range(len(other))), product(one, other), strict=True)
    ]


def world_of(recipe: str, pipeline: Pipeline, eviction: str | None, **settings: Any) -> World:
    """Return a world. `eviction` is a name of `EVICTIONS`; None keeps the recipe's own."""
    depth, overlap, stages = pipeline
    return World(recipe, depth, overlap, EVICTIONS[eviction] if eviction else None, stages=stages, **settings)


def worlds(
    recipes: Sequence[str],
    pipelines: Sequence[Pipeline],
    evictions: Sequence[str] = sorted(EVICTIONS),
    *,
    parts: int = 1,
) -> Any:
    return [
        pytest.param(
            world_of(recipe, pipeline, name), id=f"{recipe}-{'-'.join(map(str, pipeline))}-{name}", marks=marks
        )
        for (recipe, pipeline, name), marks in combinations(recipes, pipelines, evictions, parts=parts)
    ]
