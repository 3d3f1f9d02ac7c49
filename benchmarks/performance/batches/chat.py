"""Measure chat with and without a concurrent batch, and compare a batch alone with the same requests over HTTP.

The script serves the built-in model. `chat` measures chat at a steady rate, in turn without and with a running batch:
times to the first token, their ratio, and the tokens per second of the batch. `alone` measures a batch from its
creation until it is completed, and the same requests over HTTP with the same number in flight, each at a new server.
Ratios are of one pair; `pooled` has the quantiles of the requests of all pairs.

Targets: a P99 of at most 1.3 times that without a batch; at least 0.9 of the tokens per second over HTTP.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from pairs import arguments, compared, ratio_of_rates, report
from served import RECIPES, BatchServer, Figures, bodies, chat, over_http, serving, submit, wait

import harness

RATE = 4.0  # chats per second
# Requests in flight over HTTP and in a batch.
INFLIGHT = 256
LINES, ALONE_LINES, PROMPTS, TOKENS = 6000, 1600, (50, 150), 100
MAX_P99, MIN_ALONE = 1.3, 0.9
SETTLE_S = 2.0


def with_batch(recipe: str, pairs: int, seconds: float) -> Figures:
    found = []
    with serving("--recipe", recipe, *RECIPES[recipe]) as server:
        for number in range(pairs):
            without = chat(server, RATE, seconds, number)
            batch = submit(server.client, bodies(LINES, PROMPTS, TOKENS))
            wait(server.client, batch, "in_progress")
            time.sleep(SETTLE_S)
            busy = chat(server, RATE, seconds, number)
            if server.client.batches.retrieve(batch.id).status != "in_progress":
                raise RuntimeError("the batch finished before the chat: raise LINES")
            server.client.batches.cancel(batch.id)
            wait(server.client, batch, "cancelled")
            time.sleep(SETTLE_S)
            found.append({"without": without, "with": busy})
            harness.show(recipe, number, {name: one["cpu"] for name, one in found[-1].items()})
    return compared(found, "without", "with")


def alone(recipe: str, pairs: int) -> Figures:
    """Measure the tokens per second of a batch and over HTTP."""
    requests = bodies(ALONE_LINES, PROMPTS, TOKENS)
    found = []
    for number in range(pairs):
        one: dict[str, float] = {}
        with serving("--recipe", recipe, *RECIPES[recipe]) as server:
            one["http"] = ALONE_LINES * TOKENS / over_http(server, requests, INFLIGHT)
        with serving("--recipe", recipe, "--batch-inflight", INFLIGHT, *RECIPES[recipe]) as server:
            one["batch"] = ALONE_LINES * TOKENS / _as_batch(server, requests)
        found.append(one)
        harness.show(recipe, number, one)
    return ratio_of_rates(found, "batch", "http")


def _as_batch(server: BatchServer, requests: Sequence[dict[str, Any]]) -> float:
    """Return the seconds from the upload of a batch until it is completed."""
    begin = time.monotonic()
    done = wait(server.client, submit(server.client, list(requests)), "completed")
    took = time.monotonic() - begin
    if done.error_file_id is not None or done.usage is None or done.usage.output_tokens != ALONE_LINES * TOKENS:
        raise RuntimeError(f"the batch has failed lines: {done}")
    return took


def main() -> int:
    args = arguments(__doc__ or "", pairs=4, seconds=25.0, recipes=RECIPES, parts=("chat", "alone"))
    record = harness.new_record(rate=RATE, lines=LINES, objectives=RECIPES, recipes={})
    for recipe in args.recipes:
        one: Figures = {}
        holds = one["holds"] = {}
        if "chat" in args.parts:
            one["chat"] = with_batch(recipe, args.pairs, args.seconds)
            holds[f"TTFT P99 at most {MAX_P99} times"] = one["chat"]["pooled"]["ratio"]["p99"] <= MAX_P99
        if "alone" in args.parts:
            one["alone"] = alone(recipe, args.pairs)
            holds[f"batch alone at least {MIN_ALONE} of HTTP"] = one["alone"]["ratio"]["median"] >= MIN_ALONE
        record["recipes"][recipe] = one
    return report(record, args.out)


if __name__ == "__main__":
    sys.exit(main())
