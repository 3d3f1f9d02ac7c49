"""Measure the bandwidth of KV block moves between the tiers of a CPU and their effect on concurrent steps.

`copies` compares three ways to move 256 MiB: blocks scattered over pools of twice the size, one memmove of the same
size between these pools, and the same blocks where the CPU tier holds 8-bit values (`--swap-dtype int8`). They take
turns. `ratio` and `int8_ratio` are bandwidths relative to the memmove in the same repeat; bytes are those on the
device.

`concurrent` measures decode steps of 8 requests with contexts of 96 tokens, on a random-weight Llama of 97.5M
parameters in bfloat16. Rounds with copies in flight alternate with rounds without; `ratio` is the median step of a
round relative to that of the round before. Copies and model share cores and memory. `concurrent_int8` is the same with
8-bit conversion.
"""

from __future__ import annotations

import ctypes
import random
import statistics
import sys
import time
from itertools import count, cycle
from pathlib import Path
from typing import Any

import torch

from skipjoin.core.request import Request
from skipjoin.core.step import LINK, Direction, Move, Slice, StepPlan, StepResult
from skipjoin.exec.kv_store import KVStore
from skipjoin.exec.local import LocalExecutor
from skipjoin.exec.sampling import Sampling
from skipjoin.model.config import ModelConfig
from skipjoin.model.load_spec import LoadSpec
from skipjoin.model.loader import load_model
from skipjoin.sampling import SamplingParams

sys.path.insert(0, str(Path(__file__).parents[2]))
import harness
from harness import quartiles, seconds_of
from random_model import prompt_of, scratch_model

TOTAL_BYTES = 256 << 20
BLOCK_KIB = (32, 64, 128, 256, 512, 1024)
# A layer of 256 bytes per token in bfloat16: with 16 tokens a block, 4 KiB of each.
SHAPE = {
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 64,
    "intermediate_size": 8,
    "num_attention_heads": 1,
    "max_position_embeddings": 8,
}
KIB_PER_LAYER = 4

BATCH, CONTEXT, BLOCK_TOKENS = 8, 96, 16
STEPS_PER_ROUND = 20
# Fields of the record and the `--swap-dtype` of each.
CONCURRENT = {"concurrent": "auto", "concurrent_int8": "int8"}
# Blocks per move, and the number of moves kept in flight, which exceeds what a step can copy.
MOVE_BLOCKS, ON_WAY = 16, 40


