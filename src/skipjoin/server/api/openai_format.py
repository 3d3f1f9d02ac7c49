from __future__ import annotations

import time
import uuid
from abc import abstractmethod
from functools import cache
from typing import Any

from msgspec import UNSET, UnsetType

from skipjoin.engine.text import Choice
from skipjoin.model.tokenizer import Tokenizer
from skipjoin.routes import OPENAI_EVENTS
from skipjoin.server.api.errors import ApiError
from skipjoin.server.api.jobs import Format
from skipjoin.server.api.protocol import GenerationBody
from skipjoin.server.api.responses import LOWEST_LOGPROB, Usage
from skipjoin.server.api.service import Service


class OpenAiFormat(Format):
    def __init__(self, service: Service, body: GenerationBody, prefix: str, service_tier: Any) -> None:
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self.created, self.model, self.service_tier = int(time.time()), service.shown_model(body.model), service_tier
        self.tokenizer = service.tokenizer
        self.has_usage = body.usage_always
        self._has_usage_at_end = body.usage_at_end
        self.no_usage: Any = None if body.usage_at_end else UNSET
        self.begun: set[Choice] = set()

    def end(self, usage: Usage) -> bytes:
        asked = self.event([], usage) if self._has_usage_at_end else b""
        return asked + OPENAI_EVENTS.frame(OPENAI_EVENTS.end)

    def error(self, error: ApiError) -> bytes:
        return OPENAI_EVENTS.frame(error.body())

    @abstractmethod
    def event(self, choices: list[Any], usage: Any) -> bytes: ...


def prompt_scores(tokenizer: Tokenizer, choice: Choice, top: int | None) -> list[dict[str, Any] | None] | UnsetType:
    """Return the log-probabilities of a prompt in vLLM's form. Ranks beyond the likeliest are null."""
    if top is None:
        return UNSET
    text_of = cache(tokenizer.token_text)  # halves the time, which other requests of the process wait for
    found: list[dict[str, Any] | None] = []
    for scored in choice.prompt_scored:
        if scored.logprob is None:
            found.append(None)
            continue
        ranked: dict[int, tuple[float, int | None]] = {
            token: (logprob, rank + 1) for rank, (token, logprob) in enumerate(scored.top[:top])
        }
        ranked = {scored.token: ranked.get(scored.token, (scored.logprob, None)), **ranked}
        found.append(
            {
                str(token): {"logprob": max(logprob, LOWEST_LOGPROB), "rank": rank, "decoded_token": text_of(token)}
                for token, (logprob, rank) in ranked.items()
            }
        )
    return found
