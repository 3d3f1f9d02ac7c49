"""Run rounds of fuzzing on this machine: `python -m fuzz --help`."""

from __future__ import annotations

import itertools
import sys

from chaos.driver import run
from fuzz.driver import fuzz
from fuzz.plan import Round
from support.rounds import limited, parser


def main() -> int:
    options = parser("fuzz", __doc__, 5.0)
    options.add_argument("--case", type=int, help="run only this case or story of the rounds")
    args = options.parse_args()
    print(f"seed {args.seed}", flush=True)
    rounds = (Round(args.seed, number, args.case) for number in itertools.count(args.round))
    found = run(fuzz(limited(rounds, args.rounds, args.minutes)))
    print(*found, f"seed {args.seed}", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
