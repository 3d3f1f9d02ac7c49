"""State of a request on one rank, besides its KV."""

from __future__ import annotations

from dataclasses import dataclass, field

from skipjoin.model.sampler import SamplingState
from skipjoin.sampling import TokenLogprob


@dataclass(eq=False, slots=True)
class RequestState:
    """What a worker keeps of a request from its first slice until it is finished. Preemption does not change it.

    Attributes:
        sampling: None on a rank that does not sample.
        scores: Prompt logprobs, collected over the chunks of the prompt until the first output token is reported.
        is_dropped: Whether a slice was dropped: the KV then has a hole, so slices in later plans are void.
    """

    sampling: SamplingState | None
    scores: list[TokenLogprob] = field(default_factory=list)
    is_dropped: bool = False
