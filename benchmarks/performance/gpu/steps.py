"""The parts `decode`, `sampled`, `small` and `fp8`: decode steps, compared with the limit of the GPU's memory and with
each other."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from common import (
    BLOCK_SIZE,
    Figures,
    Task,
    backends,
    drain,
    folder_of,
    forced,
    loaded_model,
    recorded,
    seconds_of,
    settings_for,
    shape_of,
    significant,
    spread,
    synchronize,
    tokens,
)
from floor import floor_of
from gpu_time import PROFILED_STEPS, gpu_time

from skipjoin.config import EngineConfig
from skipjoin.core.engine import EngineCore
from skipjoin.core.events import Computed
from skipjoin.core.step import StepPlan, StepResult, StepShape
from skipjoin.engine.build import engine_around
from skipjoin.engine.load import Loaded
from skipjoin.engine.loop import EngineLoop
from skipjoin.model.batch import PackedBatch, Segment
from skipjoin.sim.models import ModelShape

MODEL, SMALL, DTYPE = "llama-3-8b", "qwen3-0.6b", "bfloat16"
# Targets: minimum shares of the lower bound and of the matrix rate, maximum shares of the gap and of scheduling, and
# maximum ratios of sampled to greedy steps and of a step with a prompt to the sum of its kernels.
TARGETS = {
    "decode_of_floor": 0.8, "gap_share": 0.05, "scheduling_share": 0.01, "prefill_of_rate": 0.55,
    "sampled_of_greedy": 1.05, "mixed_of_kernels": 1.15,
}  # fmt: skip
# Greedy, and what a chat sends.
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "top-p": {"temperature": 0.8, "top_p": 0.95},
    "top-k, top-p": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
}


class _Model(NamedTuple):
    loaded: Loaded
    config: EngineConfig
    shape: ModelShape


class _Sizes(NamedTuple):
    """Sizes of the steps: decode batches and context, tokens of each prompt, and numbers of steps."""

    batches: tuple[int, ...]
    context: int
    prompts: tuple[tuple[int, ...], ...]
    warmup: int
    steps: int


CARD = _Sizes((64, 1, 16, 256), 1024, ((8192,), (2048,) * 4), 12, 60)
REHEARSAL = _Sizes((4, 1), 48, ((64,), (16,) * 4), 2, 6)
# Batch size for the gap between steps, as on a busy server.
_GAP_BATCH = {"cuda": 64, "cpu": 4}


def measure_decode(task: Task) -> Figures:
    """Measure decode steps through the engine's loop, one plan ahead, by batch size."""
    return _measure_decodes(task, MODEL, REHEARSAL.batches if task.is_rehearsal else CARD.batches, ("greedy",))


def measure_sampled(task: Task) -> Figures:
    """Measure decode steps that draw tokens beside greedy ones."""
    return _measure_decodes(task, MODEL, (4,) if task.is_rehearsal else (256, 64), tuple(SAMPLINGS))


def measure_small(task: Task) -> Figures:
    """Measure a model whose step takes no longer than the host's work for it."""
    return _measure_decodes(task, SMALL, (4, 1) if task.is_rehearsal else (64, 256, 1), ("greedy", "top-k, top-p"))


def measure_fp8(task: Task) -> Figures:
    """Measure decode steps with weights in 8-bit floats; shares are of the bound of bfloat16, as those of `decode`."""
    options = {"quantization": "fp8", "attention": "torch" if task.is_rehearsal else "auto"}
    return _measure_decodes(task, MODEL, (4, 1) if task.is_rehearsal else (1, 64, 256), ("greedy",), options)


def _measure_decodes(
    task: Task,
    name: str,
    batches: tuple[int, ...],
    samplings: tuple[str, ...],
    options: Mapping[str, str] = MappingProxyType({}),
) -> Figures:
    sizes = (REHEARSAL if task.is_rehearsal else CARD)._replace(batches=batches)
    shape = shape_of(task, name)
    figures: Figures = {"model": name, "context": sizes.context, "target": TARGETS, "batches": {}}
    with folder_of(shape, DTYPE) as folder:
        config = replace(decode_config(task, folder, sizes, shape), **options)
        began, free = time.monotonic(), _free_bytes(task)
        with loaded_model(config) as loaded:
            figures |= {"load_s": significant(time.monotonic() - began), **backends(loaded)}
            figures["used_bytes"] = free - _free_bytes(task)
            model, plans = _Model(loaded, config, shape), {}
            for batch, sampling in itertools.product(batches, samplings):
                key = str(batch) if sampling == "greedy" else f"{batch} {sampling}"
                if task.left_s < 0:
                    figures["batches"][key] = {"skipped": "no time left"}
                    continue
                found, plan = _decode(task, model, sizes, batch, SAMPLINGS[sampling])
                if sampling == "greedy":
                    plans[batch] = plan
                elif "step_ms" in (greedy := figures["batches"][str(batch)]):
                    found["of_greedy"] = significant(found["step_ms"]["median"] / greedy["step_ms"]["median"])
                figures["batches"][key] = found
                task.keep(figures)
            # Captures come last, because a failed capture may break the device.
            for batch, plan in plans.items():
                found = figures["batches"][str(batch)]
                found["forward"] = _forward(task, loaded, plan, found["floor_ms"])
                task.keep(figures)
    return figures


