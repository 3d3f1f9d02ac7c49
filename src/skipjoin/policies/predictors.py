"""Length predictors."""

from __future__ import annotations

from skipjoin.core.request import Request


class MaxTokens:
    """The length that the request asks for at most. Where outputs run to max_tokens, as in experiments that force
    output lengths, this is the true length: an oracle."""

    def predict(self, request: Request) -> int:
        return request.max_tokens
