"""Command line of the drivers that run seeded rounds: chaos, soak and both fuzzers."""

from __future__ import annotations

import argparse
import itertools
import secrets
import time
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


def parser(prog: str, text: str | None, minutes: float) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog=prog, description=text, formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument("--seed", type=int, default=secrets.randbelow(10**6), help="of all rounds (default: a new one)")
    made.add_argument("--round", type=int, default=0, help="the first one (default: 0)")
    made.add_argument("--rounds", type=int, help="number of rounds (default: as many as begin in --minutes)")
    made.add_argument("--minutes", type=float, default=minutes)
    return made


def limited(rounds: Iterator[T], count: int | None, minutes: float) -> Iterator[T]:
    end = time.monotonic() + 60 * minutes
    for this in itertools.islice(rounds, count):
        if count is None and time.monotonic() > end:
            return
        yield this
