"""Run every kind of step at small sizes under a memory checker.

    python benchmarks/performance/gpu/small_steps.py cuda

Each family runs in each type: prompts, chunks of prompts with existing KV, decodes and mixes of them, with more
requests than the KV holds. Then blocks are swapped out and in. The script fails if a token is outside the vocabulary or
if blocks change.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import torch
from common import Task, folder_of, forced, loaded_model, settings_for, shape_of, synchronize, tokens

from skipjoin.core.events import Token
from skipjoin.core.request import Request
from skipjoin.core.step import Direction, Move, StepPlan
from skipjoin.engine.build import engine_around
from skipjoin.engine.load import Loaded
from skipjoin.engine.loop import EngineLoop
from skipjoin.sampling import SamplingParams
from skipjoin.sim.models import ModelShape

# Prompts that end inside and at the ends of blocks, and a long one; together they exceed the pool.
_PROMPTS = (1, 15, 16, 17, 40, 63, 700)
_OUTPUT, _KV_TOKENS, _MAX_LEN = 24, 800, 768
# CPU blocks of the swap.
_MOVED = (3, 1, 4, 0)


def main() -> None:
    device = sys.argv[1]
    # A rehearsal's task gives tiny models on any device.
    tiny = Task("cpu", 60.0, {}, {}, Path(), time.monotonic())
    for dtype in ("bfloat16", "float16", "float32"):
        for name in ("llama-3-8b", "opt-13b"):
            shape = shape_of(tiny, name, max_positions=_MAX_LEN)
            with folder_of(shape, dtype) as folder:
                _run(Task(device, 60.0, {}, {}, Path(), time.monotonic()), folder, dtype, shape)


def _run(task: Task, folder: Path, dtype: str, shape: ModelShape) -> None:
    token_bytes = shape.kv_bytes_per_token * (2 if dtype == "float32" else 1)
    config = settings_for(
        task,
        folder,
        dtype,
        recipe="fastserve",
        max_num_seqs=8,
        max_num_batched_tokens=48,
        kv_cache_gib=(_KV_TOKENS + 1) * token_bytes / 2**30,
        swap_space_gib=0.001,
        pipeline_depth=2,
    )
    with loaded_model(config) as loaded:
        loop = EngineLoop(engine_around(loaded, config))
        for number, length in enumerate(_PROMPTS):
            loop.add(number, tokens(number, length, shape.vocab), _ways(number))
        made = 0
        while not loop.idle:
            for event in loop.step():
                if isinstance(event, Token):
                    made += 1
                    assert 0 <= event.token < shape.vocab, event
        assert made == _OUTPUT * len(_PROMPTS), made
        _swap(loaded)
    print(f"{folder.name} {dtype}: {made} tokens, and KV swapped out and in", flush=True)


def _ways(number: int) -> SamplingParams:
    """Return greedy sampling, or for every second request random sampling with log-probabilities."""
    params = forced(_OUTPUT)
    if number % 2:
        params = replace(params, temperature=0.8, top_k=20, top_p=0.9, seed=number, logprobs=3, prompt_logprobs=1)
    return params


def _swap(loaded: Loaded) -> None:
    """Check that blocks are unchanged after they are swapped out and in."""
    device = loaded.executor.store.device.tensor
    held = device[: len(_MOVED)].clone()
    request = Request(0, 0.0, [0], 1)
    here, tokens = tuple(range(len(_MOVED))), len(_MOVED) * loaded.executor.store.device.block_size
    ids = count(1 << 20)
    for when in ("blocking", "overlapped"):
        for move in (
            Move(Direction.OUT, request, here, _MOVED, tokens),
            Move(Direction.IN, request, _MOVED, here, tokens),
        ):
            landed: list[Move] = []
            moves = {when: (move,)}
            while not landed:
                result = loaded.executor.submit(StepPlan(next(ids), (), **moves), 0.0).result()
                assert not result.failed, result
                landed, moves = [*landed, *result.landed], {}
            if move.direction is Direction.OUT:
                device[: len(_MOVED)] = float("nan")
                synchronize(loaded.executor.rank_specs[0].device_kind)
        assert torch.equal(device[: len(_MOVED)], held)


if __name__ == "__main__":
    main()
