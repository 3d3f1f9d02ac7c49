"""A server at one to ten times its capacity: how fast it refuses, what it tells, and what it still does.

    python benchmarks/performance/overload/run.py [--factors 1,2,5,10] [--seconds 30] [--longest 60]
        [--peers vllm] [--out FILE]

Serves the built-in model with a queue of `PLACES` requests, measures its capacity with as many streams in flight, then
sends streams at so many times that rate, none of which waits for another; the last factor lasts `--longest` seconds.
Every request is sent when it is due. `--peers vllm`: vLLM, in an environment of its own (`peer_venvs.py`), serves the
same model for the same loads, at its own capacity; it has no limit on its queue.

Wanted at every factor: of the refusals 99 % within 50 ms, each with a `Retry-After` in which a place comes free and
which is not far longer than that takes; of the admitted requests 95 % within the objectives; as many such requests
per second at the last factor as at the best one, less a tenth.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).parents[2]))
from streams import Outcome, closed_loop, open_loop

from machine import describe_machine
from peer_venvs import available
from servers import skipjoin, vllm
from skipjoin.builtin import builtin_model_path
from skipjoin.observe.record import percentile

PLACES = 64
PROMPT, OUTPUT = 100, 300
TTFT_S, TPOT_S = 1.0, 0.1
CAPACITY_S, SETTLE_S = 15.0, 3.0
REFUSAL_S, KEPT, HONEST, FALL = 0.05, 0.95, 0.95, 0.9
Figures = dict[str, Any]


def bodies(model: str, seed: int) -> Iterator[bytes]:
    """Streams of one length; no two prompts begin alike."""
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
    """The capacity of a server, and what it does at so many times that."""
    await closed_loop(url, bodies(model, 0), PLACES, 3.0)  # code and memory touched for the first time
    done = await closed_loop(url, bodies(model, 1), PLACES, CAPACITY_S)
    if not done:
        raise RuntimeError(f"no request has ended within {CAPACITY_S:g} s: the machine is too busy")
    capacity = done / CAPACITY_S
    print(f"{url}: capacity {capacity:.1f} requests/s", flush=True)
    loads = {}
    for factor in factors:
        await asyncio.sleep(SETTLE_S)
        lasts = longest if factor == factors[-1] else seconds
        outcomes = await open_loop(url, bodies(model, 2), factor * capacity, lasts)
        loads[f"{factor:g}"] = summary(outcomes, lasts)
        print(f"{factor:g} times", json.dumps(loads[f"{factor:g}"]), flush=True)
    return {"capacity_rps": round(capacity, 2), "loads": loads}


def summary(outcomes: Sequence[Outcome], seconds: float) -> Figures:
    """The figures of one load."""
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
    """Whether a stream has come to its end within the objectives."""
    pace = one.tpot(OUTPUT)
    return one.ttft is not None and pace is not None and one.ttft <= TTFT_S and pace <= TPOT_S


def honesty(admitted: Sequence[Outcome], refused: Sequence[Outcome]) -> Figures | None:
    """What refusals told, and after how many seconds the next request was admitted. honest: the share after which that
    was within what was told."""
    sent = sorted(one.sent for one in admitted)
    pairs = []
    for one in refused:
        after = next_after(sent, one.sent)
        if after is not None:  # at the end of a load none comes to take a place
            pairs.append((one.retry_after, after - one.sent))
    if not pairs:
        return None
    told_s, true_s = (sorted(values) for values in zip(*pairs, strict=True))
    honest = [true <= told for told, true in pairs]
    return {
        "told_s": {"p50": percentile(told_s, 50), "max": told_s[-1]},
        "true_s": {"p50": round(percentile(true_s, 50), 3), "max": round(true_s[-1], 3)},
        "honest": round(sum(honest) / len(honest), 4),
    }


def next_after(times: Sequence[float], time: float) -> float | None:
    """The first of sorted times that is later."""
    at = bisect_right(times, time)
    return times[at] if at < len(times) else None


def quantiles(seconds: Sequence[float]) -> Figures | None:
    """In milliseconds."""
    if not seconds:
        return None
    rising = sorted(seconds)
    found = {f"p{share}": percentile(rising, share) for share in (50, 99)} | {"max": rising[-1]}
    return {name: round(1e3 * value, 2) for name, value in found.items()}


def verdict(ours: Figures) -> dict[str, bool]:
    """Which of the criteria hold."""
    loads = ours["loads"]
    refusing = {name: one for name, one in loads.items() if one["refused"]}
    goodput = [one["goodput_rps"] for one in loads.values()]
    return {
        "refusals are answered": not any(one["failed"] for one in loads.values()),
        "refusals within 50 ms": all(one["refusal_ms"]["p99"] <= 1e3 * REFUSAL_S for one in refusing.values()),
        "Retry-After is honest": all(is_honest(one["retry_after"]) for one in refusing.values()),
        "admitted requests keep the objectives": all(one["kept"] >= KEPT for one in loads.values()),
        "goodput does not fall": goodput[-1] >= FALL * max(goodput),
    }


def is_honest(retry_after: Figures) -> bool:
    """Whether places came free in the time that was told, and in the median not far sooner, by the second, which is the
    least that can be told."""
    told_s, true_s = retry_after["told_s"]["p50"], retry_after["true_s"]["p50"]
    return retry_after["honest"] >= HONEST and told_s <= 2 * true_s + 1


def main() -> int:
    """1 if a criterion does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--factors", type=lambda text: [float(part) for part in text.split(",")], default=[1, 2, 5, 10])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--longest", type=float, default=60.0)
    parser.add_argument("--peers", choices=["vllm"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    record: Figures = {
        "machine": describe_machine(),
        "places": PLACES,
        "tokens": {"prompt": PROMPT, "output": OUTPUT},
        "objectives": {"ttft_s": TTFT_S, "tpot_s": TPOT_S},
    }
    # The model gets one core, the other is for HTTP and for the client.
    limits = ("--max-num-queued-reqs", PLACES, "--threads", 1, "--kv-cache-gib", 0.5)
    servers = {"skipjoin": skipjoin(builtin_model_path(), *limits)}
    for name, python in available([args.peers] if args.peers else []).items():
        servers[name] = vllm(python, builtin_model_path(), seqs=128, kv_gib=1, is_eager=True, cores="0")
    for name, serving in servers.items():
        with serving as server:
            record[name] = uvloop.run(measure(server.url, server.name, args.factors, args.seconds, args.longest))
    record["holds"] = verdict(record["skipjoin"])
    print(json.dumps(record["holds"], indent=2))
    if args.out is not None:
        args.out.write_text(json.dumps(record, indent=2) + "\n")
    return 0 if all(record["holds"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
