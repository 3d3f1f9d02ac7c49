"""The part `pressure`: requests that arrive while others run, with far less KV than they need, by recipe."""

from __future__ import annotations

import dataclasses
from itertools import groupby

from common import BLOCK_SIZE, Figures, Task, backends, drive, folder_of, loaded_model, settings_for, shape_of

from skipjoin.engine.build import engine_around
from skipjoin.workload.workload import synthetic

MODEL, DTYPE = "llama-3-8b", "bfloat16"
# Recipe and type of swapped-out KV of each run.
RUNS = (("fastserve", "auto"), ("fcfs", "auto"), ("fastserve", "int8"))
# On a card and in a rehearsal: requests per second, seconds of arrivals and of the run, lengths, tokens of KV.
_CARD, _REHEARSAL = (24.0, 12.0, 20.0, "sharegpt", 12_000), (60.0, 1.0, 8.0, "sharegpt*0.05", 128)
_SWAP_GIB = {"cuda": 16.0, "cpu": 0.01}
# Swaps from which a run says something about them.
ENOUGH_SWAPS = 200


def measure_pressure(task: Task) -> Figures:
    """Run the recipes one after the other; a run with fewer swaps than `ENOUGH_SWAPS` is marked."""
    rate, duration_s, until_s, lengths, kv_tokens = _REHEARSAL if task.is_rehearsal else _CARD
    shape = shape_of(task, MODEL, max_positions=128 if task.is_rehearsal else 2048)
    workload = synthetic(lengths, "poisson")
    figures: Figures = {"model": MODEL, "kv_tokens": kv_tokens, "enough_swaps": ENOUGH_SWAPS, "runs": []}
    figures["workload"] = workload.describe(rate, duration_s, 0)
    with folder_of(shape, DTYPE) as folder:
        for swap_dtype, runs in groupby(RUNS, key=lambda run: run[1]):
            config = settings_for(
                task,
                folder,
                DTYPE,
                recipe=RUNS[0][0],
                max_num_seqs=256,
                kv_cache_gib=(kv_tokens + BLOCK_SIZE) * shape.kv_bytes_per_token / 2**30,
                swap_space_gib=_SWAP_GIB[task.device],
                swap_dtype=swap_dtype,
                pipeline_depth=2,
            )
            with loaded_model(config) as loaded:
                figures |= backends(loaded)
                # The first run compiles kernels and captures graphs.
                drive(engine_around(loaded, config), workload.draw(rate, min(duration_s, 2.0), 1), min(until_s, 4.0))
                for recipe, _ in runs:
                    if task.left_s < 0:
                        return figures
                    engine = engine_around(loaded, dataclasses.replace(config, recipe=recipe))
                    record = drive(engine, workload.draw(rate, duration_s, 0), until_s)
                    swaps = record["kv"]["preemptions"]["swap"]
                    run = {"recipe": recipe, "swap_dtype": swap_dtype, "swaps": swaps, "record": record}
                    figures["runs"].append(run | {"is_enough": swaps >= ENOUGH_SWAPS})
                    task.keep(figures)
    return figures
