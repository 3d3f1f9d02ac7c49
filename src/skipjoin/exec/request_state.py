from __future__ import annotations

from dataclasses import dataclass, field

import torch

from skipjoin.model.sampler import SamplingState
from skipjoin.sampling import TokenLogprob


@dataclass(eq=False, slots=True)
class RequestState:
    """State of a request in a worker. Preemption does not change it; a dropped slice leaves a hole in its KV.

    `sums` has the float64 sums of the hidden states up to each full block, by numbers of tokens.
    """

    sampling: SamplingState | None
    scores: list[TokenLogprob] = field(default_factory=list)
    is_dropped: bool = False
    sums: dict[int, torch.Tensor] = field(default_factory=dict)
