from __future__ import annotations

import random
from collections.abc import Iterable
from typing import NamedTuple

from skipjoin.core.request import NO_TARGET, ServiceClass, Target
from skipjoin.observe.requests import Kind
from skipjoin.workload.prefixes import PromptParts, SharedPrefix


class WorkloadRequest(NamedTuple):
    """Request to send."""

    at: float  # seconds from the start
    prompt_tokens: int
    output_tokens: int
    stream: str
    priority: int
    row: int | None = None
    prompt: str | None = None
    service: ServiceClass = ServiceClass.REAL_TIME
    deadline_s: float | None = None  # seconds from `at`
    target: Target = NO_TARGET
    key: str = ""
    parts: PromptParts | None = None
    program: str = ""
    pause_s: float | None = None  # after the end of its program's call before; None if sent at its own time

    def after(self, prefix: SharedPrefix | None, chance: random.Random) -> WorkloadRequest:
        if prefix is None:
            return self
        return self._replace(prompt_tokens=prefix.tokens + self.prompt_tokens, parts=prefix.draw(chance, self.stream))

    @property
    def kind(self) -> Kind:
        return Kind(self.stream, self.service)


def chains_of(jobs: Iterable[WorkloadRequest]) -> list[list[int]]:
    """Return the indices of the jobs in chains: the first job is sent at its time, each other one after a pause."""
    chains: list[list[int]] = []
    latest: dict[str, list[int]] = {}  # of each program
    for index, job in enumerate(jobs):
        if job.pause_s is not None and (chain := latest.get(job.program)) is not None:
            chain.append(index)
            continue
        chains.append([index])
        if job.program:
            latest[job.program] = chains[-1]
    return chains
