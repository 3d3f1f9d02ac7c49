"""Measure a server at one to ten times its capacity: refusals, `Retry-After`, objectives and goodput.

The script serves the built-in model with a queue of 64 requests and measures its capacity with 64 streams in flight.
Then it sends streams at multiples of that rate, each at its due time; the last factor lasts `--longest` seconds. With
`--peers vllm` it repeats this with vLLM, whose queue has no limit, at vLLM's own capacity.

Targets at every factor: 99 % of the refusals within 50 ms; a `Retry-After` that suffices for 95 % of them and whose
median exceeds neither twice the time until a slot is free nor that by more than a second; 95 % of the admitted requests
within the objectives; a goodput at the last factor of at least 0.9 of the best one.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).parents[2]))
from streams import Outcome, closed_loop, open_loop

import harness
from peer_venvs import available
from servers import Server, Skipjoin, vllm
from skipjoin.builtin import builtin_model_path
from skipjoin.observe.record import percentile

QUEUE = 64
PROMPT, OUTPUT = 100, 300
TTFT_S, TPOT_S = 1.0, 0.1
CAPACITY_S, SETTLE_S = 15.0, 3.0
MAX_REFUSAL_S, MIN_KEPT, MIN_HONEST, MIN_GOODPUT = 0.05, 0.95, 0.95, 0.9
Figures = dict[str, Any]


def bodies(model: str, seed: int) -> Iterator[bytes]:
    """Yield requests of one length with different prompts."""
    draw = random.Random(seed)
    while True:
        body = {
            "model": model,
            "prompt": draw.choices(range(100, 500), k=PROMPT),
            "max_tokens": OUTPUT,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        yield json.dumps(body).encode()


async def measure(url: str, model: str, factors: Sequence[float], seconds: float, longest: float) -> Figures:
    await closed_loop(url, bodies(model, 0), QUEUE, 3.0)  # warm-up
    done = await closed_loop(url, bodies(model, 1), QUEUE, CAPACITY_S)
    if not done:
        raise RuntimeError(f"no request finished within {CAPACITY_S:g} s: the machine is too busy")
    capacity = done / CAPACITY_S
    harness.show(f"capacity {capacity:.1f} requests/s")
    loads = {}
    for factor in factors:
        await asyncio.sleep(SETTLE_S)
        lasts = longest if factor == factors[-1] else seconds
        outcomes = await open_loop(url, bodies(model, 2), factor * capacity, lasts)
        loads[f"{factor:g}"] = summary(outcomes, lasts)
        harness.show(f"{factor:g} times", loads[f"{factor:g}"])
    return {"capacity_rps": round(capacity, 2), "loads": loads}


def summary(outcomes: Sequence[Outcome], seconds: float) -> Figures:
    admitted = [one for one in outcomes if one.status == 200]
    refused = [one for one in outcomes if one.status == 429]
    kept = [one for one in admitted if keeps_objectives(one)]
    paces = [one.tpot(OUTPUT) for one in admitted]
    return {
        "offered_rps": round(len(outcomes) / seconds, 2),
        "admitted": len(admitted),
        "refused": len(refused),
        "failed": sum(one.status not in (0, 200, 429) for one in outcomes),
        "unfinished": sum(one.status == 0 or (one.status == 200 and one.last is None) for one in outcomes),
        "kept": round(len(kept) / len(admitted), 4) if admitted else None,
        "goodput_rps": round(len(kept) / seconds, 2),
        "ttft_ms": quantiles([one.ttft for one in admitted if one.ttft is not None]),
        "tpot_ms": quantiles([pace for pace in paces if pace is not None]),
        "client_lag_ms": quantiles([one.sent - one.due for one in outcomes]),
        "refusal_ms": quantiles([one.answered - one.sent for one in refused if one.answered is not None]),
        "retry_after": honesty(admitted, refused),
    }


def keeps_objectives(one: Outcome) -> bool:
    pace = one.tpot(OUTPUT)
    return one.ttft is not None and pace is not None and one.ttft <= TTFT_S and pace <= TPOT_S


def honesty(admitted: Sequence[Outcome], refused: Sequence[Outcome]) -> Figures | None:
    """Compare `Retry-After` of the refusals with the time until the next request was admitted.

    `honest` is the share of the refusals after which a request was admitted within that time.
    """
    sent = sorted(one.sent for one in admitted)
    pairs = []
    for one in refused:
        after = next_after(sent, one.sent)
        if after is not None:  # after the last admission there is nothing to compare with
            pairs.append((one.retry_after, after - one.sent))
    if not pairs:
        return None
    told_s, true_s = (sorted(values) for values in zip(*pairs, strict=True))
    honest = [true <= promised for promised, true in pairs]
    return {
        "told_s": {"p50": percentile(told_s, 50), "max": told_s[-1]},
        "true_s": {"p50": round(percentile(true_s, 50), 3), "max": round(true_s[-1], 3)},
        "honest": round(sum(honest) / len(honest), 4),
    }


def next_after(times: Sequence[float], time: float) -> float | None:
    at = bisect_right(times, time)
    return times[at] if at < len(times) else None


def quantiles(seconds: Sequence[float]) -> Figures | None:
    if not seconds:
        return None
    rising = sorted(seconds)
    found = {f"p{share}": percentile(rising, share) for share in (50, 99)} | {"max": rising[-1]}
    return {name: round(1e3 * value, 2) for name, value in found.items()}


def verdict(ours: Figures) -> dict[str, bool]:
    loads = ours["loads"]
    refusing = {name: one for name, one in loads.items() if one["refused"]}
    goodput = [one["goodput_rps"] for one in loads.values()]
    return {
        "refusals are answered": not any(one["failed"] for one in loads.values()),
        "refusals within 50 ms": all(one["refusal_ms"]["p99"] <= 1e3 * MAX_REFUSAL_S for one in refusing.values()),
        "Retry-After is honest": all(is_honest(one["retry_after"]) for one in refusing.values()),
        "admitted requests keep the objectives": all(one["kept"] >= MIN_KEPT for one in loads.values()),
        "goodput does not fall": goodput[-1] >= MIN_GOODPUT * max(goodput),
    }


def is_honest(retry_after: Figures) -> bool:
    """Return whether `Retry-After` suffices, and is not much longer than necessary; its unit is one second."""
    told_s, true_s = retry_after["told_s"]["p50"], retry_after["true_s"]["p50"]
    return retry_after["honest"] >= MIN_HONEST and told_s <= 2 * true_s + 1


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--factors", type=lambda text: [float(part) for part in text.split(",")], default=[1, 2, 5, 10])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--longest", type=float, default=60.0)
    parser.add_argument("--peers", choices=["vllm"])
    args = parser.parse_args()
    record = harness.new_record(
        queue=QUEUE,
        tokens={"prompt": PROMPT, "output": OUTPUT},
        objectives={"ttft_s": TTFT_S, "tpot_s": TPOT_S},
    )
    model = builtin_model_path()
    # The model gets one core; HTTP and the client get the other.
    limits = ("--max-num-queued-reqs", QUEUE, "--threads", 1, "--kv-cache-gib", 0.5)
    starts: dict[str, Callable[[], Server]] = {"skipjoin": partial(Skipjoin, model, *limits)}
    for name, python in available([args.peers] if args.peers else []).items():
        starts[name] = partial(vllm, python, model, seqs=128, kv_gib=1, is_eager=True, cores="0")
    for name, start in starts.items():
        with start() as server:
            record[name] = uvloop.run(measure(server.url, server.name, args.factors, args.seconds, args.longest))
    record["holds"] = verdict(record["skipjoin"])
    harness.show(record["holds"])
    harness.write_record(record, args.out)
    return 0 if all(record["holds"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
