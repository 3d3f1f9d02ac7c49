"""Show what bounds two figures of the arena: throughput above the capacity, and latency where first tokens cost most.

Throughput: Where the chance to end falls with the tokens generated, blind orders by expected latency approach one that
serves each request up to the same number of tokens, and none beyond. At `load` times the capacity of `fcfs`, it serves
x tokens of each request, with E[min(X, x)] = E[X] / load, and finishes those of at most x tokens: load x P(X <= x)
times as many as `fcfs` finishes. Work on the others is lost to the throughput, as long as the load lasts.

First tokens: `adaptive` runs with other values of `first_share` in the held-out cell and the tuning cells with its
worst means, which takes minutes. The arena has them with its own value.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import harness
from arena.grid import FIRST, LENGTHS, LOADS, ArenaCell, full
from arena.run import capacity, simulate

_DRAWN = 5000
_WORST = (
    "near, 8b, 4 GiB, 128 slots, load 2, ",
    "near, 13b, 45 GiB, 64 slots, load 2, ",
    "equal, 13b, 45 GiB, 64 slots, load 2, ",
)
_SHARES = (0.1, 0.2)


def relative_throughput(lengths: Sequence[int], load: float) -> float:
    """Return the throughput of such an order over that of `fcfs`.

    Args:
        lengths: Output lengths, in ascending order.
        load: Load over the capacity, above 1.
    """
    served = sum(lengths) / load
    below = 0
    for number, length in enumerate(lengths):
        if below + length * (len(lengths) - number) > served:
            limit = (served - below) / (len(lengths) - number)
            return load * bisect_right(lengths, limit) / len(lengths)
        below += length
    return load


def main() -> None:
    args = harness.parser(__doc__).parse_args()
    record = harness.new_record(rows={})
    for name in LENGTHS:
        jobs = ArenaCell(name, FIRST, 0.0, 0).workload().draw(1.0, None, 0, _DRAWN)
        lengths = sorted(job.output_tokens for job in jobs)
        record["rows"][name] = {
            f"{load:g}": round(relative_throughput(lengths, load), 3) for load in sorted(LOADS) if load > 1
        }
        harness.show(name, record["rows"][name])
    record["first_share"] = {}
    cells = [*full(final=True), *full(final=False)]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for start in _WORST:
            worst = next(cell for cell in cells if cell.name.startswith(start))
            rate = round(round(capacity(worst.saturated()), 4) * worst.load, 4)
            recipes = [f"adaptive[first_share={share:g}]" for share in _SHARES]
            found = pool.map(simulate, [worst] * len(recipes), recipes, [rate] * len(recipes))
            rows = record["first_share"][worst.name] = {
                f"{share:g}": {name: float(f"{x:.4g}") for name, x in figures.items()}
                for share, figures in zip(_SHARES, found, strict=True)
            }
            for share, figures in rows.items():
                harness.show(worst.name, f"first_share {share}", figures)
    harness.write_record(record, args.out)


if __name__ == "__main__":
    main()
