"""The load of the rounds without faults, for an hour: `make soak`. Memory and descriptors have to stay flat.

    PYTHONPATH=tests python -m chaos.soak [--minutes 60] [--seed 0]

After each round, with the server at rest, resident memory of the API process and of the engine is noted. The first
quarter of the rounds fills caches and is left out. Over the rest the slope, by the median of the slopes between all
pairs of points (Theil-Sen), may be at most `SLOPE_MIB_PER_HOUR`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from chaos.driver import Driver, driver
from chaos.plan import WORLDS, Round, plan

# Room for what tells nothing of a leak: an allocator's arenas, a table that doubles.
SLOPE_MIB_PER_HOUR = 8.0
_WARM_UP = 0.25
_SAY_EVERY = 20
Point = tuple[float, float]


def quiet_rounds(seed: int) -> Iterator[Round]:
    """All on one server, without faults."""
    for number in itertools.count():
        yield replace(plan(seed, number), block=0, world=WORLDS[0], recipe="fastserve", fault="none")


def slope(points: Sequence[Point]) -> float:
    """The median of the slopes between all pairs of points with different times."""
    return statistics.median((y - b) / (x - a) for (a, b), (x, y) in itertools.combinations(points, 2) if x > a)


def main() -> int:
    """1 if a round found something or memory grew."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    return asyncio.run(soak(args.seed, 60 * args.minutes))


async def soak(seed: int, seconds: float) -> int:
    """Run quiet rounds for so long; the exit code."""
    points: dict[str, list[Point]] = {}
    begin = time.monotonic()
    async with driver() as found:
        for this in quiet_rounds(seed):
            if troubles := await found.run(this):
                print(*troubles, sep="\n")
                return 1
            note(points, found, time.monotonic() - begin)
            if this.number % _SAY_EVERY == 0:
                print(f"{time.monotonic() - begin:.0f} s, {this}: {told(points)}", flush=True)
            if time.monotonic() - begin > seconds:
                break
    return verdict(points)


def note(points: dict[str, list[Point]], found: Driver, now: float) -> None:
    """Add what the processes hold now, in MiB."""
    for name, process in found.processes().items():
        points.setdefault(name, []).append((now, process.memory_info().rss / (1 << 20)))


def told(points: dict[str, list[Point]]) -> str:
    """The latest of each."""
    return ", ".join(f"{name} {some[-1][1]:.0f} MiB" for name, some in points.items())


def verdict(points: dict[str, list[Point]]) -> int:
    """Tell the slopes; 1 if one of them is too steep."""
    steep = 0
    for name, some in points.items():
        per_hour = 3600 * slope(some[int(_WARM_UP * len(some)) :])
        steep += per_hour > SLOPE_MIB_PER_HOUR
        print(f"{name}: {some[0][1]:.0f} to {some[-1][1]:.0f} MiB, {per_hour:+.1f} MiB per hour, {len(some)} rounds")
    return int(steep > 0)


if __name__ == "__main__":
    sys.exit(main())
