"""The load of the rounds without faults, for an hour: `make soak`. Memory and descriptors have to stay flat.

    PYTHONPATH=tests python -m chaos.soak [--minutes 60] [--seed 0]

After each round, with the server at rest, the memory of the API process and of the engine is noted: what is resident,
without pages of files, which the system takes back when other programs need memory. The first quarter of the time
fills caches and is left out. Over the rest memory may grow by at most `ROOM_MIB`, by the median of the slopes between
all pairs of points (Theil-Sen): a longer run finds a smaller leak. The pace of the machine has no part in it, but
tells what the verdict is worth: the growth is also given for each request.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import psutil

from chaos.driver import Driver, driver, run
from chaos.plan import WORLDS, Round, plan

# Room for what tells nothing of a leak: an allocator's arenas, a table that doubles.
ROOM_MIB = 6.0
_WARM_UP = 0.25
_SAY_EVERY_S = 60.0
_MIB = 1 << 20
Point = tuple[float, float]


@dataclass(frozen=True)
class Memory:
    """What a process holds, in MiB, after so many seconds and requests. anonymous: resident without pages of files."""

    at_s: float
    requests: int
    anonymous: float
    resident: float

    def __str__(self) -> str:
        return f"{self.anonymous:.1f} MiB ({self.resident:.0f} with files)"


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
    return run(soak(args.seed, 60 * args.minutes))


async def soak(seed: int, seconds: float) -> int:
    """Run quiet rounds for so long; the exit code."""
    noted: dict[str, list[Memory]] = {}
    requests, begin, told_s = 0, time.monotonic(), -_SAY_EVERY_S
    async with driver() as found:
        for this in quiet_rounds(seed):
            if troubles := await found.run(this):
                print(*troubles, found.told(), sep="\n")
                return 1
            requests += len(this.asks) + len(this.lines)
            now = time.monotonic() - begin
            note(noted, found, now, requests)
            if now - told_s >= _SAY_EVERY_S:
                told_s = now
                print(f"{now:.0f} s, {this}, {requests} in all: {latest(noted)}", flush=True)
            if now > seconds:
                break
    return verdict(noted)


def note(noted: dict[str, list[Memory]], found: Driver, now: float, requests: int) -> None:
    """Add what the processes hold now."""
    for name, process in found.processes().items():
        resident, files = resident_bytes(process)
        noted.setdefault(name, []).append(Memory(now, requests, (resident - files) / _MIB, resident / _MIB))


def resident_bytes(process: psutil.Process) -> tuple[int, int]:
    """What is resident of a process, and how much of that are pages of files (0 where the system does not tell)."""
    info = process.memory_info()
    return info.rss, getattr(info, "shared", 0)


def latest(noted: dict[str, list[Memory]]) -> str:
    """The latest of each."""
    return ", ".join(f"{name} {some[-1]}" for name, some in noted.items())


def growth(some: Sequence[Memory]) -> tuple[float, int]:
    """MiB by which memory grew after the first quarter of the time, by the slope, and over how many requests."""
    rest = [one for one in some if one.at_s >= some[0].at_s + _WARM_UP * (some[-1].at_s - some[0].at_s)]
    per_s = slope([(one.at_s, one.anonymous) for one in rest])
    return per_s * (rest[-1].at_s - rest[0].at_s), rest[-1].requests - rest[0].requests


def verdict(noted: dict[str, list[Memory]]) -> int:
    """Tell how much memory grew; 1 if that is too much."""
    worst = 0.0
    for name, some in noted.items():
        grown, requests = growth(some)
        worst = max(worst, grown)
        each = 1024 * grown / requests
        print(
            f"{name}: {some[0]} at first, {some[-1]} after {some[-1].at_s:.0f} s, {len(some)} rounds and "
            f"{some[-1].requests} requests"
        )
        print(
            f"{name}: {grown:+.1f} MiB over the last {requests} of them, {each:+.2f} KiB each, at most {ROOM_MIB:g} MiB"
        )
    return int(worst > ROOM_MIB)


if __name__ == "__main__":
    sys.exit(main())
