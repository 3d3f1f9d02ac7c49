from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice, takewhile
from typing import Any

from skipjoin.config import ConfigError
from skipjoin.workload.fields import check_requests, in_bounds
from skipjoin.workload.prefixes import PromptParts
from skipjoin.workload.request import WorkloadRequest
from skipjoin.workload.streams import Closed, generator

# Name among lengths.
AGENTS = "agents"
# Tokens per named part of a prompt, a multiple of usual block sizes.
_PART_TOKENS = 32
# Bits of a name for the position of a part, so that names of two programs differ.
_POSITION_BITS = 24


@dataclass(frozen=True)
class Tail:
    """Log-normal distribution, cut off at `most`."""

    median: float
    sigma: float
    most: float

    def draw(self, chance: random.Random) -> float:
        return min(self.most, chance.lognormvariate(math.log(self.median), self.sigma))


@dataclass(frozen=True)
class Agents:
    """Programs of agents: calls with pauses for tools, whose prompts are all tokens before and a tool's result.

    By default, lengths follow the rows of the data set lightseekorg/trie-dataset. Of the pauses, 86 % are shorter than
    a second, as in issue 285 of vLLM's router, and the others have the heavy tail of TraceLab (arXiv 2606.30560). As
    there, 95 % of prompt tokens are known from the call before.
    """

    calls: tuple[int, int] = (2, 40)  # bounds of the number of calls, whose logarithm is uniform
    templates: int = 8  # number of system prompts, one of which begins each program
    template_tokens: int = 4096
    task: Tail = Tail(1200, 0.8, 8192)
    output: Tail = Tail(110, 0.8, 2048)
    result: Tail = Tail(160, 1.3, 4096)
    fast: Tail = Tail(0.3, 0.8, 1.0)
    slow: Tail = Tail(5.0, 1.3, 300.0)
    slow_share: float = 0.14

    best_effort: float | None = None
    closed: tuple[Closed, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.calls[0] <= self.calls[1]:
            raise ConfigError(f"agents: calls must be two integers, LOW at most HIGH, from 1 on, got {self.calls}")

    def draw(
        self, rate_rps: float | None, duration_s: float | None, seed: int, limit: int | None = None
    ) -> list[WorkloadRequest]:
        """Return the calls of programs that begin before `duration_s`, or of the first `limit` programs.

        `rate_rps` is in programs per second. Calls of a program are consecutive.
        """
        rate, chance = in_bounds("rate_rps", rate_rps), generator(seed, 0, "arrivals")
        check_requests(rate, duration_s, limit, calls=self.calls[1])
        starts = self._starts(rate, chance)
        if duration_s is not None:
            starts = takewhile(lambda at: at < duration_s, starts)
        elif limit is None:
            raise ConfigError("one of duration_s and limit must be given, not both")
        begun = islice(starts, limit)
        return [job for number, at in enumerate(begun) for job in self._program(seed, number, at)]

    def describe(
        self, rate_rps: float | None, duration_s: float | None, seed: int, limit: int | None = None
    ) -> dict[str, Any]:
        record: dict[str, Any] = {
            "lengths": AGENTS,
            "calls": list(self.calls),
            "arrivals": "poisson",
            "rate_rps": rate_rps,
            "duration_s": duration_s,
            "seed": seed,
        }
        return record if limit is None else record | {"limit": limit}

    def _starts(self, rate: float, chance: random.Random) -> Iterator[float]:
        at = 0.0
        for _ in count():
            at += chance.expovariate(rate)
            yield at

    def _program(self, seed: int, number: int, at: float) -> Iterator[WorkloadRequest]:
        chance, (low, high) = generator(seed, number, "agent"), self.calls
        calls = int(math.exp(chance.uniform(math.log(low), math.log(high + 1))))
        template = int(chance.random() * self.templates)
        prompt = self.template_tokens + round(self.task.draw(chance))
        pause_s: float | None = None
        for _ in range(min(calls, high)):
            output = max(1, round(self.output.draw(chance)))
            parts = PromptParts(tuple(self._names(template, number, prompt + output)), _PART_TOKENS)
            yield WorkloadRequest(
                at, prompt, output, AGENTS, 0, parts=parts, program=f"program-{number}", pause_s=pause_s
            )
            prompt += output + max(1, round(self.result.draw(chance)))
            pause_s = (self.slow if chance.random() < self.slow_share else self.fast).draw(chance)

    def _names(self, template: int, number: int, tokens: int) -> Iterator[int]:
        """Yield names of the full parts of a program's first `tokens` tokens, which include the output."""
        common = self.template_tokens // _PART_TOKENS
        for position in range(tokens // _PART_TOKENS):
            whose = -1 - template if position < common else 1 + number
            yield (whose << _POSITION_BITS) + position
