"""Batchers: which of the ordered requests run together."""

from __future__ import annotations

from skipjoin.core.policy import (
    HELD,
    NEWCOMERS_HELD,
    NO_SEAT,
    NO_TOKENS,
    PROMPT_DOES_NOT_FIT,
    PROMPTS_ARE_FULL,
    BatchBuilder,
    CostModel,
    Refusal,
)
from skipjoin.core.request import Request
from skipjoin.core.scheduling.context import StepContext
from skipjoin.policies.forward import saturating_tokens


def _check_budgets(max_seqs: int, max_tokens: int) -> None:
    for name, value in (("max_seqs", max_seqs), ("max_tokens", max_tokens)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


class Greedy:
    """In rank order, until the step has `max_seqs` requests or `max_tokens` tokens.

    chunked: cut a prompt to the tokens that are left in the step (Sarathi; FastServe for prompts longer than a step).
    Otherwise a prompt is computed whole, and `max_tokens` is for prompts alone: if decodes took from it, a long prompt,
    and all behind it, would wait until hardly any request ran. One that does not fit waits, and no newcomer overtakes
    it; one longer than `max_tokens` is the only prompt of its step.
    """

    rests = True

    def __init__(self, max_seqs: int, max_tokens: int, *, chunked: bool) -> None:
        _check_budgets(max_seqs, max_tokens)
        self.max_seqs = self.cap = max_seqs
        self.max_tokens = max_tokens
        self.chunked = chunked

    def open(self, context: StepContext) -> BatchBuilder:
        kind = ChunkedBuilder if self.chunked else WholeBuilder
        return kind(self.max_seqs, self.max_tokens)


class ChunkedBuilder:
    """One step's batch under `Greedy`, prompts cut to fit."""

    __slots__ = ("_seqs", "_tokens")

    def __init__(self, seqs: int, tokens: int) -> None:
        self._seqs, self._tokens = seqs, tokens

    def offer(self, request: Request, pending: int) -> int | Refusal:
        if self._seqs <= 0:
            return NO_SEAT
        if self._tokens <= 0:
            return NO_TOKENS
        return pending if pending <= self._tokens else self._tokens

    def take(self, request: Request, tokens: int) -> None:
        self._seqs -= 1
        self._tokens -= tokens


class WholeBuilder:
    """One step's batch under `Greedy`, prompts computed whole."""

    __slots__ = ("_prompts", "_seqs", "_tokens")

    def __init__(self, seqs: int, tokens: int) -> None:
        self._seqs, self._tokens = seqs, tokens
        self._prompts = 0

    def offer(self, request: Request, pending: int) -> int | Refusal:
        if self._seqs <= 0:
            return NO_SEAT
        if pending == 1 or pending <= self._tokens or not self._prompts:
            return pending
        return PROMPT_DOES_NOT_FIT

    def take(self, request: Request, tokens: int) -> None:
        self._seqs -= 1
        if tokens > 1:
            self._prompts += 1
            self._tokens -= tokens


class TargetForward:
    """Every generation that is offered, and prompts up to the forward size that saturates the device (generations fill
    the KV, prompts fill the compute: EconoServe section 3.3.1), until the step has `max_seqs` requests.

    cost: tells that size, at most `max_tokens`; target: it is this instead.
    """

    rests = True

    def __init__(self, max_seqs: int, max_tokens: int, cost: CostModel, *, target: int | None = None) -> None:
        _check_budgets(max_seqs, max_tokens)
        self.max_seqs = self.cap = max_seqs
        self.max_tokens = max_tokens
        self._cost = cost
        self._fixed = target
        self._revision = cost.revision
        self.target = self._size()

    def open(self, context: StepContext) -> BatchBuilder:
        self._follow_cost()
        return TargetBuilder(self.max_seqs, self.target)

    def _follow_cost(self) -> None:
        if self._cost.revision != self._revision:
            self._revision = self._cost.revision
            self.target = self._size()

    def _size(self) -> int:
        return saturating_tokens(self._cost, self.max_tokens) if self._fixed is None else self._fixed


class TargetBuilder(ChunkedBuilder):
    """One step's batch under `TargetForward`: generations join whatever tokens it has."""

    __slots__ = ()

    def offer(self, request: Request, pending: int) -> int | Refusal:
        if self._seqs <= 0:
            return NO_SEAT
        if pending == 1:
            return 1
        return min(pending, self._tokens) if self._tokens > 0 else PROMPTS_ARE_FULL


class RunToCompletion:
    """Static batches, one after the other: job-level scheduling (FastServe sections 2.2 and 6.1), as in
    FasterTransformer. Waiting requests form a batch of up to `max_seqs`, and the next batch begins when the last
    member has ended. Of all batchers it shows the head-of-line blocking worst.

    The batch recruits while its steps take newcomers: their prompts are computed whole, up to `max_tokens` prompt
    tokens in a step or one longer prompt alone, while members whose prompt is computed decode. Recruiting ends at the
    last seat, or with a step that runs members and takes no newcomer though it had prompt tokens left: no request
    waited, or there was no memory. Asking for a step when no request can run changes nothing. From then on no request
    joins; a member that loses its memory stays one. So the ordering decides which requests are recruited, and which
    members are evicted; a more important request, too, waits for the batch to end.

    With several plans in flight there is still one batch: without overlap its members spread over the plans, as
    micro-batches in a pipeline of stages.

    Not modelled: FasterTransformer also holds finished answers back until the whole batch has ended, and pads the
    batch to its longest member. Here an answer leaves when it is complete, and neither padding nor an empty seat
    costs anything, so this baseline is faster than the system it stands for.
    """

    def __init__(self, max_seqs: int, max_tokens: int) -> None:
        _check_budgets(max_seqs, max_tokens)
        self.max_seqs = self.cap = max_seqs
        self.max_tokens = max_tokens
        self._step = MemberBuilder(set(), max_seqs, max_tokens, recruits=True)

    def open(self, context: StepContext) -> BatchBuilder:
        members = {request for request in self._step.members if request.finish_reason is None}
        recruits = not members or self._step.keeps_recruiting
        self._step = MemberBuilder(members, self.max_seqs, self.max_tokens, recruits=recruits)
        return self._step


class MemberBuilder:
    """One step's batch under `RunToCompletion`.

    members: the requests of the static batch that have not ended, at most `seqs`; requests that join are added.
    recruits: whether newcomers may join.
    """

    __slots__ = ("_absent", "_cramped", "_joined", "_ran", "_recruits", "_seqs", "_whole", "members")

    def __init__(self, members: set[Request], seqs: int, tokens: int, *, recruits: bool) -> None:
        self.members = members
        self._recruits = recruits
        self._seqs = seqs
        self._whole = WholeBuilder(seqs, tokens)
        # Members whose KV was dropped (all others have tokens planned) and that did not return in this step.
        self._absent = {request for request in members if not request.planned}
        self._ran = self._joined = self._cramped = False

    @property
    def keeps_recruiting(self) -> bool:
        """Whether the step after this one may take newcomers, if a member is left."""
        return self._recruits and (self._joined or self._cramped or not self._ran)

    def offer(self, request: Request, pending: int) -> int | Refusal:
        if request not in self.members and not self._recruits:
            # Closing the step keeps a long queue from being read, but it would shut out members without KV, too.
            return HELD if self._absent else NEWCOMERS_HELD
        verdict = self._whole.offer(request, pending)
        self._cramped = self._cramped or not isinstance(verdict, int)
        return verdict

    def take(self, request: Request, tokens: int) -> None:
        self._whole.take(request, tokens)
        self._ran = True
        self._absent.discard(request)
        if request not in self.members:
            self.members.add(request)
            self._joined = True
            self._recruits = len(self.members) < self._seqs
