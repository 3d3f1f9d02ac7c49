"""Run the load without faults for an hour (`make soak`) and check that memory and descriptors do not grow.

    PYTHONPATH=tests python -m chaos.soak [--minutes 60] [--seed 0]

After each round, the resident memory of the API process and of the engine is measured without file-backed pages, which
the system can reclaim. The first quarter of the time fills caches and is ignored. After it, memory may grow by at most
`MAX_GROWTH_MIB`, by the median of the slopes between all pairs of points (Theil-Sen). A longer run finds smaller leaks.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import psutil

from chaos.driver import Driver, run, run_rounds
from chaos.plan import WORLDS, Round, plan
from support.rounds import limited, parser

# Growth without a leak, such as arenas of the allocator and tables that double.
MAX_GROWTH_MIB = 6.0
_WARM_UP = 0.25
_MIN_POINTS = 4
_MIB = 1 << 20
Point = tuple[float, float]


@dataclass(frozen=True)
class Memory:
    """Memory of a process in MiB at one time."""

    at_s: float
    requests: int
    anonymous: float
    resident: float

    def __str__(self) -> str:
        return f"{self.anonymous:.1f} MiB ({self.resident:.0f} with files)"


def quiet_rounds(seed: int) -> Iterator[Round]:
    for number in itertools.count():
        yield replace(plan(seed, number), block=0, world=WORLDS[0], recipe="fastserve", fault="none")


def slope(points: Sequence[Point]) -> float:
    """Return the median of the slopes between all pairs of points with different times."""
    return statistics.median((y - b) / (x - a) for (a, b), (x, y) in itertools.combinations(points, 2) if x > a)


def main() -> int:
    args = parser("soak", __doc__, 60.0).parse_args()
    print(f"seed {args.seed}", flush=True)
    return run(soak(limited(quiet_rounds(args.seed), args.rounds, args.minutes)))


async def soak(rounds: Iterable[Round]) -> int:
    noted: dict[str, list[Memory]] = {}
    requests, begin = 0, time.monotonic()

    def after(this: Round, found: Driver) -> None:
        nonlocal requests
        requests += len(this.asks) + len(this.lines)
        note(noted, found, time.monotonic() - begin, requests)

    if failures := await run_rounds(rounds, after=after):
        print(*failures, sep="\n")
        return 1
    return verdict(noted)


def note(noted: dict[str, list[Memory]], found: Driver, now: float, requests: int) -> None:
    for name, process in found.processes().items():
        resident, files = resident_bytes(process)
        noted.setdefault(name, []).append(Memory(now, requests, (resident - files) / _MIB, resident / _MIB))


def resident_bytes(process: psutil.Process) -> tuple[int, int]:
    """Return the resident bytes of a process and how many of them are file-backed, or 0 if that is unknown."""
    info = process.memory_info()
    return info.rss, getattr(info, "shared", 0)


def growth(some: Sequence[Memory]) -> tuple[float, int]:
    """Return the growth in MiB after the first quarter of the time, by the slope, and its number of requests."""
    rest = [sample for sample in some if sample.at_s >= some[0].at_s + _WARM_UP * (some[-1].at_s - some[0].at_s)]
    per_s = slope([(sample.at_s, sample.anonymous) for sample in rest])
    return per_s * (rest[-1].at_s - rest[0].at_s), rest[-1].requests - rest[0].requests


def verdict(noted: dict[str, list[Memory]]) -> int:
    """Print how much memory grew, and return 1 if it grew too much."""
    worst = 0.0
    for name, some in noted.items():
        if len(some) < _MIN_POINTS:
            print(f"{name}: {len(some)} rounds are too few to judge growth")
            continue
        grown, requests = growth(some)
        worst = max(worst, grown)
        each = 1024 * grown / requests
        print(
            f"{name}: {some[0]} at first, {some[-1]} after {some[-1].at_s:.0f} s, {len(some)} rounds and "
            f"{some[-1].requests} requests"
        )
        print(
            f"{name}: {grown:+.1f} MiB over the last {requests} requests, {each:+.2f} KiB each, "
            f"at most {MAX_GROWTH_MIB:g} MiB"
        )
    return int(worst > MAX_GROWTH_MIB)


if __name__ == "__main__":
    sys.exit(main())
