"""Batchers: which of the ordered requests run together."""

from __future__ import annotations

from skipjoin.core.policy import Packing, Refusal
from skipjoin.core.request import Request


class Greedy:
    """In rank order, until the step has `max_seqs` requests or `max_tokens` tokens.

    chunked: cut a prompt to the tokens that are left in the step (Sarathi; FastServe for prompts longer than a
    step). Otherwise a prompt is computed whole, and `max_tokens` is for prompts alone: if decodes took from it, a
    long prompt, and all behind it, would wait until hardly anybody ran. One that does not fit waits, and nobody new
    overtakes it; one longer than `max_tokens` is the only prompt of its step.
    """

    def __init__(self, max_seqs: int, max_tokens: int, *, chunked: bool) -> None:
        for name, value in (("max_seqs", max_seqs), ("max_tokens", max_tokens)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.max_seqs = max_seqs
        self.max_tokens = max_tokens
        self.chunked = chunked

    def open(self, now: float) -> Packing:
        kind = ChunkedPacking if self.chunked else WholePacking
        return kind(self.max_seqs, self.max_tokens)


class ChunkedPacking:
    """One step's batch under `Greedy`, prompts cut to fit."""

    __slots__ = ("_seqs", "_tokens")

    def __init__(self, seqs: int, tokens: int) -> None:
        self._seqs, self._tokens = seqs, tokens

    def offer(self, request: Request, pending: int) -> int | Refusal:
        if self._seqs <= 0 or self._tokens <= 0:
            return Refusal.STOP
        return pending if pending <= self._tokens else self._tokens

    def take(self, request: Request, tokens: int) -> None:
        self._seqs -= 1
        self._tokens -= tokens


class WholePacking:
    """One step's batch under `Greedy`, prompts computed whole."""

    __slots__ = ("_prompts", "_seqs", "_tokens")

    def __init__(self, seqs: int, tokens: int) -> None:
        self._seqs, self._tokens = seqs, tokens
        self._prompts = 0

    def offer(self, request: Request, pending: int) -> int | Refusal:
        if self._seqs <= 0:
            return Refusal.STOP
        if pending == 1 or pending <= self._tokens or not self._prompts:
            return pending
        return Refusal.CLOSE

    def take(self, request: Request, tokens: int) -> None:
        self._seqs -= 1
        if tokens > 1:
            self._prompts += 1
            self._tokens -= tokens
