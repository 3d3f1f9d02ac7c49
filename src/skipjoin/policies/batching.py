"""Batchers: which of the ordered requests run together."""

from __future__ import annotations

from skipjoin.core.policy import Refusal
from skipjoin.core.request import Request


class Greedy:
    """In rank order, until the step has `max_seqs` requests or `max_tokens` tokens.

    chunked: cut a prompt to the tokens that are left in the step (Sarathi; FastServe for prompts longer than a
    step). Otherwise a prompt is computed whole: one that does not fit waits, and nobody new overtakes it; one
    longer than `max_tokens` runs when it is the first of its step.
    """

    def __init__(self, max_seqs: int, max_tokens: int, *, chunked: bool) -> None:
        for name, value in (("max_seqs", max_seqs), ("max_tokens", max_tokens)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.max_seqs = max_seqs
        self.max_tokens = max_tokens
        self.chunked = chunked

    def open(self, now: float) -> GreedyPacking:
        return GreedyPacking(self.max_seqs, self.max_tokens, self.chunked)


class GreedyPacking:
    """One step's batch under `Greedy`."""

    __slots__ = ("_chunked", "_empty", "_seqs", "_tokens")

    def __init__(self, seqs: int, tokens: int, chunked: bool) -> None:
        self._seqs, self._tokens, self._chunked = seqs, tokens, chunked
        self._empty = True

    def offer(self, request: Request, pending: int) -> int | Refusal:
        if self._seqs <= 0 or self._tokens <= 0:
            return Refusal.STOP
        if pending <= self._tokens:
            return pending
        if self._chunked:
            return self._tokens
        return pending if self._empty else Refusal.CLOSE

    def take(self, request: Request, tokens: int) -> None:
        self._seqs -= 1
        self._tokens -= tokens
        self._empty = False
