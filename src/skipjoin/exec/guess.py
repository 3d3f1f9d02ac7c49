"""What steps cost before anything was measured: from the model's size and the usual speed of such a device."""

from __future__ import annotations

from typing import NamedTuple

from skipjoin.model.causal_lm import CausalLM
from skipjoin.model.kv_cache import PagedKV
from skipjoin.policies.cost import LinearCost


class Rates(NamedTuple):
    """Bytes per second that weights and KV are read at, floating point operations per second in products, bytes per
    second between the tiers, and the seconds that a step takes however small it is."""

    memory: float
    arithmetic: float
    link: float
    step_s: float


# Two cores of a server's CPU, and a data-centre GPU at half its data sheet: right within a factor of three on most
# machines. The steps that run correct the rest.
RATES = {
    "cpu": Rates(memory=15e9, arithmetic=2.5e11, link=4e9, step_s=1e-3),
    "cuda": Rates(memory=1e12, arithmetic=1e14, link=1e10, step_s=5e-3),
}


def guess_cost(model: CausalLM, block_size: int) -> LinearCost:
    """Every step reads the weights once, and meanwhile computes two operations per weight and token. Of a rank: what
    its own part of a step costs."""
    rates, config, shard = RATES[model.device.type], model.config, model.shard
    block_bytes = PagedKV.bytes_per_block(config, block_size, model.dtype, shard)
    token = 2 * model.weight_bytes / model.dtype.itemsize / rates.arithmetic
    # Two products of head_dim multiply-adds for each pair, head and layer.
    pair = 4 * len(shard.layers(config)) * len(shard.heads(config)) * config.head_dim / rates.arithmetic
    return LinearCost(
        floor=rates.step_s,
        weights=model.weight_bytes / rates.memory,
        prefill_token=token,
        attention_pair=pair,
        decode=token,
        context_token=block_bytes / block_size / rates.memory,
        block=block_bytes / rates.link,
        transfer_floor=1e-4,
    )
