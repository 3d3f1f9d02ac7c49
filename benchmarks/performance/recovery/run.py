"""Measure how long streams pause when a rank is killed, and whether a token is lost, repeated or changed.

The script serves the built-in model with several ranks, and kills one rank (SIGKILL) while streams run. `still_s` has
the longest time in which no stream received a token. See `token_streams.pauses` for the other figures.
"""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import harness
from servers import Skipjoin
from token_streams import Streamed, longest_gap, pauses

# Tensor-parallel and pipeline-parallel sizes.
SIZES = ((2, 1), (1, 2), (2, 2))
OPTIONS = ("--profile", "off", "--kv-cache-gib", 0.1, "--threads", 1, "--dtype", "float32", "--max-restarts", 1000)


def pause_of(found: list[Streamed]) -> float:
    """Return the longest time in which no stream received a token."""
    return longest_gap(sorted(at for _, times in found for at in times))


def main() -> None:
    args = harness.parser(__doc__, kills=20).parse_args()
    record = harness.new_record(sizes=[])
    for tp, pp in SIZES:
        ranks = ("--tensor-parallel-size", tp, "--pipeline-parallel-size", pp)
        with Skipjoin("tally", *OPTIONS, *ranks) as server:

            async def kill(draw: random.Random, server: Skipjoin = server, count: int = tp * pp) -> None:
                server.children("rank_program")[draw.randrange(count)].kill()

            found = asyncio.run(pauses(server.url, args.kills, kill, pause_of))
        record["sizes"].append({"tp": tp, "pp": pp, **found})
    harness.report(record, args.out)


if __name__ == "__main__":
    main()
