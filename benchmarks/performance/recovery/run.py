"""Measure how long streams pause when a rank is killed, and whether a token is lost, repeated or changed.

    python benchmarks/performance/recovery/run.py [--kills 20] [--out FILE]

The script serves the built-in model with several ranks, runs eight streams, greedy and seeded ones alternately, and
kills one rank (SIGKILL) at a random moment in the first half of their time. `gap_s` has for each kill the longest time
in which no stream received a token. `same` counts the kills after which all texts equal those of undisturbed streams.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
import harness
from servers import Skipjoin
from token_streams import STREAMS, TOKENS, Streamed, longest_gap, run_streams

# Tensor-parallel and pipeline-parallel sizes.
SIZES = ((2, 1), (1, 2), (2, 2))
OPTIONS = ("--profile", "off", "--kv-cache-gib", 0.1, "--threads", 1, "--dtype", "float32", "--max-restarts", 1000)


async def measure(server: Skipjoin, tp: int, pp: int, kills: int) -> dict[str, Any]:
    """Measure one number of ranks."""
    draw = random.Random(1)
    await run_streams(server.url)
    begin = time.monotonic()
    expected = texts(await run_streams(server.url))
    undisturbed_s = time.monotonic() - begin
    gaps, same = [], []
    for _ in range(kills):
        after_s, victim = draw.uniform(0.1, 0.5) * undisturbed_s, draw.randrange(tp * pp)

        async def kill(after_s: float = after_s, victim: int = victim) -> None:
            await asyncio.sleep(after_s)
            server.children("RankActor")[victim].kill()

        found = await run_streams(server.url, kill)
        gaps.append(longest_gap(sorted(at for _, times in found for at in times)))
        same.append(texts(found) == expected)
        harness.show(f"TP {tp} x PP {pp}: {gaps[-1]:.2f} s, {'same' if same[-1] else 'DIFFERENT'} texts")
    return {
        "tp": tp,
        "pp": pp,
        "kills": kills,
        "same": sum(same),
        "undisturbed_s": round(undisturbed_s, 2),
        "gap_s": [round(gap, 2) for gap in gaps],
        "gap_median_s": round(statistics.median(gaps), 2),
        "gap_max_s": round(max(gaps), 2),
    }


def texts(found: list[Streamed]) -> list[str]:
    """Return the texts of the streams."""
    return [text for text, _ in found]


def main() -> None:
    args = harness.parser(__doc__, kills=20).parse_args()
    record = harness.new_record(streams=STREAMS, tokens=TOKENS, sizes=[])
    for tp, pp in SIZES:
        ranks = ("--tensor-parallel-size", tp, "--pipeline-parallel-size", pp)
        with Skipjoin("tally", *OPTIONS, *ranks) as server:
            record["sizes"].append(asyncio.run(measure(server, tp, pp, args.kills)))
    harness.report(record, args.out)


if __name__ == "__main__":
    main()
