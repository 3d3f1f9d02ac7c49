"""Count the kernel versions that Triton would compile for the steps of a model family.

    python count_compilations.py llama opt:invariant

Prints for each family how many versions the warm-up compiles, and the names of those that only later steps need.
Kernels are replaced by recorders, so that neither a GPU nor the interpreter is necessary.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from engines import BLOCK_SIZE, CONFIGS
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from skipjoin.core.request import Request
from skipjoin.core.step import Slice, StepPlan
from skipjoin.exec.base import LargestStep
from skipjoin.exec.kv_store import KVStore
from skipjoin.exec.memory import largest_steps
from skipjoin.exec.rank_model import warm_up
from skipjoin.exec.sampling import Sampling
from skipjoin.exec.worker import Worker
from skipjoin.model import loader
from skipjoin.model.attention.triton_backend import TritonAttention
from skipjoin.model.kernels import (
    activations,
    block_copy,
    decode_attention,
    kv_write,
    norms,
    prefill_attention,
    products,
    thresholds,
)
from skipjoin.model.kernels.tuning import TunedTable
from skipjoin.model.ops.triton_ops import InvariantOps, TritonOps
from skipjoin.sampling import SamplingParams

SEQS, TOKENS, POSITIONS, BLOCKS = 24, 200, 2048, 600
seen: dict[tuple[str, ...], None] = {}


class Launches:
    def __init__(self, kernel: Any) -> None:
        backend = make_backend(GPUTarget("cuda", 90, 32))
        self.name, self.bind = kernel.__name__, create_function_from_signature(kernel.signature, kernel.params, backend)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            _, version, rest = self.bind(*args, **options)
            seen[self.name, str(version), str(sorted(rest.items()))] = None

        return launch


class Varied(TunedTable):
    """Tuning table that chooses another config for every key, as a GPU may."""

    def find(self, name: str, source: str, key: Any, configs: Any) -> Any:
        return configs[sum(map(ord, str(key))) % len(configs)]


def replace_kernels() -> None:
    for module, *names in (
        (decode_attention, "_share_out", "_decode", "_reduce"),
        (prefill_attention, "_prefill"),
        (kv_write, "_kv_write"),
        (norms, "norm_kernel"),
        (activations, "gate_and_mul_kernel", "bias_and_activation_kernel"),
        (thresholds, "thresholds_kernel"),
        (block_copy, "_copy"),
        (products, "product_kernel"),
    ):
        for name in names:
            setattr(module, name, Launches(getattr(module, name)))


def some_step(chance: random.Random, number: int) -> StepPlan:
    slices, left = [], TOKENS
    for index in range(chance.randint(1, SEQS)):
        tokens = 1 if chance.random() < 0.8 else min(left, chance.choice((2, 7, 40, 130)))
        start = chance.choice((0, 5, 130, 900, POSITIONS - 200)) + (tokens == 1)
        if tokens < 1:
            break
        left -= tokens
        params = SamplingParams(top_k=chance.choice((0, 5)), top_p=chance.choice((1.0, 0.9)))
        request = Request(index, 0.0, [0] * (start + tokens), 1, sampling=Sampling(params, index, ()))
        blocks = tuple(chance.randrange(BLOCKS) for _ in range(-(-(start + tokens) // BLOCK_SIZE)))
        slices.append(Slice(request, start, tokens, samples=True, awaits=False, blocks=blocks))
    return StepPlan(number, tuple(slices))


def count(family: str) -> None:
    seen.clear()
    model = loader.random_model(CONFIGS[family] | {"max_position_embeddings": POSITIONS}, seed=3)
    store = KVStore(model.config, model.dtype, model.device, device_blocks=BLOCKS, cpu_blocks=0, block_size=BLOCK_SIZE)
    worker, largest = Worker(model, store), LargestStep(TOKENS, SEQS, POSITIONS)
    view, chance = store.device.block_view(), random.Random(7)
    for step in largest_steps(largest, BLOCK_SIZE):
        worker.run(step)
    block_copy.copy_blocks(view, view, *torch.zeros((2, 1), dtype=torch.int64))
    warm_up(model, store.device, largest)
    at_start = len(seen)
    for number in range(150):
        worker.run(some_step(chance, number))
        block_copy.copy_blocks(view, view, *torch.zeros((2, chance.randint(1, 9)), dtype=torch.int64))
    print(family, at_start, *(name for name, *_ in list(seen)[at_start:]))


def main() -> None:
    torch.set_num_threads(1)
    replace_kernels()
    for argument in sys.argv[1:]:
        family, _, kind = argument.partition(":")
        invariant = kind == "invariant"
        ops = InvariantOps() if invariant else TritonOps()
        attention = TritonAttention(Varied(None), processors=4, invariant=invariant)
        loader.implementations = lambda *args, found=(ops, attention), **options: found
        count(family)


if __name__ == "__main__":
    main()