def _free_bytes(task: Task) -> int:
    return torch.cuda.mem_get_info()[0] if task.device == "cuda" else 0


def decode_config(task: Task, folder: Any, sizes: _Sizes, shape: ModelShape) -> EngineConfig:
    length = sizes.context + 2 * (sizes.warmup + sizes.steps) + PROFILED_STEPS + 64
    largest = max(sizes.batches)
    return settings_for(
        task,
        folder,
        DTYPE,
        max_model_len=length,
        max_num_seqs=largest,
        max_num_batched_tokens=max(8192, length),
        kv_cache_gib=(largest + 1) * (length + BLOCK_SIZE) * shape.kv_bytes_per_token / 2**30,
        pipeline_depth=2,
    )


def _decode(task: Task, model: _Model, sizes: _Sizes, batch: int, params: dict[str, Any]) -> tuple[Figures, StepPlan]:
    loaded, config, shape = model
    loop = EngineLoop(engine_around(loaded, config))
    for number in range(batch):
        prompt = tokens(number, sizes.context - sizes.warmup - sizes.steps // 2, shape.vocab)
        loop.add(number, prompt, forced(config.max_model_len - len(prompt), **params))
    _pretend_prefill(loop.core)
    clock = _Clock(loop)
    _run(loop, sizes.warmup)
    synchronize(task.device)
    contexts, seconds, walls = [], [], []
    last = time.perf_counter()
    with clock:
        for result in _results(loop, sizes.steps):
            now = time.perf_counter()
            walls.append(now - last)
            last = now
            step = StepShape.of(result.plan.slices)
            contexts.append(step.context)
            seconds.append(result.seconds)
    wall = statistics.median(walls)
    context = statistics.fmean(contexts)
    read, floor = floor_of(shape, batch, context, task.ceilings)
    # A read alone is faster than a copy, which also writes: the stricter of the two bounds.
    stricter = floor_of(shape, batch, context, task.ceilings, "read_bytes_per_s")[1]
    found: Figures = {
        "step_ms": spread(walls, 1e3),
        "executor_ms": spread(seconds, 1e3),
        "context_mean": significant(context / batch),
        "bytes": read,
        "floor_ms": significant(floor * 1e3),
        "of_floor": significant(floor / wall),
        "of_read_floor": significant(stricter / wall),
        "scheduling_share": significant(clock.spent / sum(walls)),
        "tokens_per_s": significant(batch / wall),
    }
    if batch == _GAP_BATCH[task.device]:
        found["gpu"] = gpu_time(task, lambda: _run(loop, PROFILED_STEPS))
    drain(loop)
    return found, result.plan


def _pretend_prefill(core: EngineCore) -> None:
    """Commit the prefill steps without running them, because the KV is random anyway."""
    while any(not request.progress.output for request in core.requests.values()):
        plan = core.start_step(0.0)
        assert plan is not None
        core.finish_step(StepResult(plan, [5 if piece.samples else None for piece in plan.slices], 1e-3), 0.0)
    core.take_events()


def _results(loop: EngineLoop, count: int) -> Iterable[StepResult]:
    for _ in range(count):
        yield from (event.result for event in loop.step() if isinstance(event, Computed))


def _run(loop: EngineLoop, count: int) -> None:
    for _ in _results(loop, count):
        pass


class _Clock:
    """Stopwatch on the engine core's scheduling."""

    def __init__(self, loop: EngineLoop) -> None:
        self._core = loop.core
        self.spent = 0.0

    def __enter__(self) -> None:
        core = self._core
        core.start_step, core.finish_step = self._timed(core.start_step), self._timed(core.finish_step)

    def __exit__(self, *error: object) -> None:
        del self._core.start_step, self._core.finish_step

    def _timed(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args)
            finally:
                self.spent += time.perf_counter() - start

        return call


def _forward(task: Task, loaded: Loaded, plan: StepPlan, floor_ms: float) -> Figures:
    """Measure the forward pass alone, as a CUDA graph that is replayed back to back."""
    model, kv = loaded.executor.model, loaded.executor.store.device
    segments = [Segment([5], piece.start, piece.blocks) for piece in plan.slices]
    batch = PackedBatch.build(segments, kv.block_size, model.device)
    try:
        times = seconds_of(task.device, recorded(task.device, lambda: model.forward(batch, kv)))
    except RuntimeError as error:
        return {"error": str(error)[:500]}
    return {"ms": spread(times, 1e3), "of_floor": significant(floor_ms / 1e3 / statistics.median(times))}
