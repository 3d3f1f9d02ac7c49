from __future__ import annotations

from typing import NamedTuple

from skipjoin.sampling import SamplingParams


class Sampling(NamedTuple):
    """`Request.sampling` of model executors."""

    params: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...]


def is_constrained(sampling: object) -> bool:
    return isinstance(sampling, Sampling) and sampling.params.structured_outputs is not None
