"""Run random worlds for some time and report findings."""

from __future__ import annotations

import itertools
import sys
import time
from collections import Counter

from core_fuzz.draw import play
from core_fuzz.shrink import script, shrunk
from support.recipes import RECIPES
from support.rounds import limited, parser

SHRINK_S = 60.0


def main() -> int:
    options = parser("core_fuzz", __doc__, 60.0)
    options.add_argument("--recipe", action="append", choices=sorted(RECIPES), help="run this recipe; may be repeated")
    args = options.parse_args()
    recipes = args.recipe or sorted(RECIPES)
    only = "".join(f" --recipe {name}" for name in args.recipe or ())
    print(f"seed {args.seed}", flush=True)
    begin, worlds, reads = time.monotonic(), 0, 0
    found: Counter[str] = Counter()
    for number in limited(itertools.count(args.round), args.rounds, args.minutes):
        worlds += 1
        player, finding = play(f"{args.seed}/{number}", recipes)
        reads += player.machine.reads
        if finding is not None:
            found[finding.kind] += 1
            repeat = f"python -m core_fuzz --seed {args.seed} --round {number} --rounds 1{only}"
            print(f"\n{finding}\nrepeat: {repeat}", flush=True)
            if found[finding.kind] == 1:
                print(script(shrunk(player.case, finding.kind, SHRINK_S)), flush=True)
    print(f"{worlds} worlds, {reads} slot reads, {time.monotonic() - begin:.0f} s, seed {args.seed}")
    for kind, count in found.most_common():
        print(f"{count} x {kind}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
