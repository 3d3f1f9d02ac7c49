"""The setting of FastServe's evaluation."""

from __future__ import annotations

from papers.recipes import SPELLED
from skipjoin.sim.experiments.machines import Machine
from skipjoin.sim.experiments.system import System

# The setting of section 6.1 with two assumptions: 11 GiB of KV are what the weights of OPT-13B leave of nine tenths of
# 40 GB, and 128 of the 144 GiB of RAM per GPU are for swapped KV.
BATCH_CAP, SWAP_GIB_PER_GPU = 256, 128.0
# Requests ask for exactly what they generate, which favors `static`, the only recipe here that reads it.
MAX_TOKENS = "exact"
MEAN_BOUND, TAIL_BOUND = "normalized_latency_s.mean<=0.3", "normalized_latency_s.p95<=0.3"
MACHINES = {
    "opt-13b": Machine(model="opt-13b", hardware="a100-40gb", kv_gib=11.0, swap_gib=SWAP_GIB_PER_GPU),
    # The smallest group that has room for KV, and the paper's sixteen GPUs. Their KV is what the weights leave.
    "opt-66b": Machine(model="opt-66b", hardware="a100-40gb:tp4", swap_gib=4 * SWAP_GIB_PER_GPU),
    "opt-175b": Machine(model="opt-175b", hardware="a100-40gb:tp8pp2", swap_gib=16 * SWAP_GIB_PER_GPU),
}
# The paper's baselines: `static` stands for FasterTransformer, and `fcfs` for vLLM and FastServe-FCFS, which run on the
# same engine here. `srpt` knows the true lengths and is an upper bound.
RECIPES = ("static", "fcfs", "fastserve", "srpt")


def system(recipe: str, model: str = "opt-13b", *, batch_cap: int = BATCH_CAP) -> System:
    (found,) = MACHINES[model].systems(SPELLED[recipe], max_num_seqs=batch_cap, max_tokens=MAX_TOKENS)
    return found
