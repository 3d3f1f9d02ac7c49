"""Run random worlds for some time and report findings."""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections import Counter

from core_fuzz.draw import play
from core_fuzz.shrink import script, shrunk
from support.recipes import RECIPES

SHRINK_S = 60.0


def main() -> int:
    """Return 1 if there was a finding."""
    parser = argparse.ArgumentParser(prog="core_fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, help="seed of all worlds (default: a new one)")
    parser.add_argument("--first", type=int, default=0, help="number of the first world (default: 0)")
    parser.add_argument("--count", type=int, help="number of worlds (default: as many as begin in --minutes)")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--recipe", action="append", choices=sorted(RECIPES), help="run this recipe; may be repeated")
    args = parser.parse_args()
    seed = secrets.randbelow(10**6) if args.seed is None else args.seed
    recipes = args.recipe or sorted(RECIPES)
    only = "".join(f" --recipe {name}" for name in args.recipe or ())
    print(f"seed {seed}", flush=True)
    begin, number, reads = time.monotonic(), args.first, 0
    found: Counter[str] = Counter()
    while number - args.first < args.count if args.count is not None else time.monotonic() < begin + 60 * args.minutes:
        player, finding = play(f"{seed}/{number}", recipes)
        reads += player.machine.reads
        if finding is not None:
            found[finding.kind] += 1
            print(
                f"\n{finding}\nrepeat: python -m core_fuzz --seed {seed} --first {number} --count 1{only}", flush=True
            )
            if found[finding.kind] == 1:
                print(script(shrunk(player.case, finding.kind, SHRINK_S)), flush=True)
        number += 1
    print(f"{number - args.first} worlds, {reads} slot reads, {time.monotonic() - begin:.0f} s, seed {seed}")
    for kind, count in found.most_common():
        print(f"{count} x {kind}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