def make_store(block_kib: int, blocks: int, swap_dtype: str) -> KVStore:
    """Return two pools of blocks of one size, with every page touched."""
    store = KVStore(
        ModelConfig.from_dict(SHAPE | {"num_hidden_layers": block_kib // KIB_PER_LAYER}),
        torch.bfloat16,
        torch.device("cpu"),
        device_blocks=blocks,
        cpu_blocks=blocks,
        block_size=BLOCK_TOKENS,
        swap_dtype=swap_dtype,
    )
    assert store.cpu is not None
    assert store.device.block_bytes == block_kib << 10
    # Untouched memory maps to one page of zeros, which is read faster than any other.
    store.device.tensor.fill_(1)
    store.cpu.tensor.fill_(1)
    return store


def measure_copies(block_kib: int, repeats: int) -> list[dict[str, Any]]:
    blocks = TOTAL_BYTES // (block_kib << 10)
    store, small = (make_store(block_kib, 2 * blocks, swap_dtype) for swap_dtype in ("auto", "int8"))
    assert store.cpu is not None
    draw, owner = random.Random(0), Request(0, 0.0, [0], 1)
    results = []
    for direction in LINK:
        source, target = (tuple(draw.sample(range(2 * blocks), blocks)) for _ in range(2))
        move = Move(direction, owner, source, target, blocks * BLOCK_TOKENS)
        device, host = store.device.tensor.data_ptr(), store.cpu.tensor.data_ptr()
        to, rows = (host, device) if direction is Direction.OUT else (device, host)
        in_blocks: list[float] = []
        in_one: list[float] = []
        in_codes: list[float] = []
        for turn in range(repeats + 1):
            kinds = [
                (in_blocks, lambda move=move: store.copy(move)),
                (in_one, lambda to=to, rows=rows: ctypes.memmove(to, rows, TOTAL_BYTES)),
                (in_codes, lambda move=move: small.copy(move)),
            ]
            for times, work in harness.in_turn(kinds, turn):
                times.append(seconds_of(work))
        # The first turn warms up.
        in_blocks, in_one, in_codes = in_blocks[1:], in_one[1:], in_codes[1:]
        results.append(
            {
                "block_kib": block_kib,
                "direction": direction.name.lower(),
                "blocks_gb_per_s": quartiles([TOTAL_BYTES / taken / 1e9 for taken in in_blocks], 2),
                "memmove_gb_per_s": quartiles([TOTAL_BYTES / taken / 1e9 for taken in in_one], 2),
                "ratio": quartiles([one / many for one, many in zip(in_one, in_blocks, strict=True)], 3),
                "int8_gb_per_s": quartiles([TOTAL_BYTES / taken / 1e9 for taken in in_codes], 2),
                "int8_ratio": quartiles([one / many for one, many in zip(in_one, in_codes, strict=True)], 3),
            }
        )
    return results


class Decoder:
    """Decode steps of a full batch with a stream of concurrent moves."""

    def __init__(self, folder: Path, swap_dtype: str) -> None:
        model = load_model(folder, LoadSpec(dtype="bfloat16"))
        per_request = CONTEXT // BLOCK_TOKENS + 1
        own, spare = BATCH * per_request, 2 * ON_WAY * MOVE_BLOCKS
        store = KVStore(
            model.config,
            model.dtype,
            model.device,
            device_blocks=own + spare,
            cpu_blocks=spare,
            block_size=BLOCK_TOKENS,
            swap_dtype=swap_dtype,
        )
        assert store.cpu is not None
        store.device.tensor.fill_(0.01)
        store.cpu.tensor.fill_(0 if swap_dtype == "int8" else 0.01)
        self.executor = LocalExecutor(model, store)
        self.move_bytes = MOVE_BLOCKS * store.device.block_bytes
        self.completed = self.on_way = 0
        self._slices = tuple(self._slice(number, per_request) for number in range(BATCH))
        self._moves = cycle(self._make_moves(own, spare))
        self._ids = count()

    def step(self, *, with_copies: bool) -> float:
        """Run a step and return its seconds; `with_copies` keeps ON_WAY moves in flight."""
        moves = [next(self._moves) for _ in range(ON_WAY - self.on_way)] if with_copies else []
        return self._run(self._slices, moves).seconds

    def drain(self) -> None:
        """Wait until no move is in flight."""
        while self.on_way:
            self._run((), [])

    def _run(self, slices: tuple[Slice, ...], moves: list[Move]) -> StepResult:
        self.on_way += len(moves)
        result = self.executor.submit(StepPlan(next(self._ids), slices, (), tuple(moves)), 0.0).result()
        assert not result.failed
        self.completed += len(result.completed)
        self.on_way -= len(result.completed)
        return result

    def _slice(self, number: int, per_request: int) -> Slice:
        sampling = Sampling(SamplingParams(temperature=0), 0, ())
        request = Request(number, 0.0, prompt_of(number, CONTEXT + 1), 1, sampling=sampling)
        first = number * per_request
        blocks = tuple(range(first, first + per_request))
        return Slice(request, CONTEXT, 1, samples=True, awaits=False, blocks=blocks)

    @staticmethod
    def _make_moves(own: int, spare: int) -> list[Move]:
        """Return moves out and in alternately between scattered blocks, `spare` on either tier.

        On the device they come after the first `own` blocks, which belong to the requests.
        """
        draw, owner = random.Random(1), Request(BATCH, 0.0, [0], 1)
        device, host = draw.sample(range(own, own + spare), spare), draw.sample(range(spare), spare)
        moves = []
        for number, first in enumerate(range(0, spare, MOVE_BLOCKS)):
            ours, theirs = tuple(device[first : first + MOVE_BLOCKS]), tuple(host[first : first + MOVE_BLOCKS])
            out = number % 2 == 0
            blocks = (Direction.OUT, owner, ours, theirs) if out else (Direction.IN, owner, theirs, ours)
            moves.append(Move(*blocks, MOVE_BLOCKS * BLOCK_TOKENS))
        return moves


def measure_concurrent(rounds: int, swap_dtype: str) -> dict[str, Any]:
    with scratch_model(torch.bfloat16) as folder:
        decoder = Decoder(folder, swap_dtype)
    with_copies: list[float] = []
    without: list[float] = []
    rates: list[float] = []
    for turn in range(rounds + 1):
        quiet = statistics.median(decoder.step(with_copies=False) for _ in range(STEPS_PER_ROUND))
        decoder.step(with_copies=True)  # the first copies start
        completed, begin = decoder.completed, time.perf_counter()
        busy = statistics.median(decoder.step(with_copies=True) for _ in range(STEPS_PER_ROUND))
        rate = (decoder.completed - completed) * decoder.move_bytes / (time.perf_counter() - begin) / 1e9
        decoder.drain()
        if turn:  # the first turn warms up
            without.append(quiet)
            with_copies.append(busy)
            rates.append(rate)
    decoder.executor.close()
    return {
        "batch": BATCH,
        "context": CONTEXT,
        "move_kib": decoder.move_bytes >> 10,
        "rounds": rounds,
        "steps_per_round": STEPS_PER_ROUND,
        "step_ms": quartiles([taken * 1e3 for taken in without], 3),
        "step_with_copies_ms": quartiles([taken * 1e3 for taken in with_copies], 3),
        "ratio": quartiles([busy / quiet for busy, quiet in zip(with_copies, without, strict=True)], 3),
        "copied_gb_per_s": quartiles(rates, 2),
    }


def main() -> None:
    args = harness.parser(__doc__, repeats=15, rounds=15).parse_args()
    record = harness.new_record(
        threads=torch.get_num_threads(), repeats=args.repeats, total_mib=TOTAL_BYTES >> 20, copies=[]
    )
    for block_kib in BLOCK_KIB:
        for result in measure_copies(block_kib, args.repeats):
            record["copies"].append(result)
            rates = f"{result['blocks_gb_per_s']['median']:5.2f} of {result['memmove_gb_per_s']['median']:5.2f} GB/s"
            codes = f"int8 {result['int8_gb_per_s']['median']:5.2f} GB/s  {result['int8_ratio']['median']:.0%}"
            share = f"{result['ratio']['median']:.0%}"
            print(f"{block_kib:5} KiB {result['direction']:>3}  {rates}  {share}  {codes}", flush=True)
    for name, dtype in CONCURRENT.items():
        found = record[name] = measure_concurrent(args.rounds, dtype)
        harness.show(name, {key: value["median"] for key, value in found.items() if isinstance(value, dict)})
    harness.write_record(record, args.out)


if __name__ == "__main__":
    main()
