"""Dispatch rules: which replica takes a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from skipjoin.core.events import Event, Finished, Token
from skipjoin.core.policy import CostModel, LengthPredictor
from skipjoin.core.request import Request
from skipjoin.core.step import StepShape

# Work is compared between busy replicas: a token is priced as its share of a step of this many decodes, a prompt as
# what it adds to that step.
_TYPICAL_BATCH = 32


class Dispatch(Protocol):
    """Chooses a replica for each request as it arrives."""

    def choose(self, request: Request) -> int:
        """The number of the replica that takes the request, from 0."""
        ...

    def observe(self, replica: int, events: Sequence[Event]) -> None:
        """What happened on a replica."""


class RoundRobin:
    """One replica after the other."""

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._next = 0

    def choose(self, request: Request) -> int:
        chosen = self._next
        self._next = (chosen + 1) % self._replicas
        return chosen

    def observe(self, replica: int, events: Sequence[Event]) -> None:
        pass


class LeastWork:
    """The replica with the least estimated work left, in seconds: prompts to compute and tokens to generate.

    cost: prices both. predictor: how many tokens a request will generate.
    """

    def __init__(self, replicas: int, cost: CostModel, predictor: LengthPredictor) -> None:
        self._cost = cost
        self._predictor = predictor
        self._work = [0.0] * replicas
        self._batch_s = cost.step(StepShape(decodes=_TYPICAL_BATCH, context=_TYPICAL_BATCH))
        self._decode_s = self._batch_s / _TYPICAL_BATCH
        # Of each request that is not over: seconds of its prompt, 0 once computed, and tokens expected.
        self._left: dict[Request, tuple[float, int]] = {}

    def choose(self, request: Request) -> int:
        tokens = len(request.prompt)
        pairs = tokens * (tokens + 1) // 2
        prompt_s = self._cost.step(StepShape(tokens, pairs, _TYPICAL_BATCH, _TYPICAL_BATCH)) - self._batch_s
        expected = self._predictor.predict(request)
        chosen = min(range(len(self._work)), key=self._work.__getitem__)
        self._left[request] = (prompt_s, expected)
        self._work[chosen] += prompt_s + expected * self._decode_s
        return chosen

    def observe(self, replica: int, events: Sequence[Event]) -> None:
        left, done = self._left, 0.0
        for event in events:
            if isinstance(event, Token):
                prompt_s, tokens = left[event.request]
                done += prompt_s
                if tokens:
                    done += self._decode_s
                left[event.request] = (0.0, max(0, tokens - 1))
            elif isinstance(event, Finished):
                prompt_s, tokens = left.pop(event.request)
                done += prompt_s + tokens * self._decode_s
        self._work[replica] -= done


DISPATCH_RULES = ("round-robin", "least-work")


def make_dispatch(name: str, replicas: int, cost: CostModel, predictor: LengthPredictor) -> Dispatch:
    """The rule called `name`, one of `DISPATCH_RULES`. Raises ValueError for another name."""
    if name == "round-robin":
        return RoundRobin(replicas)
    if name == "least-work":
        return LeastWork(replicas, cost, predictor)
    raise ValueError(f"dispatch must be one of {', '.join(DISPATCH_RULES)}, got {name!r}")
