"""What the server learns of output lengths from its own traffic, and whether it keeps that.

    python benchmarks/papers/alise/server/run.py [--requests 300] [--recipe alise] [--out FILE]

Serves the built-in model with nothing learnt, and sends chats of two kinds in random order, four at a time: "Count from
1 to 5" and "Count from 1 to 200". By blocks of 50 requests, from `/metrics`: `error_tokens` is the mean distance of the
forecasts from the lengths that came, `error_octaves` the same as a power of two (1: twice or half of it), `coverage`
the share of lengths in the forecasts' 80 % intervals. Then the server is ended in several ways, and 50 more requests
are sent to the one that is started after it: an orderly end, a killed engine (the server exits by itself then), a
killed server. At last what it keeps is damaged, and then replaced by another format's: `begins_anew` counts the
warnings, `set_aside` the folders.

`varied` is harder: no prompt comes often. Five numbers are counted from anywhere below 20, or all from there to 200, so
that the prompts of both kinds resemble each other.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

sys.path.extend(str(Path(__file__).parents[level]) for level in (1, 3))
from served import Served

from machine import describe_machine
from skipjoin.engine.forecasting import SAVE_EVERY_S

BLOCK, CLIENTS = 50, 4
Record = dict[str, Any]


def tasks(count: int, seed: int, *, varied: bool = False) -> list[str]:
    """Prompts of the two kinds in random order, as many of one as of the other."""
    draw = random.Random(seed)
    found = []
    for number in range(count):
        first = draw.randint(1, 20) if varied else 1
        found.append(f"Count from {first} to {200 if number % 2 else first + 4}")
    draw.shuffle(found)
    return found


def send(server: Served, prompts: list[str]) -> Record:
    """Send chats, wait until the last of them is learnt, and tell what the server counted of them."""
    before = server.numbers()

    def ask(prompt: str) -> None:
        body = {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 900}
        httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).raise_for_status()

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(ask, prompts))
    end = time.monotonic() + 10
    while (since := server.numbers() - before)["forecasts_learnt_total exact"] < len(prompts):
        if time.monotonic() > end:
            raise RuntimeError(f"of {len(prompts)} outputs not all are learnt: {since}")
        time.sleep(0.05)
    judged = since["forecast_error_octaves_count"]
    return {
        "requests": len(prompts),
        "error_tokens": round(since["forecast_error_tokens_sum"] / judged, 2),
        "error_octaves": round(since["forecast_error_octaves_sum"] / judged, 3),
        "coverage": round(since["forecast_interval_total inside"] / judged, 3),
        "late": int(since["forecasts_late_total"]),
        "mean_forecast_ms": round(1000 * since["forecast_seconds_sum"] / since["forecast_seconds_count"], 3),
    }


def measure(requests: int, options: list[str], folder: Path) -> Record:
    """The blocks of a server that begins with nothing, and what is left after each of its ends."""
    later = iter([tasks(BLOCK, seed) for seed in range(1, 6)])
    found: Record = {}

    def start() -> Served:
        return Served(*options, "--forecast-dir", str(folder))

    with start() as server:
        found["blocks"] = learn(server, tasks(requests, seed=0))
    with start() as server:
        found["after_restart"] = send(server, next(later))
        server.kill_engine()
        found["after_restart"]["exit_code_without_engine"] = server.wait()
    server = start()
    found["after_killed_engine"] = send(server, next(later))
    time.sleep(SAVE_EVERY_S + 2)
    server.end(signal.SIGKILL)
    with start() as server:
        found["after_killed_server"] = send(server, next(later))
    found["after_damage"] = after(damage, start, folder, next(later))
    found["after_another_format"] = after(change_format, start, folder, next(later))
    return found


def learn(server: Served, prompts: list[str]) -> list[Record]:
    """The blocks of a server that begins with nothing."""
    blocks = []
    for first in range(0, len(prompts), BLOCK):
        blocks.append(send(server, prompts[first : first + BLOCK]))
        show("learning", blocks[-1])
    return blocks


def after(harm: Callable[[Path], None], start: Callable[[], Served], folder: Path, prompts: list[str]) -> Record:
    """What a server does that finds what `harm` left."""
    harm(folder)
    with start() as server:
        record = send(server, prompts)
    record["begins_anew"] = sum("begin anew" in line for line in server.errors)
    record["set_aside"] = len(list(folder.glob("*.bad-*")))
    return record


def damage(folder: Path) -> None:
    """Change one byte in the middle of the arrays."""
    (file,) = (one for one in folder.glob("*/*.safetensors") if ".bad-" not in one.parent.name)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def change_format(folder: Path) -> None:
    """Let the state be of a format to come."""
    (file,) = (one for one in folder.glob("*/state.json") if ".bad-" not in one.parent.name)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 999}))


def show(what: str, record: Record) -> None:
    off = f"{record['error_tokens']:6.1f} tokens, {record['error_octaves']:.2f} octaves"
    print(f"{what:>22}: off by {off}, {record['coverage']:.0%} covered", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--recipe", default="alise")
    parser.add_argument("--forecaster", default="learnt")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="forecasts-"))
    options = ["--recipe", args.recipe, "--forecaster", args.forecaster]
    try:
        found = measure(args.requests, options, folder)
    finally:
        shutil.rmtree(folder)
    for what, record in found.items():
        if what != "blocks":
            show(what, record)
    with Served(*options, "--forecast-dir", "none") as server:
        found["varied"] = learn(server, tasks(args.requests, seed=0, varied=True))
    for what in ("blocks", "varied"):
        first, last = found[what][0]["error_tokens"], found[what][-1]["error_tokens"]
        found[f"{what}_last_over_first"] = round(last / first, 3)
        print(f"{what}: the error of the last {BLOCK} is {last / first:.2f} times that of the first")
    found |= {"machine": describe_machine(), "options": options}
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
