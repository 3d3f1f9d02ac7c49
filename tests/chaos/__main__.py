"""Run rounds of chaos on this machine: `python -m chaos --help`."""

from __future__ import annotations

import itertools
import sys
import time
from functools import partial

from chaos.driver import possible_worlds, run, run_rounds
from chaos.plan import WORLDS, plan
from support.rounds import limited, parser


def main() -> int:
    options = parser("chaos", __doc__, 10.0)
    options.add_argument("--world", action="append", help="only rounds of this kind of server; may be repeated")
    args = options.parse_args()
    worlds = [world.name for world in possible_worlds() if args.world is None or world.name in args.world]
    if not worlds:
        options.error(f"--world must be one of {', '.join(world.name for world in WORLDS)}")
    print(f"seed {args.seed}, worlds: {', '.join(worlds)}", flush=True)
    begin = time.monotonic()
    rounds = (this for this in map(partial(plan, args.seed), itertools.count(args.round)) if this.world.name in worlds)
    found = run(run_rounds(limited(rounds, args.rounds, args.minutes)))
    print(*found, f"{time.monotonic() - begin:.0f} s, seed {args.seed}", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
