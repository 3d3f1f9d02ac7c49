"""What executors that run a model need of a request apart from its tokens."""

from __future__ import annotations

from typing import NamedTuple

from skipjoin.sampling import SamplingParams


class Sampling(NamedTuple):
    """The value of `Request.sampling` for executors that run a model: the user's parameters and this request's seed."""

    params: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...]
