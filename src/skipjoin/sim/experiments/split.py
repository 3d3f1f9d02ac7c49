"""What a simulated run over prefill and decode replicas adds to the run's story of its requests, and to its record."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from skipjoin.core.events import Computed, Event, Finished
from skipjoin.core.request import Request
from skipjoin.core.scheduling.waits import WaitReason
from skipjoin.observe.record import Record, add_usage, rounded
from skipjoin.observe.requests import RequestFacts, RequestLog
from skipjoin.observe.usage import EngineUsage
from skipjoin.observe.waits import WaitLog
from skipjoin.policies.forward import saturating_tokens
from skipjoin.sim.experiments.predictors import Foreseeing
from skipjoin.sim.experiments.system import System
from skipjoin.sim.split import Handover, SplitWatcher


@dataclass(slots=True)
class SplitFigures:
    """Sums over a run, or a part of one.

    requests, bytes: whose KV has crossed the network, and how much that was. transfer_s: in which it was on its way.
    wait_s: between first tokens and the beginning of transfers. prefill_prompt_tokens, decode_prompt_tokens: tokens of
    prompts that either kind of replica computed; those that were computed again count again.
    """

    requests: int = 0
    bytes: float = 0.0
    transfer_s: float = 0.0
    wait_s: float = 0.0
    prefill_prompt_tokens: int = 0
    decode_prompt_tokens: int = 0

    @classmethod
    def of(cls, parts: Iterable[SplitFigures]) -> SplitFigures:
        """The parts together."""
        found = list(parts)
        return cls(*(sum(getattr(part, field.name) for part in found) for field in fields(cls)))

    def describe(self, system: System, prefill: Sequence[EngineUsage], decode: Sequence[EngineUsage]) -> Record:
        """What a split adds to a record; seconds are of one request. prefill, decode: of the replicas of each kind."""
        count = max(1, self.requests)
        return {
            "transfer": {
                "requests": self.requests,
                "bytes": round(self.bytes),
                "seconds_mean": rounded(self.transfer_s / count),
                "wait_mean": rounded(self.wait_s / count),
            },
            "roles": {
                "prefill": _role(system.prefill_system, prefill, self.prefill_prompt_tokens),
                "decode": _role(system, decode, self.decode_prompt_tokens),
            },
        }


class Handovers(SplitWatcher):
    """Follows requests from one replica to another, so that each has one story.

    logs: of the replicas, in their order; those of prefill replicas must ask `takes` about requests that end.
    foreseeing: gives requests their forecasts, if they get any.
    """

    def __init__(self, logs: Sequence[RequestLog], prefill_replicas: int, foreseeing: Foreseeing | None = None) -> None:
        self.figures = SplitFigures()
        self._logs = logs
        self.prefill_replicas = prefill_replicas
        self._foreseeing = foreseeing
        self._away: dict[int, tuple[Handover, RequestFacts | None]] = {}  # from the first token to the landing, by id

    def arrived(self, request: Request) -> None:
        if self._foreseeing is not None:
            self._foreseeing.foresee(request)

    def handed_over(self, handover: Handover) -> None:
        self._away[handover.request.id] = handover, None

    def landed(self, handover: Handover) -> None:
        _, facts = self._away.pop(handover.request.id)
        assert facts is not None, "the events of a turn are observed before the next one"
        assert handover.begun is not None
        assert handover.landed is not None
        self._logs[handover.target].expect(handover.request, facts, _waited(handover, handover.landed))
        figures = self.figures
        figures.requests += 1
        figures.bytes += handover.size
        figures.transfer_s += handover.landed - handover.begun
        figures.wait_s += handover.begun - handover.ready

    def ended(self, event: Finished) -> None:
        if self._foreseeing is not None:
            self._foreseeing.learn(event)

    def takes(self, facts: RequestFacts) -> bool:
        """Whether the request, which has ended at a replica, goes on at another one."""
        handover, known = self._away.get(facts.id, (None, None))
        if handover is None or known is not None:
            return False
        facts.ended = facts.reason = None
        self._away[facts.id] = handover, facts
        return True

    def observe(self, replica: int, events: Iterable[Event]) -> None:
        """Take what happened on a replica."""
        tokens = sum(_prompt_tokens(event) for event in events if isinstance(event, Computed))
        if replica < self.prefill_replicas:
            self.figures.prefill_prompt_tokens += tokens
        else:
            self.figures.decode_prompt_tokens += tokens

    def live(self, now: float) -> list[RequestFacts]:
        """The requests that are at no replica, with their waits until `now`. Nothing may be observed afterwards."""
        found = []
        for handover, facts in self._away.values():
            assert facts is not None
            if facts.waits is not None:
                WaitLog().resumed(facts.waits, _waited(handover, now), now)
            found.append(facts)
        return found


def _waited(handover: Handover, now: float) -> dict[WaitReason, float]:
    """What a request that is handed over has waited for until `now`: space for its KV, then the KV."""
    pulled = now if handover.pulled is None else handover.pulled
    return {WaitReason.NO_KV: pulled - handover.ready, WaitReason.KV_IN_TRANSIT: now - pulled}


def _prompt_tokens(event: Computed) -> int:
    """Tokens of prompts that a step computed."""
    return sum(
        min(piece.start + piece.tokens, len(piece.request.prompt)) - piece.start
        for piece in event.result.plan.slices
        if piece.start < len(piece.request.prompt)
    )


def _role(system: System, usages: Sequence[EngineUsage], prompt_tokens: int) -> Record:
    """The record's part about the replicas of one kind. prompt_tokens: of prompts, computed there."""
    record: Record = {"replicas": len(usages), "hardware": system.hardware, "prompt_tokens": prompt_tokens}
    add_usage(record, usages, target_tokens=saturating_tokens(system.cost, system.max_num_batched_tokens))
    del record["series"]
    return record
