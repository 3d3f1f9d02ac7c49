from __future__ import annotations

from dataclasses import dataclass, field

from skipjoin.model.sampler import SamplingState
from skipjoin.sampling import TokenLogprob


@dataclass(eq=False, slots=True)
class RequestState:
    """State of a request in a worker, apart from its KV. Preemption does not change it.

    `scores` are prompt logprobs until the first output token. A dropped slice left a hole in the KV.
    """

    sampling: SamplingState | None
    scores: list[TokenLogprob] = field(default_factory=list)
    is_dropped: bool = False
