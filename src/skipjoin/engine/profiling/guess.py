from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from skipjoin.exec.rank_spec import RankSpec, by_stage
from skipjoin.policies.cost import LinearCost


class Rates(NamedTuple):
    """Typical speeds of a device in bytes or operations per second, and seconds of the smallest step."""

    memory: float
    arithmetic: float
    link: float
    step_s: float


# Two cores of a server CPU, and a data-center GPU at half its data sheet: within a factor of three on most machines.
# Learning from steps corrects the rest.
RATES = {
    "cpu": Rates(memory=15e9, arithmetic=2.5e11, link=4e9, step_s=1e-3),
    "cuda": Rates(memory=1e12, arithmetic=1e14, link=1e10, step_s=5e-3),
}


# Relative standard deviation of a guess: cores may be few, shared or slow.
GUESS_DOUBT = 2.0


def guess_cost(rank_specs: Sequence[RankSpec], block_size: int) -> LinearCost:
    stages = [_guess(stage[0], block_size) for stage in by_stage(rank_specs)]
    whole = LinearCost(*(sum(terms) for terms in zip(*map(_terms, stages), strict=True)))
    experts = sum(stage.expert_part * stage.weights for stage in stages)
    return dataclasses.replace(
        whole, expert_part=experts / whole.weights, expert_use=max(stage.expert_use for stage in stages)
    )


def _terms(cost: LinearCost) -> tuple[float, ...]:
    return dataclasses.astuple(dataclasses.replace(cost, expert_part=0.0, expert_use=0.0))


def _guess(spec: RankSpec, block_size: int) -> LinearCost:
    rates = RATES[spec.device_kind]
    token = 2 * spec.parameters / rates.arithmetic
    return LinearCost(
        floor=rates.step_s,
        weights=spec.weight_bytes / rates.memory,
        prefill_token=token,
        # Two products of head_dim multiply-adds per pair, head and layer.
        attention_pair=4 * spec.attention_width / rates.arithmetic,
        decode=token + 2 * spec.state_bytes / rates.memory,  # read and written
        context_token=spec.block_bytes / block_size / rates.memory,
        # Only codes cross a GPU's link, but a CPU reads the numbers to make the codes.
        block=(spec.cpu_block_bytes if spec.device_kind == "cuda" else spec.block_bytes) / rates.link,
        transfer_floor=1e-4,
        expert_part=spec.expert_bytes / spec.weight_bytes,
        expert_use=spec.expert_use,
    )
