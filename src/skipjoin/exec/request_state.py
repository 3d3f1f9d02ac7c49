from __future__ import annotations

from dataclasses import dataclass, field

from skipjoin.model.sampler import SamplingState
from skipjoin.sampling import TokenLogprob


@dataclass(eq=False, slots=True)
class RequestState:
    """State of a request in a worker, apart from its KV. Preemption does not change it.

    Attributes:
        sampling: None on a rank that does not sample.
        scores: Prompt logprobs until the first output token.
        is_dropped: Whether a slice was dropped, so that the KV has a hole.
    """

    sampling: SamplingState | None
    scores: list[TokenLogprob] = field(default_factory=list)
    is_dropped: bool = False
