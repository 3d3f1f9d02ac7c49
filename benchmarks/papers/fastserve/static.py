"""Static batches and reservations of the maximum, as in FasterTransformer and Orca."""

from __future__ import annotations

from skipjoin.core.context import StepContext
from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.policy import Allocation, BatchBuilder, Deferral
from skipjoin.core.refusals import HELD, INCOMING_HELD, Refusal
from skipjoin.core.request import Request
from skipjoin.policies.batching import WholeBuilder, check_budgets


class WholeMaximum:
    """Reserves blocks for the prompt and max_tokens at admission (Orca), so a running request never runs out."""

    is_decode_invariant = True

    def reserve(self, request: Request, target: int, kv: KVAccounts) -> Allocation | Deferral:
        blocks = kv.blocks_for(request.max_total_tokens)
        return Allocation(now=blocks, blocks=blocks) if blocks <= kv.available else Deferral.INCOMING


class RunToCompletion:
    """Static batching, i.e. job-level scheduling as in FasterTransformer (FastServe sections 2.2 and 6.1).

    The next batch starts when the last member has finished. Members join over several steps, each with up to
    `max_tokens` prompt tokens or one longer prompt. The batch closes when it is full, or after a step that ran members
    and had space for more prompts. A member that loses its KV remains a member. Answers are neither delayed until the
    whole batch has finished nor padded.
    """

    def __init__(self, max_seqs: int, max_tokens: int) -> None:
        check_budgets(max_seqs, max_tokens)
        self.max_seqs = self.cap = max_seqs
        self.max_tokens = max_tokens
        self._step = MemberBuilder(set(), max_seqs, max_tokens, recruits=True)

    def open(self, context: StepContext) -> BatchBuilder:
        members = {request for request in self._step.members if request.progress.finish_reason is None}
        recruits = not members or self._step.keeps_recruiting
        self._step = MemberBuilder(members, self.max_seqs, self.max_tokens, recruits=recruits)
        return self._step


class MemberBuilder:
    __slots__ = ("_absent", "_cramped", "_joined", "_ran", "_recruits", "_seqs", "_whole", "members")

    def __init__(self, members: set[Request], seqs: int, tokens: int, *, recruits: bool) -> None:
        self.members = members
        self._recruits = recruits
        self._seqs = seqs
        self._whole = WholeBuilder(seqs, tokens)
        # Members whose KV was dropped (all others have planned tokens) and that have not rejoined in this step.
        self._absent = {request for request in members if not request.progress.planned}
        self._ran = self._joined = self._cramped = False

    @property
    def keeps_recruiting(self) -> bool:
        return self._recruits and (self._joined or self._cramped or not self._ran)

    def offer(self, request: Request, pending: int) -> int | Refusal:
        if request not in self.members and not self._recruits:
            # Refusing all new requests spares a scan of a long queue, but would also shut out members without KV.
            return HELD if self._absent else INCOMING_HELD
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
