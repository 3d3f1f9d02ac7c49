from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from skipjoin.core.request import Request
from skipjoin.core.step import Slice, StepPlan
from skipjoin.exec.base import LargestStep
from skipjoin.exec.rank_spec import make_store
from skipjoin.exec.sampling import Sampling
from skipjoin.exec.worker import Worker
from skipjoin.model.causal_lm import CausalLM
from skipjoin.model.cuda import is_out_of_memory
from skipjoin.model.errors import ModelError
from skipjoin.sampling import SamplingParams

_GIB = 1 << 30
# The allocator reserves more than is in use, because steps of different sizes leave gaps. It allocates large segments
# in multiples of 2 MiB and splits them no further, so the fraction is small. If it does not suffice, a step drops a
# request.
_MARGIN = 0.05
# Context of the sequences in the decode step. Kernels need more memory for wider block tables, not for longer contexts.
# The reference back end gathers keys and values and does need more, but not all sequences can be at the maximum at
# once.
_DECODE_CONTEXT = 1024
# Sampling parameters that cause every possible copy of the logits.
_GREEDIEST = SamplingParams(
    temperature=1.0, top_p=0.95, repetition_penalty=1.1, presence_penalty=0.1, logprobs=1, prompt_logprobs=1
)


class Peaks(NamedTuple):
    all: int = 0
    decodes: int = 0


def measure_peak(model: CausalLM, largest: LargestStep, block_size: int) -> Peaks:
    """Measure the device memory that steps need apart from weights and KV; zeros on a CPU.

    Permanent memory of the first step (kernels, workspaces) is not counted, so query the free memory afterward. All
    ranks must call this together.
    """
    if model.device.type != "cuda":
        return Peaks()
    steps = largest_steps(largest, block_size)

    def run(steps: Sequence[StepPlan]) -> None:
        # One block suffices: all sequences share it, since the results are not used.
        store = make_store(model, 1, 0, block_size)
        worker = Worker(model, store)
        for step in steps:
            worker.run(step)
            if worker.halvings:
                raise torch.OutOfMemoryError("the step does not fit as a whole")

    try:
        # Decodes run last, so that permanent allocations of the first step are not attributed to them.
        prompts = peak_of(model.device, lambda: run(steps[:-1]))
        decodes = peak_of(model.device, lambda: run(steps[-1:]))
        return Peaks(max(prompts, decodes), decodes)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        free, total = torch.cuda.mem_get_info(model.device)
        raise ModelError(
            f"a step of {largest.tokens} tokens or {largest.seqs} requests does not fit on the GPU with weights of "
            f"{model.weight_bytes / _GIB:.2f} GiB ({free / _GIB:.2f} of {total / _GIB:.2f} GiB are free): "
            "lower max_num_batched_tokens or max_num_seqs"
        ) from error


def peak_of(device: torch.device, work: Callable[[], None]) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    try:
        work()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
    finally:
        torch.cuda.empty_cache()
    return int(peak * (1 + _MARGIN))


def largest_steps(largest: LargestStep, block_size: int) -> list[StepPlan]:
    seqs, positions = largest.seqs, largest.positions
    tokens = min(largest.tokens, seqs * positions)
    few, many = -(-tokens // positions), min(seqs, tokens)
    context = min(positions, _DECODE_CONTEXT)
    batches = [
        [(0, size) for size in _shares(tokens, few)],
        [(0, size) for size in _shares(tokens, many)],
        [(context - 1, 1)] * min(seqs, tokens),
    ]
    blocks = (0,) * -(-positions // block_size)
    return [
        StepPlan(number, tuple(_slice(index, *shape, blocks) for index, shape in enumerate(batch)))
        for number, batch in enumerate(batches)
    ]


def _shares(total: int, parts: int) -> list[int]:
    size, more = divmod(total, parts)
    return [size + (index < more) for index in range(parts)]


def _slice(number: int, start: int, tokens: int, blocks: tuple[int, ...]) -> Slice:
    request = Request(number, 0.0, [0] * (start + tokens), 1, sampling=Sampling(_GREEDIEST, number, ()))
    return Slice(request, start, tokens, samples=True, awaits=False, blocks=blocks)
