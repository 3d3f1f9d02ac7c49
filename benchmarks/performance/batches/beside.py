"""Chat beside a batch, and a batch alone beside the same requests over HTTP.

    python benchmarks/performance/batches/beside.py [--recipes fastserve,bros] [--parts beside,alone] [--pairs 4]
        [--seconds 25] [--out FILE]

Serves the built-in model. For each recipe chat at a steady rate is measured without and with a batch that runs all the
time, in turn: times to the first token, their ratio, and the tokens that the batch gets meanwhile. Then a batch runs
alone, from its creation until it is completed, and the same requests are sent over HTTP, as many at once as the runner
of batches keeps; each at a fresh server. Ratios are of one pair; `pooled` has the quantiles of all pairs' requests.

Wanted: a P99 of at most 1.3 times that without a batch; 0.9 of the tokens per second over HTTP.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from pairs import arguments, compared, ratio_of_rates, report
from served import RECIPES, Figures, Server, bodies, chat, over_http, serving, submit, wait

RATE = 4.0  # of chat, requests per second
# Requests over HTTP at once, as many as lines of a batch.
INFLIGHT = 256
LINES, ALONE_LINES, PROMPTS, TOKENS = 6000, 1600, (50, 150), 100
MOST_P99, LEAST_ALONE = 1.3, 0.9
SETTLE_S = 2.0


def beside(recipe: str, pairs: int, seconds: float) -> Figures:
    """Chat without and with a batch, in turn."""
    found = []
    with serving("--recipe", recipe, *RECIPES[recipe]) as server:
        for number in range(pairs):
            without = chat(server, RATE, seconds, number)
            batch = submit(server.client, bodies(LINES, PROMPTS, TOKENS))
            wait(server.client, batch, "in_progress")
            time.sleep(SETTLE_S)
            beside = chat(server, RATE, seconds, number)
            if server.client.batches.retrieve(batch.id).status != "in_progress":
                raise RuntimeError("the batch ended before chat did: it needs more lines")
            server.client.batches.cancel(batch.id)
            wait(server.client, batch, "cancelled")
            time.sleep(SETTLE_S)
            found.append({"without": without, "with": beside})
            print(recipe, number, {name: one["cpu"] for name, one in found[-1].items()}, flush=True)
    return compared(found, "without", "with")


def alone(recipe: str, pairs: int) -> Figures:
    """Tokens per second of a batch, and over HTTP."""
    requests = bodies(ALONE_LINES, PROMPTS, TOKENS)
    found = []
    for number in range(pairs):
        one: dict[str, float] = {}
        with serving("--recipe", recipe, *RECIPES[recipe]) as server:
            one["http"] = ALONE_LINES * TOKENS / over_http(server, requests, INFLIGHT)
        with serving("--recipe", recipe, "--batch-inflight", str(INFLIGHT), *RECIPES[recipe]) as server:
            one["batch"] = ALONE_LINES * TOKENS / _as_batch(server, requests)
        found.append(one)
        print(recipe, number, one, flush=True)
    return ratio_of_rates(found, "batch", "http")


def _as_batch(server: Server, requests: Sequence[dict[str, Any]]) -> float:
    """Seconds from a batch's upload until it is completed."""
    begin = time.monotonic()
    done = wait(server.client, submit(server.client, list(requests)), "completed")
    took = time.monotonic() - begin
    if done.error_file_id is not None or done.usage is None or done.usage.output_tokens != ALONE_LINES * TOKENS:
        raise RuntimeError(f"the batch has failed lines: {done}")
    return took


def main() -> int:
    """1 if a criterion does not hold."""
    args = arguments(__doc__ or "", pairs=4, seconds=25.0, recipes=RECIPES, parts=("beside", "alone"))
    found: Figures = {}
    for recipe in args.recipes:
        one: Figures = {}
        holds = one["holds"] = {}
        if "beside" in args.parts:
            one["beside"] = beside(recipe, args.pairs, args.seconds)
            holds[f"TTFT P99 at most {MOST_P99} times"] = one["beside"]["pooled"]["ratio"]["p99"] <= MOST_P99
        if "alone" in args.parts:
            one["alone"] = alone(recipe, args.pairs)
            holds[f"batch alone at least {LEAST_ALONE} of HTTP"] = one["alone"]["ratio"]["median"] >= LEAST_ALONE
        found[recipe] = one
    return report({"rate": RATE, "lines": LINES, "objectives": RECIPES, "recipes": found}, args.out)


if __name__ == "__main__":
    sys.exit(main())
