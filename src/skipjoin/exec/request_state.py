from __future__ import annotations

from dataclasses import dataclass, field

from skipjoin.model.sampler import SamplingState
from skipjoin.sampling import TokenLogprob


@dataclass(eq=False, slots=True)
class RequestState:
    """State of a request in a worker. Preemption does not change it; a dropped slice leaves a hole in its KV."""

    sampling: SamplingState | None
    scores: list[TokenLogprob] = field(default_factory=list)
    is_dropped: bool = False
