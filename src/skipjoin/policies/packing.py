"""Packing of real-time and best-effort requests into steps that end before the next token is due (BROS section 4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from math import inf

from skipjoin.core.policy import ALL_HELD, HELD, BatchBuilder, CostModel, Refusal
from skipjoin.core.request import Request
from skipjoin.core.scheduling.context import StepContext
from skipjoin.core.step import StepShape
from skipjoin.policies.deadlines import NextTokens
from skipjoin.policies.step_load import StepLoad, fitting_tokens

# How fast the mean time of a step follows the steps.
_MEAN_RATE = 0.1


class Packing:
    """Steps that end before the next token of the most urgent real-time request is due, by their modelled time.

    First comes the most urgent real-time request, whatever time it takes, then others by urgency while the step keeps
    that limit. Then best-effort requests, while there are seats and time; where there are not, each may take the place
    of the least urgent real-time request, if that can wait for another step. Prompts are cut to the time that is left.

    Best-effort requests join until a step has `cap` requests: twice as many with each step that sees no real-time
    request, up to `max_seqs`, and `base` again when real-time requests do not fit the time. Real-time requests have all
    `max_seqs` seats: the paper bounds both classes, and then real-time requests wait though the step has time.

    cost: of steps, and of the KV that has to come back before one. next_tokens: when tokens are due; the requests that
    it knows are the real-time ones.
    """

    def __init__(self, max_seqs: int, max_tokens: int, cost: CostModel, next_tokens: NextTokens, *, base: int) -> None:
        for name, value in (("max_seqs", max_seqs), ("max_tokens", max_tokens), ("base", base)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.max_seqs = max_seqs
        self.max_tokens = max_tokens
        self.cost = cost
        self.next_tokens = next_tokens
        self.base = self.cap = min(base, max_seqs)
        self.mean_s = cost.step(StepShape())  # of late steps, by the model

    def open(self, context: StepContext) -> BatchBuilder:
        candidates = iter(context.candidates)
        urgent: list[tuple[Request, int]] = []
        others = candidates
        for one in candidates:
            if one[0] not in self.next_tokens:
                others = chain((one,), candidates)
                break
            urgent.append(one)
        if not urgent:
            self.cap = min(2 * self.cap, self.max_seqs)
        pack = Pack(self, context, self._limit(urgent, context))
        if not (pack.add_all(urgent, real_time=True) or pack.add_real_time(urgent)):
            self.cap = self.base
        else:
            first = list(islice(others, max(0, pack.seats_left)))
            if not pack.add_all(first, real_time=False):
                others = chain(first, others)
            all(pack.add_best_effort(request, pending) for request, pending in others)
        if pack.chosen:
            self.mean_s += _MEAN_RATE * (pack.seconds - self.mean_s)
        return pack

    def _limit(self, urgent: Sequence[tuple[Request, int]], context: StepContext) -> float:
        """Seconds that the step may take: what is left to the most urgent request that can have its token in time.

        One that cannot, even alone, does not limit the step: it would be none the better, and all others the worse.
        Where that is so with all of them, steps keep within the TPOT of requests that have no own.
        """
        if not urgent:
            return inf
        due, cost = self.next_tokens.due, self.cost
        now = context.now + len(context.in_flight) * self.mean_s  # when the step begins
        for request, pending in sorted(urgent, key=lambda one: due(one[0])):
            left = due(request) - now
            if left > 0 and StepLoad.of(request.planned, pending).seconds(cost) <= left:
                return left
        return self.next_tokens.default.tpot_s


class Pack:
    """One step's batch under `Packing`.

    limit: seconds that it may take. chosen: the requests that are to join and have not yet, with their tokens.
    """

    def __init__(self, rules: Packing, context: StepContext, limit: float) -> None:
        self.chosen: dict[Request, int] = {}
        self._rules = rules
        self._context = context
        self._limit = limit
        self._seats = 0  # requests that are to join or have joined
        self._tokens = rules.max_tokens  # that are left
        self._load = StepLoad()
        self._urgent: set[Request] = set()  # real-time requests that could run
        self._last: list[Request] = []  # real-time requests that are to join, the least urgent last

    @property
    def seconds(self) -> float:
        """Of the step, by the model."""
        return self._load.seconds(self._rules.cost)

    @property
    def seats_left(self) -> int:
        """How many best-effort requests more the step may have, beside its real-time ones."""
        return self._rules.cap - self._seats

    def add_all(self, candidates: Sequence[tuple[Request, int]], *, real_time: bool) -> bool:
        """Choose all of these, which are of one class, with all of their tokens, where nothing is short; otherwise
        none."""
        if len(candidates) > (self._rules.max_seqs if real_time else self.seats_left):
            return False
        prefill = attention = decodes = context = away = 0
        away_of = self._context.blocks_away
        for request, pending in candidates:
            start = request.planned
            if pending == 1:
                decodes += 1
                context += start + 1
            else:
                prefill += pending
                attention += pending * start + pending * (pending + 1) // 2
            away += away_of(request)
        load = self._load.plus(StepLoad(prefill, attention, decodes, context, away))
        if prefill + decodes > self._tokens or load.seconds(self._rules.cost) > self._limit:
            return False
        self._load = load
        self._seats += len(candidates)
        self._tokens -= prefill + decodes
        self.chosen.update(candidates)
        if real_time:
            self._last = [request for request, _ in candidates]
            self._urgent = set(self._last)
        return True

    def add_real_time(self, urgent: Sequence[tuple[Request, int]]) -> bool:
        """Choose from the requests, the most urgent first; False: not all of them fit the time."""
        self._urgent.update(request for request, _ in urgent)
        for request, pending in urgent:
            if self._seats >= self._rules.max_seqs or self._tokens <= 0:
                return True
            most = min(pending, self._tokens)
            tokens = self._fit(request, most) if self.chosen else most
            if tokens:
                self._choose(request, tokens)
                self._last.append(request)
            if tokens < most:
                return False
        return True

    def add_best_effort(self, request: Request, pending: int) -> bool:
        """Choose the request, if need be in place of a real-time one; False: neither."""
        if self.seats_left > 0 and (tokens := self._room_for(request, pending)):
            self._choose(request, tokens)
            return True
        if not self._last or not self._can_wait(self._last[-1]):
            return False
        replaced = self._last.pop()
        given = self.chosen[replaced]
        self._drop(replaced)
        if tokens := self._room_for(request, pending):
            self._choose(request, tokens)
            return True
        self._choose(replaced, given)
        return False

    def offer(self, request: Request, pending: int) -> int | Refusal:
        if (tokens := self.chosen.get(request)) is not None:
            return tokens
        if not self._seats:  # there is no candidate: each request has to take its memory from others
            return min(pending, self._tokens)
        if not self.chosen:
            return ALL_HELD
        if request in self._rules.next_tokens and request not in self._urgent:  # so has this one
            return self._room_for(request, pending) or HELD
        return HELD

    def take(self, request: Request, tokens: int) -> None:
        if self.chosen.pop(request, None) is None:
            self._join(request, tokens)

    def _room_for(self, request: Request, pending: int) -> int:
        """How many of the request's pending tokens there are seats and time for."""
        most = min(pending, self._tokens)
        return self._fit(request, most) if most > 0 and self._seats < self._rules.max_seqs else 0

    def _fit(self, request: Request, most: int) -> int:
        """How many tokens the step can compute in time, at most these; 0: too few to be worth a slice."""
        away = self._context.blocks_away(request)
        return fitting_tokens(self._load, request.planned, most, away=away, cost=self._rules.cost, limit=self._limit)

    def _can_wait(self, request: Request) -> bool:
        """Whether its next token is still in time if another step computes it (BROS equation 6)."""
        left = self._rules.next_tokens.due(request) - self._context.now
        return left >= self.seconds + self._rules.mean_s

    def _choose(self, request: Request, tokens: int) -> None:
        self.chosen[request] = tokens
        self._join(request, tokens)

    def _join(self, request: Request, tokens: int, sign: int = 1) -> None:
        away = self._context.blocks_away(request)
        self._load = self._load.plus(StepLoad.of(request.planned, tokens, away), sign)
        self._seats += sign
        self._tokens -= sign * tokens

    def _drop(self, request: Request) -> None:
        self._join(request, self.chosen.pop(request), -1)
