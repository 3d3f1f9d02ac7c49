"""Run rounds of chaos on this machine: `python -m chaos --help`."""

from __future__ import annotations

import argparse
import itertools
import secrets
import sys
import time
from collections.abc import Collection, Iterator

from chaos.driver import possible_worlds, run, run_rounds
from chaos.plan import WORLDS, Round, plan


def rounds(seed: int, first: int, count: int | None, minutes: float, worlds: Collection[str]) -> Iterator[Round]:
    """Yield rounds of these worlds from the first on: `count` of them, or None for as many as begin in time."""
    end = time.monotonic() + 60 * minutes
    possible = (this for this in (plan(seed, number) for number in itertools.count(first)) if this.world.name in worlds)
    for this in itertools.islice(possible, count):
        if count is None and time.monotonic() > end:
            return
        yield this


def main() -> int:
    """Return 1 if a round found a failure."""
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--seed", type=int, help="of all rounds (default: a new one)")
    parser.add_argument("--round", type=int, default=0, help="the first one (default: 0)")
    parser.add_argument("--rounds", type=int, help="number of rounds (default: as many as begin in --minutes)")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--world", action="append", help="only rounds of this kind of server; may be repeated")
    args = parser.parse_args()
    seed = secrets.randbelow(10**6) if args.seed is None else args.seed
    worlds = [world.name for world in possible_worlds() if args.world is None or world.name in args.world]
    if not worlds:
        parser.error(f"--world must be one of {', '.join(world.name for world in WORLDS)}")
    print(f"seed {seed}, worlds: {', '.join(worlds)}", flush=True)
    begin = time.monotonic()
    found = run(
        run_rounds(rounds(seed, args.round, args.rounds, args.minutes, worlds), lambda text: print(text, flush=True))
    )
    print(*found, f"{time.monotonic() - begin:.0f} s, seed {seed}", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
