"""The worlds that every recipe is run in, and what the plans of each hash to.

`python tests/recipes/recorded_traces.py --write` stores the hashes anew: after a change that is meant to change
decisions.
"""

from __future__ import annotations

import hashlib
import json
import sys
from functools import cache
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from skipjoin.core.request import Request
from support.load import load
from support.policies import EVICTIONS, SYSTEMS
from support.watch import Run, World, run
from support.worlds import PIPELINES, world_of

HASHES = Path(__file__).with_suffix(".json")

WORLDS = {
    f"{recipe}-{'-'.join(map(str, pipeline))}-{name}": world_of(recipe, pipeline, name)
    for recipe, pipeline, name in product(SYSTEMS, PIPELINES, sorted(EVICTIONS))
}


def drawn() -> list[Request]:
    return load(1, 20, priorities=(-1, 0, 7))


@cache
def served(world: World) -> Run:
    """The world's run of `drawn`."""
    return run(world, drawn())


def trace_hash(done: Run) -> str:
    """Of every plan, when it was made, and when all was over."""
    return hashlib.sha256(repr((done.trace, done.end)).encode()).hexdigest()[:12]


def stored() -> dict[str, str]:
    """The hashes, by the world's name."""
    hashes: dict[str, str] = json.loads(HASHES.read_text())
    return hashes


if __name__ == "__main__" and "--write" in sys.argv:
    HASHES.write_text(json.dumps({name: trace_hash(served(world)) for name, world in WORLDS.items()}, indent=0) + "\n")
