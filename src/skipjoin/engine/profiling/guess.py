"""Estimated costs of steps before a measurement: from the model's size and typical device speeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from skipjoin.exec.rank_spec import RankSpec, by_stage
from skipjoin.policies.cost import LinearCost


class Rates(NamedTuple):
    """memory: bytes per second of reading weights and KV. arithmetic: floating point operations per second in products.
    link: bytes per second between the tiers. step_s: seconds of the smallest step."""

    memory: float
    arithmetic: float
    link: float
    step_s: float


# Two cores of a server's CPU, and a data-centre GPU at half its data sheet: right within a factor of three on most
# machines. Learning from steps corrects the rest.
RATES = {
    "cpu": Rates(memory=15e9, arithmetic=2.5e11, link=4e9, step_s=1e-3),
    "cuda": Rates(memory=1e12, arithmetic=1e14, link=1e10, step_s=5e-3),
}


def guess_cost(rank_specs: Sequence[RankSpec], block_size: int) -> LinearCost:
    """Every step reads the weights once and meanwhile computes two operations per weight and token. rank_specs: of all
    ranks; the ranks of a stage work at the same time, stages in turn."""
    stages = [_guess(stage[0], block_size) for stage in by_stage(rank_specs)]
    return LinearCost(*(sum(terms) for terms in zip(*map(dataclasses.astuple, stages), strict=True)))


def _guess(spec: RankSpec, block_size: int) -> LinearCost:
    """The cost of one rank's share of a step."""
    rates = RATES[spec.device_kind]
    token = 2 * spec.weight_bytes / spec.itemsize / rates.arithmetic
    return LinearCost(
        floor=rates.step_s,
        weights=spec.weight_bytes / rates.memory,
        prefill_token=token,
        # Two products of head_dim multiply-adds for each pair, head and layer.
        attention_pair=4 * spec.attention_width / rates.arithmetic,
        decode=token,
        context_token=spec.block_bytes / block_size / rates.memory,
        # Codes are all that crosses a link; a CPU that makes them reads the numbers.
        block=(spec.host_block_bytes if spec.device_kind == "cuda" else spec.block_bytes) / rates.link,
        transfer_floor=1e-4,
    )
