from __future__ import annotations

import random
from typing import NamedTuple

from skipjoin.core.request import NO_TARGET, ServiceClass, Target
from skipjoin.observe.requests import Kind
from skipjoin.workload.prefixes import PromptParts, SharedPrefix


class WorkloadRequest(NamedTuple):
    """Request to send, `at` seconds from the start; `deadline_s` counts from there.

    Attributes:
        program: Name of its program; empty for none. Of the calls of a program, only the first one is sent at its
            time. The others follow `pause_s` seconds after the one before has finished.
    """

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
    program: str = ""
    pause_s: float = 0.0

    def after(self, prefix: SharedPrefix | None, chance: random.Random) -> WorkloadRequest:
        if prefix is None:
            return self
        return self._replace(prompt_tokens=prefix.tokens + self.prompt_tokens, parts=prefix.draw(chance, self.stream))

    @property
    def kind(self) -> Kind:
        return Kind(self.stream, self.service)
