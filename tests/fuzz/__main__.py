"""Run rounds of fuzzing on this machine: `python -m fuzz --help`."""

from __future__ import annotations

import argparse
import itertools
import secrets
import sys
import time
from collections.abc import Iterator

from chaos.driver import run
from fuzz.driver import fuzz
from fuzz.plan import Round


def rounds(seed: int, first: int, count: int | None, seconds: float, only: int | None = None) -> Iterator[Round]:
    """Yield rounds from the first on: `count` of them, or None for as many as begin in time."""
    end = time.monotonic() + seconds
    for number in itertools.count(first):
        if time.monotonic() > end if count is None else number >= first + count:
            return
        yield Round(seed, number, only)


def main() -> int:
    """Return 1 if a round found a failure."""
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, help="of all rounds (default: a new one)")
    parser.add_argument("--round", type=int, default=0, help="the first one (default: 0)")
    parser.add_argument("--rounds", type=int, help="number of rounds (default: as many as begin in --minutes)")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--case", type=int, help="run only this case or story of the rounds")
    args = parser.parse_args()
    seed = secrets.randbelow(10**6) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    found = run(
        fuzz(rounds(seed, args.round, args.rounds, 60 * args.minutes, args.case), lambda text: print(text, flush=True))
    )
    print(*found, f"seed {seed}", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
