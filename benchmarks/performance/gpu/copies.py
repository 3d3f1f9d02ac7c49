"""Copies of KV between a GPU and page-locked host memory: their share of the link, and their effect on concurrent
steps.

    python benchmarks/performance/gpu/copies.py [--device cuda|cpu] [--out FILE]

`link`: one large copy, each way alone and both at once: the limit.

`moves`: one move of 1 to 256 blocks, scattered over both pools, through the store's copy, from its submission until it
has landed. `share` is relative to the link; wanted is `WANTED_SHARE` for moves that are large enough to fill it. The
blocks are as large as those of 16 tokens of Llama-3-8B and OPT-13B, and small ones, which a kernel copies; `one_by_one`
is the same without the kernel. `int8_us`: the same move where the host holds 8 bits for each number.

`beside`: steps that read all of their weights and compute little, as decodes do. Rounds with copies in flight both ways
throughout alternate with rounds without; `slowdown` is the median step of the one over that of the next. Wanted is
`WANTED_SLOWDOWN` at most.

On a CPU everything runs on a small scale, as a test of the script: the figures mean nothing there.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "src"))
from skipjoin.core.request import Request
from skipjoin.core.step import LINK, Direction, Move
from skipjoin.exec.kv_store import KVStore
from skipjoin.exec.transfer import copier_for
from skipjoin.model.config import ModelConfig
from skipjoin.model.page_locked import page_locked_bytes

Figures = dict[str, Any]
WANTED_SHARE, WANTED_SLOWDOWN = 0.8, 1.05
_KIB, _MIB = 1 << 10, 1 << 20
BLOCK_BYTES = {"small": 32 * _KIB, "llama-3-8b": 2 * _MIB, "opt-13b": 25 * _MIB // 2}
# A layer of 256 bytes per token in bfloat16, so that blocks of any size are so many layers.
_TOKEN_BYTES, _BLOCK_TOKENS = 256, 16
_SHAPE = {
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 64,
    "intermediate_size": 8,
    "num_attention_heads": 1,
    "max_position_embeddings": 8,
}
_OWNER = Request(0, 0.0, [0], 1)
# Bytes of the link's copies, of the steps' weights, and of each pool that copies beside steps go between.
_LINK_BYTES = {"cuda": 1 << 30, "cpu": 1 << 22}
_WEIGHT_BYTES, _SIDE = {"cuda": 8 << 30, "cpu": 1 << 21}, {"cuda": 8192, "cpu": 256}
_POOL_BYTES = {"cuda": 2 << 30, "cpu": 1 << 22}
_COUNTS = {"cuda": (1, 4, 16, 64, 256), "cpu": (1, 4)}
_RUNS = {"cuda": 15, "cpu": 3}
_ROUNDS, _STEPS = {"cuda": 15, "cpu": 2}, {"cuda": 20, "cpu": 3}
# Bytes of a move beside steps, and what is kept on its way in each direction: more than a link carries in a step.
_MOVE_BYTES, _ON_WAY_BYTES = {"cuda": 16 * _MIB, "cpu": _MIB // 2}, {"cuda": 512 * _MIB, "cpu": 2 * _MIB}
# Requests in a step.
_BATCH = 8


def measure(device: str = "cuda", step: Callable[[], object] | None = None) -> Figures:
    """All figures. step: queues a step on the current stream; None: one that is like a decode."""
    link = measure_link(device)
    moves = [
        figures
        for name, block_bytes in BLOCK_BYTES.items()
        for figures in measure_moves(device, name, block_bytes, link)
    ]
    step = step or decode_like(device)
    sizes = {name: BLOCK_BYTES[name] for name in ("llama-3-8b", "small")}
    overlapped = [measure_beside(device, step, name, size, link) for name, size in sizes.items()]
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "wanted": {"share": WANTED_SHARE, "slowdown": WANTED_SLOWDOWN},
        "link": link,
        "moves": moves,
        "beside": overlapped,
    }


def spread(values: Sequence[float], digits: int = 4) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": round(middle, digits), "p25": round(low, digits), "p75": round(high, digits)}


def seconds(device: str, work: Callable[[], object], runs: int) -> list[float]:
    """How long the work takes, to its end on the device; the first run warms up and does not count."""
    times = []
    for _ in range(runs + 1):
        synchronize(device)
        begin = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return times[1:]


def synchronize(device: str) -> None:
    """Wait until the device has nothing more to do."""
    if device == "cuda":
        torch.cuda.synchronize()


# -- the link -------------------------------------------------------------------------------------------------------


def measure_link(device: str) -> Figures:
    """GB/s of one large copy: out to the host, in from it, and of both together at once."""
    size = _LINK_BYTES[device]
    here = [torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2)]
    if device == "cuda":
        locked = [page_locked_bytes(size) for _ in range(2)]
        there = [memory.fill_(1) for memory, _ in locked]
    else:
        there = [memory.clone() for memory in here]
    streams = [torch.cuda.Stream() for _ in range(2)] if device == "cuda" else []

    def out() -> None:
        there[0].copy_(here[0], non_blocking=True)

    def back() -> None:
        here[1].copy_(there[1], non_blocking=True)

    def both() -> None:
        if not streams:
            out()
            back()
            return
        for stream, work in zip(streams, (out, back), strict=True):
            with torch.cuda.stream(stream):
                work()

    rates = {
        name: [total / taken / 1e9 for taken in seconds(device, work, _RUNS[device])]
        for name, work, total in (("out", out, size), ("in", back, size), ("both", both, 2 * size))
    }
    figures = {"bytes": size, "page_locked": device == "cuda" and all(memory.is_pinned() for memory in there)}
    if device == "cuda":
        for _, unlock in locked:
            unlock()
    return figures | {f"{name}_gb_per_s": spread(values, 2) for name, values in rates.items()}


# -- moves ----------------------------------------------------------------------------------------------------------


def make_store(device: str, block_bytes: int, blocks: int, swap_dtype: str = "auto") -> KVStore:
    """Two pools that hold something."""
    layers = block_bytes // (_BLOCK_TOKENS * _TOKEN_BYTES)
    store = KVStore(
        ModelConfig.from_dict(_SHAPE | {"num_hidden_layers": layers}),
        torch.bfloat16,
        torch.device(device),
        device_blocks=blocks,
        host_blocks=blocks,
        block_size=_BLOCK_TOKENS,
        swap_dtype=swap_dtype,
    )
    assert store.device.block_bytes == block_bytes
    assert store.host is not None
    for pool in (store.device, store.host):
        pool.tensor.fill_(1)
    return store


def measure_moves(device: str, name: str, block_bytes: int, link: Figures) -> Iterator[Figures]:
    """Moves of several sizes, both ways, and of small blocks without their kernel, too."""
    counts = _COUNTS[device]
    store, draw = make_store(device, block_bytes, 2 * counts[-1]), random.Random(0)
    small = make_store(device, block_bytes, 2 * counts[-1], "int8")
    kernel = store._kernel
    for blocks in counts:
        for direction in LINK:
            source, target = (tuple(draw.sample(range(2 * counts[-1]), blocks)) for _ in range(2))
            move = Move(direction, _OWNER, source, target, blocks * store.device.block_size)
            store._kernel = kernel
            times = seconds(device, lambda move=move: store.copy(move), _RUNS[device])
            most = link[f"{direction.name.lower()}_gb_per_s"]["median"]
            found = {
                "blocks_of": name,
                "block_bytes": block_bytes,
                "blocks": blocks,
                "direction": direction.name.lower(),
                "us": spread([taken * 1e6 for taken in times], 1),
                "share": spread([blocks * block_bytes / taken / 1e9 / most for taken in times]),
            }
            times = seconds(device, lambda move=move: small.copy(move), _RUNS[device])
            found["int8_us"] = spread([taken * 1e6 for taken in times], 1)
            if kernel is not None and name == "small":
                store._kernel = None
                times = seconds(device, lambda move=move: store.copy(move), _RUNS[device])
                found["one_by_one_us"] = spread([taken * 1e6 for taken in times], 1)
            yield found


# -- beside steps ---------------------------------------------------------------------------------------------------


def decode_like(device: str) -> Callable[[], object]:
    """A step that reads matrices which no cache holds, one product of few rows after the other."""
    side, dtype = _SIDE[device], torch.bfloat16
    matrices = [
        torch.randn(side, side, device=device, dtype=dtype) / side**0.5
        for _ in range(_WEIGHT_BYTES[device] // (side * side * dtype.itemsize))
    ]
    rows = torch.randn(_BATCH, side, device=device, dtype=dtype)

    def step() -> torch.Tensor:
        state = rows
        for matrix in matrices:
            state = state @ matrix
        return state

    return step


class Traffic:
    """Moves both ways, as many on their way as a link is busy with for longer than a step."""

    def __init__(self, device: str, block_bytes: int) -> None:
        per_move = max(1, _MOVE_BYTES[device] // block_bytes)
        # Half of the blocks go out, the others come in.
        half = max(1, _POOL_BYTES[device] // block_bytes // 2 // per_move) * per_move
        store, draw = make_store(device, block_bytes, 2 * half), random.Random(1)
        self._copier = copier_for(store)
        self._move_bytes = per_move * block_bytes
        self._most = max(2, _ON_WAY_BYTES[device] // self._move_bytes)
        self._next: dict[Direction, Iterator[Move]] = {}
        self._on_way = dict.fromkeys(LINK, 0)
        self.moved = 0  # bytes that landed
        tokens = per_move * store.device.block_size
        for index, direction in enumerate(LINK):
            here, there = (draw.sample(range(index * half, (index + 1) * half), half) for _ in range(2))
            moves = [
                Move(direction, _OWNER, tuple(here[at : at + per_move]), tuple(there[at : at + per_move]), tokens)
                for at in range(0, half, per_move)
            ]
            self._next[direction] = cycle(moves)

    def keep_up(self) -> None:
        """Let more follow where some have landed."""
        self._settle(0.0)
        for direction, on_way in self._on_way.items():
            more = list(islice(self._next[direction], self._most - on_way))
            self._copier.begin(more)
            self._on_way[direction] += len(more)

    def drain(self) -> None:
        """Wait for all."""
        while any(self._on_way.values()):
            self._settle(0.01)

    def close(self) -> None:
        self._copier.close()

    def _settle(self, timeout_s: float) -> None:
        ended = self._copier.landed(timeout_s)
        assert not ended.failed
        for move in ended.landed:
            self._on_way[move.direction] -= 1
            self.moved += self._move_bytes


def measure_beside(device: str, step: Callable[[], object], name: str, block_bytes: int, link: Figures) -> Figures:
    """Steps with and without copies of such blocks."""
    traffic = Traffic(device, block_bytes)
    seconds(device, step, 3)
    slowdowns: list[float] = []
    alone: list[float] = []
    rates: list[float] = []
    for _ in range(_ROUNDS[device]):
        plain = [step_seconds(device, step) for _ in range(_STEPS[device])]
        traffic.keep_up()
        before, begin = traffic.moved, time.perf_counter()
        loaded = []
        for _ in range(_STEPS[device]):
            loaded.append(step_seconds(device, step))
            traffic.keep_up()
        rates.append((traffic.moved - before) / (time.perf_counter() - begin) / 1e9)
        traffic.drain()
        alone.append(statistics.median(plain))
        slowdowns.append(statistics.median(loaded) / alone[-1])
    traffic.close()
    return {
        "blocks_of": name,
        "block_bytes": block_bytes,
        "step_ms": spread([taken * 1e3 for taken in alone]),
        "slowdown": spread(slowdowns),
        "copied_gb_per_s": spread(rates, 2),
        "share_of_link": spread([rate / link["both_gb_per_s"]["median"] for rate in rates]),
    }


def step_seconds(device: str, step: Callable[[], object]) -> float:
    """A step's time on the device. The host waits for it, as an engine does for tokens."""
    if device == "cpu":
        return seconds(device, step, 1)[0]
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    figures = measure(options.device)
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from machine import describe_machine  # noqa: PLC0415 (beside this folder, wherever this is imported from)

    text = json.dumps({"machine": describe_machine(), **figures}, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
