"""The parts `mixed` and `prefill`: steps with prompts, compared with the sum of their kernels and with the rate of the
GPU's matrix units."""

from __future__ import annotations

import itertools
import time

from common import (
    BLOCK_SIZE,
    Figures,
    Task,
    backends,
    folder_of,
    loaded_model,
    plan_of,
    settings_for,
    shape_of,
    significant,
    spread,
    synchronize,
)
from gpu_time import PROFILED_STEPS, gpu_time
from steps import CARD, DTYPE, MODEL, REHEARSAL, TARGETS, decode_config

from skipjoin.core.step import StepPlan, StepShape
from skipjoin.engine.load import Loaded
from skipjoin.sim.models import ModelShape

# Decodes, and prompt tokens of one more request, of a step with a prompt.
MIXED = {"cuda": (64, (0, 32, 128, 512)), "cpu": (4, (0, 8, 16))}


def measure_mixed(task: Task) -> Figures:
    """Measure steps of decodes and a prompt: time on the host, whole step, and sum of the kernels."""
    decodes, prompts = MIXED[task.device]
    sizes = (REHEARSAL if task.is_rehearsal else CARD)._replace(batches=(decodes + 1,))
    shape = shape_of(task, MODEL)
    figures: Figures = {"model": MODEL, "decodes": decodes, "target": TARGETS["mixed_of_kernels"], "steps": {}}
    with folder_of(shape, DTYPE) as folder, loaded_model(decode_config(task, folder, sizes, shape)) as loaded:
        figures |= backends(loaded)
        for count in prompts:
            mix = [(sizes.context - 1, 1)] * decodes + [(0, count)] * (count > 0)
            figures["steps"][str(count)] = _mixed(task, loaded, plan_of(mix, shape.vocab))
            task.keep(figures)
    return figures


def _mixed(task: Task, loaded: Loaded, plan: StepPlan) -> Figures:
    """Run the plan several times in succession, each queued while the one before computes."""
    submit, hosts = loaded.executor.submit, []

    def run(count: int) -> float:
        synchronize(task.device)
        begin, handles = time.perf_counter(), []
        for _ in range(count):
            start = time.perf_counter()
            handles.append(submit(plan, 0.0))
            if task.device == "cuda":
                handles[-1]._in_flight.result()  # queued, not finished
                hosts.append(time.perf_counter() - start)
            if len(handles) > 1:
                handles[-2].result()
        handles[-1].result()
        return (time.perf_counter() - begin) / count

    run(PROFILED_STEPS)
    hosts.clear()
    times = [run(PROFILED_STEPS) for _ in range(3 if task.is_rehearsal else 7)]
    found: Figures = {"step_ms": spread(times, 1e3)}
    if hosts:
        found["host_ms"] = spread(hosts, 1e3)
    found["gpu"] = gpu_time(task, lambda: run(PROFILED_STEPS))
    if "busy_ms" in found["gpu"]:
        found["of_kernels"] = significant(found["step_ms"]["median"] / found["gpu"]["busy_ms"])
    return found


def measure_prefill(task: Task) -> Figures:
    """Measure prefill steps relative to the rate of matrix products."""
    sizes = REHEARSAL if task.is_rehearsal else CARD
    longest = max(sum(prompts) for prompts in sizes.prompts)
    shape = shape_of(task, MODEL, max_positions=longest)
    figures: Figures = {"model": MODEL, "target": TARGETS["prefill_of_rate"], "steps": {}}
    with folder_of(shape, DTYPE) as folder:
        config = settings_for(
            task,
            folder,
            DTYPE,
            max_num_seqs=8,
            max_num_batched_tokens=longest,
            kv_cache_gib=2 * (longest + 8 * BLOCK_SIZE) * shape.kv_bytes_per_token / 2**30,
        )
        with loaded_model(config) as loaded:
            figures |= backends(loaded)
            for prompts in sizes.prompts:
                figures["steps"][f"{len(prompts)} x {prompts[0]}"] = _prefill(task, loaded, shape, prompts)
                task.keep(figures)
    return figures


def _prefill(task: Task, loaded: Loaded, shape: ModelShape, prompts: tuple[int, ...]) -> Figures:
    plan = plan_of([(0, count) for count in prompts], shape.vocab)
    times = []
    for turn in itertools.count():
        synchronize(task.device)
        start = time.perf_counter()
        loaded.executor.submit(plan, 0.0).result()
        synchronize(task.device)
        if turn >= 3:
            times.append(time.perf_counter() - start)
        if len(times) == 10 or (len(times) >= 3 and task.left_s < 0):
            break
    flop = flop_of(shape, plan)
    rate = flop / spread(times)["median"]
    return {
        "step_ms": spread(times, 1e3),
        "flop": flop,
        "flop_per_s": significant(rate),
        "of_rate": significant(rate / task.ceilings["matmul_flop_per_s"]),
        "tokens_per_s": significant(sum(prompts) / spread(times)["median"]),
    }


def flop_of(shape: ModelShape, plan: StepPlan) -> int:
    """Return the FLOPs of a plan.

    There are two for each parameter and token, and four for each dimension of a pair of query and key. The output head
    counts for sampled rows only.
    """
    step = StepShape.of(plan.slices)
    matrices = (step.prefill + step.decodes) * shape.flops_per_token + 2 * len(plan.slices) * shape.head_parameters
    return matrices + 4 * shape.layers * shape.heads * shape.head_dim * (step.attention + step.context)
