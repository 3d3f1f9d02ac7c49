from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from skipjoin.core.request import Request
from skipjoin.core.step import Slice
from skipjoin.exec.sampling import Sampling
from skipjoin.model.sampler import PromptLogprob, prompt_logprobs
from skipjoin.model.transfer import CpuCopy
from skipjoin.sampling import TokenLogprob


def wants_scores(slice_: Slice) -> bool:
    request = slice_.request
    return _asked(request) is not None and slice_.start < len(request.prompt) and not request.progress.output


def score_prompt(
    slice_: Slice, rows: torch.Tensor, logits_of: Callable[[torch.Tensor], torch.Tensor]
) -> CpuCopy[list[PromptLogprob]]:
    targets = _targets(slice_)
    return prompt_logprobs(rows[: len(targets)], targets, _asked(slice_.request) or 0, logits_of)


def keep_scores(kept: list[TokenLogprob], slice_: Slice, scores: Sequence[PromptLogprob]) -> None:
    if not kept:
        kept.append(TokenLogprob(slice_.request.prompt[0], None))
    # A chunk that is recomputed after an eviction is scored again, with the same result.
    kept[slice_.start + 1 :] = [
        TokenLogprob(token, score.logprob, score.top) for token, score in zip(_targets(slice_), scores, strict=True)
    ]


def _targets(slice_: Slice) -> Sequence[int]:
    return slice_.request.prompt[slice_.start + 1 : slice_.start + 1 + slice_.tokens]


def _asked(request: Request) -> int | None:
    sampling: Sampling = request.sampling  # type: ignore[assignment]
    return sampling.params.prompt_logprobs
