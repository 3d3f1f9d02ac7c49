"""Sampling state that model executors need of a request besides its tokens."""

from __future__ import annotations

from typing import NamedTuple

from skipjoin.sampling import SamplingParams


class Sampling(NamedTuple):
    """Value of `Request.sampling` for model executors: the user's parameters and this request's seed."""

    params: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...]
