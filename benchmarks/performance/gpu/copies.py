"""The part `copies`: KV between a GPU and page-locked CPU memory, and the effect of copies on concurrent steps.

`link` is one large copy in each direction and in both: the limit.

`moves` is one move of 1 to 256 blocks, scattered over both pools, from submission to completion. `share` is relative to
the link; the target is 0.8 for moves that are large enough to fill it. Block sizes are those of 16 tokens of Llama-3-8B
and OPT-13B, and a small one, of which a kernel copies many. `one_by_one` is the same without the kernel and without the
driver's call for many copies, and `batched` says whether there is one. `host` is the time until the calling thread
continues. `int8` is the same move with 8-bit values on the CPU tier.

`concurrent` has steps that read all of their weights and compute little, as decodes do. Rounds with copies in flight in
both directions alternate with rounds without; `slowdown` is the ratio of their median steps, with a target of at most
1.05. `int8` has 8-bit values on the CPU tier.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice

import torch
from common import Figures, Task, spread, synchronize

from skipjoin.core.request import Request
from skipjoin.core.step import LINK, Direction, Move
from skipjoin.exec.copy_engine import OptionalKernel
from skipjoin.exec.kv_store import KVStore
from skipjoin.exec.throttle import copier_for
from skipjoin.model import run_copies
from skipjoin.model.config import ModelConfig
from skipjoin.model.page_locked import page_locked_bytes

MIN_SHARE, MAX_SLOWDOWN = 0.8, 1.05
_KIB, _MIB = 1 << 10, 1 << 20
BLOCK_BYTES = {"small": 32 * _KIB, "llama-3-8b": 2 * _MIB, "opt-13b": 25 * _MIB // 2}
# A layer has 512 bytes per token in bfloat16, so the number of layers sets the block size.
_TOKEN_BYTES, _BLOCK_TOKENS = 512, 16
_SHAPE = {
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 128,
    "intermediate_size": 8,
    "num_attention_heads": 1,
    "max_position_embeddings": 8,
}
_OWNER = Request(0, 0.0, [0], 1)
# Bytes of the link's copies, of the steps' weights, and of each pool of the concurrent copies.
_LINK_BYTES = {"cuda": 1 << 30, "cpu": 1 << 22}
_WEIGHT_BYTES, _SIDE = {"cuda": 8 << 30, "cpu": 1 << 21}, {"cuda": 8192, "cpu": 256}
_POOL_BYTES = {"cuda": 2 << 30, "cpu": 1 << 22}
_COUNTS = {"cuda": (1, 4, 16, 64, 256), "cpu": (1, 4)}
_RUNS = {"cuda": 15, "cpu": 3}
_ROUNDS, _STEPS = {"cuda": 15, "cpu": 2}, {"cuda": 20, "cpu": 3}
# Bytes of a concurrent move, and of all moves in flight per direction, which exceed what a link carries in a step.
_MOVE_BYTES, _ON_WAY_BYTES = {"cuda": 16 * _MIB, "cpu": _MIB // 2}, {"cuda": 512 * _MIB, "cpu": 2 * _MIB}
# Requests in a step.
_BATCH = 8


def measure(task: Task) -> Figures:
    device = task.device
    figures: Figures = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "target": {"share": MIN_SHARE, "slowdown": MAX_SLOWDOWN},
        "link": measure_link(device),
        "moves": [],
        "concurrent": [],
    }
    for name, block_bytes in BLOCK_BYTES.items():
        for move in measure_moves(device, name, block_bytes, figures["link"]):
            figures["moves"].append(move)
            task.keep(figures)
    step = decode_like(device)
    for name, swap_dtype in (("llama-3-8b", "auto"), ("llama-3-8b", "int8"), ("small", "auto")):
        figures["concurrent"].append(measure_concurrent(device, step, name, swap_dtype, figures["link"]))
        task.keep(figures)
    return figures


def seconds(device: str, work: Callable[[], object], runs: int) -> list[float]:
    """Return the seconds of runs until the device has finished, without the warm-up run."""
    return [taken for _, taken in both_seconds(device, work, runs)]


def both_seconds(device: str, work: Callable[[], object], runs: int) -> list[tuple[float, float]]:
    """Return the seconds of runs until the calling thread continues, and until the device has finished."""
    times = []
    for _ in range(runs + 1):
        synchronize(device)
        begin = time.perf_counter()
        work()
        continues = time.perf_counter()
        synchronize(device)
        times.append((continues - begin, time.perf_counter() - begin))
    return times[1:]


def measure_link(device: str) -> Figures:
    """Measure the GB/s of one large copy out to the CPU, in from it, and in both directions."""
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
        for stream, work in zip(streams or (None, None), (out, back), strict=True):
            with torch.cuda.stream(stream):  # without a stream it does nothing
                work()

    rates = {
        name: [total / taken / 1e9 for taken in seconds(device, work, _RUNS[device])]
        for name, work, total in (("out", out, size), ("in", back, size), ("both", both, 2 * size))
    }
    figures = {"bytes": size, "page_locked": device == "cuda" and all(memory.is_pinned() for memory in there)}
    if device == "cuda":
        for _, unlock in locked:
            unlock()
    return figures | {f"{name}_gb_per_s": spread(values) for name, values in rates.items()}


def make_store(device: str, block_bytes: int, blocks: int, swap_dtype: str = "auto") -> KVStore:
    """Return two pools with all memory written."""
    layers = block_bytes // (_BLOCK_TOKENS * _TOKEN_BYTES)
    store = KVStore(
        ModelConfig.from_dict(_SHAPE | {"num_hidden_layers": layers}),
        torch.bfloat16,
        torch.device(device),
        device_blocks=blocks,
        cpu_blocks=blocks,
        block_size=_BLOCK_TOKENS,
        swap_dtype=swap_dtype,
    )
    assert store.device.block_bytes == block_bytes
    assert store.cpu is not None
    for pool in (store.device, store.cpu):
        pool.tensor.fill_(1)
    return store


def measure_moves(device: str, name: str, block_bytes: int, link: Figures) -> Iterator[Figures]:
    """Measure moves of several sizes in both directions."""
    counts = _COUNTS[device]
    store, draw = make_store(device, block_bytes, 2 * counts[-1]), random.Random(0)
    small = make_store(device, block_bytes, 2 * counts[-1], "int8")
    engine = store._engine
    kernel = getattr(engine, "_kernel", None)
    for blocks in counts:
        for direction in LINK:
            source, target = (tuple(draw.sample(range(2 * counts[-1]), blocks)) for _ in range(2))
            move = Move(direction, _OWNER, source, target, blocks * store.device.block_size)
            engine._kernel = kernel
            times = both_seconds(device, lambda move=move: store.copy(move), _RUNS[device])
            limit = link[f"{direction.name.lower()}_gb_per_s"]["median"]
            found = {
                "blocks_of": name,
                "block_bytes": block_bytes,
                "blocks": blocks,
                "direction": direction.name.lower(),
                "batched": device == "cuda" and run_copies.run_batch(store.device.tensor.device) is not None,
                "share": spread([blocks * block_bytes / taken / 1e9 / limit for _, taken in times]),
                **in_us("", times),
                **in_us("int8_", both_seconds(device, lambda move=move: small.copy(move), _RUNS[device])),
            }
            if device == "cuda":
                engine._kernel = OptionalKernel("", "", "", is_usable=False)
                with one_by_one():
                    times = both_seconds(device, lambda move=move: store.copy(move), _RUNS[device])
                found |= in_us("one_by_one_", times)
            yield found


def in_us(name: str, times: Sequence[tuple[float, float]]) -> Figures:
    host, taken = ([one * 1e6 for one in part] for part in zip(*times, strict=True))
    return {f"{name}us": spread(taken), f"{name}host_us": spread(host)}


@contextmanager
def one_by_one() -> Iterator[None]:
    """Copy runs of blocks without the driver's call for many copies."""
    found = run_copies.run_batch
    run_copies.run_batch = lambda device: None
    try:
        yield
    finally:
        run_copies.run_batch = found


