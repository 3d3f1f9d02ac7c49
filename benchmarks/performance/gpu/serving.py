"""The part `record`: requests that arrive while others run, and the engine's own record of them by recipe."""

from __future__ import annotations

import dataclasses

from common import BLOCK_SIZE, Figures, Task, backends, drive, folder_of, loaded_model, settings_for, shape_of

from skipjoin.engine.build import engine_around
from skipjoin.workload.workload import synthetic

MODEL, DTYPE, RECIPES = "llama-3-8b", "bfloat16", ("fastserve", "fcfs", "adaptive")
# On a card and in a rehearsal: requests per second, seconds of arrivals and of the run, lengths, tokens of KV.
_CARD, _REHEARSAL = (24.0, 15.0, 30.0, "sharegpt", 60_000), (20.0, 1.0, 5.0, "sharegpt*0.05", 2048)
_SWAP_GIB = {"cuda": 8.0, "cpu": 0.01}


def measure_record(task: Task) -> Figures:
    """Run recipes one after the other with less KV than the requests need."""
    rate, duration_s, until_s, lengths, kv_tokens = _REHEARSAL if task.is_rehearsal else _CARD
    shape = shape_of(task, MODEL, max_positions=2048)
    workload = synthetic(lengths, "poisson")
    with folder_of(shape, DTYPE) as folder:
        config = settings_for(
            task,
            folder,
            DTYPE,
            recipe=RECIPES[0],
            max_num_seqs=256,
            kv_cache_gib=(kv_tokens + BLOCK_SIZE) * shape.kv_bytes_per_token / 2**30,
            swap_space_gib=_SWAP_GIB[task.device],
            pipeline_depth=2,
        )
        with loaded_model(config) as loaded:
            figures: Figures = {"model": MODEL, **backends(loaded), "kv_tokens": kv_tokens, "records": {}}
            figures["workload"] = workload.describe(rate, duration_s, 0)
            # The first run compiles kernels and captures graphs.
            drive(engine_around(loaded, config), workload.draw(rate, min(duration_s, 4.0), 1), min(until_s, 12.0))
            for recipe in RECIPES:
                if task.left_s < 0:
                    break
                engine = engine_around(loaded, dataclasses.replace(config, recipe=recipe))
                figures["records"][recipe] = drive(engine, workload.draw(rate, duration_s, 0), until_s)
                task.keep(figures)
            return figures
