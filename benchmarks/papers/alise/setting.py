"""Settings of ALISE's evaluation: machines and variants."""

from __future__ import annotations

from papers.figures.variants import Variant
from skipjoin.sim.experiments.machines import Machine

# The paper's bound (section 4.2), and FastServe's for the figures that both evaluations have.
BOUND, FASTSERVE_BOUND = "normalized_latency_s.mean<=0.2", "normalized_latency_s.mean<=0.3"
# Two GPUs share 1,024 GB of DRAM; half of each share holds swapped KV.
_V100_SWAP_GIB = 256.0
# KV is what the weights leave of nine tenths of 32 GiB.
V100 = {
    model: Machine(model=model, hardware="v100-32gb", swap_gib=_V100_SWAP_GIB)
    for model in ("opt-2.7b", "opt-6.7b", "opt-13b", "llama-7b", "llama-13b", "pythia-12b")
}
# The setting of `benchmarks/papers/fastserve`.
A100 = Machine(model="opt-13b", hardware="a100-40gb", kv_gib=11.0, swap_gib=128.0)

# Fields of records that tests compare with a result's settings.
KEPT = (
    *(
        f"settings.{name}"
        for name in ("kv_blocks", "cpu_blocks", "swap_dtype", "max_num_seqs", "block_size", "max_tokens")
    ),
)


def alise(predictor: str, recipe: str = "alise") -> Variant:
    return Variant(f"{recipe} {predictor}", recipe, predictor)


# Accuracies that a predictor of texts may reach; `benchmarks/papers/alise/texts` measures them.
NEAR_TRUE = alise("noise:0.2")
REGRESSED = tuple(alise(f"regress:{correlation}") for correlation in (0.8, 0.6, 0.3))
