from __future__ import annotations

from skipjoin.core.context import StepContext
from skipjoin.core.policy import BatchBuilder, BatcherWrapper
from skipjoin.core.refusals import PROMPT_DOES_NOT_FIT, Refusal
from skipjoin.core.request import Request


class WholePrompts(BatcherWrapper):
    """Lets prompts of an encoder run whole, because each token attends to all others.

    A prompt that another batcher would cut waits without being overtaken, and has a step of its own if it is longer
    than any step.
    """

    is_decode_invariant = True

    def open(self, context: StepContext) -> BatchBuilder:
        return _Builder(self.batcher.open(context))


class _Builder:
    __slots__ = ("_inner", "_is_empty")

    def __init__(self, inner: BatchBuilder) -> None:
        self._inner = inner
        self._is_empty = True

    def offer(self, request: Request, pending: int) -> int | Refusal:
        verdict = self._inner.offer(request, pending)
        if not isinstance(verdict, int) or verdict == pending:
            return verdict
        return pending if self._is_empty else PROMPT_DOES_NOT_FIT

    def take(self, request: Request, tokens: int) -> None:
        self._is_empty = False
        self._inner.take(request, tokens)
