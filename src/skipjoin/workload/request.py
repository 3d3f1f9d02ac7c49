from __future__ import annotations

import random
from typing import NamedTuple

from skipjoin.core.request import NO_TARGET, ServiceClass, Target
from skipjoin.observe.requests import Kind
from skipjoin.workload.prefixes import PromptParts, SharedPrefix


class WorkloadRequest(NamedTuple):
    """Request to send, `at` seconds from the start; `deadline_s` counts from there."""

    at: float
    prompt_tokens: int
    output_tokens: int
    stream: str
    priority: int
    row: int | None = None
    prompt: str | None = None
    service: ServiceClass = ServiceClass.REAL_TIME
    deadline_s: float | None = None
    target: Target = NO_TARGET
    key: str = ""
    parts: PromptParts | None = None

    def after(self, prefix: SharedPrefix | None, chance: random.Random) -> WorkloadRequest:
        if prefix is None:
            return self
        return self._replace(prompt_tokens=prefix.tokens + self.prompt_tokens, parts=prefix.draw(chance, self.stream))

    @property
    def kind(self) -> Kind:
        return Kind(self.stream, self.service)
