"""Prompt logprobs, collected over the chunks of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch

from skipjoin.core.request import Request
from skipjoin.core.step import Slice
from skipjoin.exec.sampling import Sampling
from skipjoin.model.sampler import PromptLogprob, prompt_logprobs
from skipjoin.model.transfer import HostCopy
from skipjoin.sampling import TokenLogprob


def wants_scores(piece: Slice) -> bool:
    """Return whether the slice holds prompt tokens whose `prompt_logprobs` are requested and not reported yet."""
    request = piece.request
    return _asked(request) is not None and piece.start < len(request.prompt) and not request.output


def score_prompt(
    piece: Slice, rows: torch.Tensor, logits_of: Callable[[torch.Tensor], torch.Tensor]
) -> HostCopy[list[PromptLogprob]]:
    """Score the prompt tokens that the slice's rows predict.

    Args:
        rows: Rows of `CausalLM.wanted_rows`, one per token of the slice.
        logits_of: Returns the logits of a few rows at a time.
    """
    targets = _targets(piece)
    return prompt_logprobs(rows[: len(targets)], targets, _asked(piece.request) or 0, logits_of)


class PromptScores:
    """Prompt logprobs, kept until the request's first output token is reported."""

    def __init__(self) -> None:
        self._scores: WeakKeyDictionary[Request, list[TokenLogprob]] = WeakKeyDictionary()

    def keep(self, piece: Slice, scores: Sequence[PromptLogprob]) -> None:
        request = piece.request
        known = self._scores.setdefault(request, [TokenLogprob(request.prompt[0], None)])
        # A chunk that is recomputed after an eviction is scored again, with the same result.
        known[piece.start + 1 :] = [
            TokenLogprob(token, score.logprob, score.top) for token, score in zip(_targets(piece), scores, strict=True)
        ]

    def take(self, request: Request) -> tuple[TokenLogprob, ...]:
        """Remove and return a request's scores; empty if it has none."""
        return tuple(self._scores.pop(request, ()))


def _targets(piece: Slice) -> Sequence[int]:
    return piece.request.prompt[piece.start + 1 : piece.start + 1 + piece.tokens]


def _asked(request: Request) -> int | None:
    sampling: Sampling = request.sampling  # type: ignore[assignment]
    return sampling.params.prompt_logprobs
