"""What steps cost before anything was measured: from the model's size and the usual speed of such a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from skipjoin.exec.rank_spec import RankSpec, by_stage
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


def guess_cost(parts: Sequence[RankSpec], block_size: int) -> LinearCost:
    """Every step reads the weights once, and meanwhile computes two operations per weight and token. parts: of all
    ranks; those of a stage work at the same time, and stages one after the other."""
    stages = [_guess(stage[0], block_size) for stage in by_stage(parts)]
    return LinearCost(*(sum(terms) for terms in zip(*map(dataclasses.astuple, stages), strict=True)))


def _guess(part: RankSpec, block_size: int) -> LinearCost:
    """What its own part of a step costs a rank."""
    rates = RATES[part.device_kind]
    token = 2 * part.weight_bytes / part.itemsize / rates.arithmetic
    return LinearCost(
        floor=rates.step_s,
        weights=part.weight_bytes / rates.memory,
        prefill_token=token,
        # Two products of head_dim multiply-adds for each pair, head and layer.
        attention_pair=4 * part.attention_width / rates.arithmetic,
        decode=token,
        context_token=part.block_bytes / block_size / rates.memory,
        block=part.block_bytes / rates.link,
        transfer_floor=1e-4,
    )