def decode_like(device: str) -> Callable[[], object]:
    """Return a step of products with few rows and more matrices than caches hold."""
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
    """Moves in both directions, with more in flight than a link carries in a step."""

    def __init__(self, device: str, block_bytes: int, swap_dtype: str) -> None:
        per_move = max(1, _MOVE_BYTES[device] // block_bytes)
        # Half of the blocks go out, the others come in.
        half = max(1, _POOL_BYTES[device] // block_bytes // 2 // per_move) * per_move
        store, draw = make_store(device, block_bytes, 2 * half, swap_dtype), random.Random(1)
        assert store.cpu is not None
        self._copier = copier_for(store)
        self._move_bytes = per_move * store.cpu.block_bytes
        self._most = max(2, _ON_WAY_BYTES[device] // (per_move * block_bytes))
        self._next: dict[Direction, Iterator[Move]] = {}
        self._on_way = dict.fromkeys(LINK, 0)
        self.moved = 0  # bytes of completed moves, on the link
        tokens = per_move * store.device.block_size
        for index, direction in enumerate(LINK):
            here, there = (draw.sample(range(index * half, (index + 1) * half), half) for _ in range(2))
            moves = [
                Move(direction, _OWNER, tuple(here[at : at + per_move]), tuple(there[at : at + per_move]), tokens)
                for at in range(0, half, per_move)
            ]
            self._next[direction] = cycle(moves)

    def keep_up(self) -> None:
        """Submit moves to replace completed ones."""
        self._settle(0.0)
        for direction, on_way in self._on_way.items():
            more = list(islice(self._next[direction], self._most - on_way))
            self._copier.begin(more)
            self._on_way[direction] += len(more)

    def drain(self) -> None:
        while any(self._on_way.values()):
            self._settle(0.01)

    def close(self) -> None:
        self._copier.close()

    def _settle(self, timeout_s: float) -> None:
        ended = self._copier.poll(timeout_s)
        assert not ended.failed
        for move in ended.completed:
            self._on_way[move.direction] -= 1
            self.moved += self._move_bytes


def measure_concurrent(device: str, step: Callable[[], object], name: str, swap_dtype: str, link: Figures) -> Figures:
    block_bytes = BLOCK_BYTES[name]
    traffic = Traffic(device, block_bytes, swap_dtype)
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
        "swap_dtype": swap_dtype,
        "step_ms": spread([taken * 1e3 for taken in alone]),
        "slowdown": spread(slowdowns),
        "copied_gb_per_s": spread(rates),
        "share_of_link": spread([rate / link["both_gb_per_s"]["median"] for rate in rates]),
    }


def step_seconds(device: str, step: Callable[[], object]) -> float:
    """Return a step's time on the device, which the host waits for, as an engine waits for tokens."""
    if device == "cpu":
        return seconds(device, step, 1)[0]
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
