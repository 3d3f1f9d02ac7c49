from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from skipjoin.core.events import Computed, Event, Finished
from skipjoin.core.request import Request
from skipjoin.core.waits import WaitReason
from skipjoin.observe.record import Record, add_usage, rounded
from skipjoin.observe.requests import RequestFacts, RequestLog
from skipjoin.observe.usage import EngineUsage
from skipjoin.observe.waits import WaitLog
from skipjoin.policies.forward import saturating_tokens
from skipjoin.sim.experiments.predictors import Predictions
from skipjoin.sim.experiments.system import System
from skipjoin.sim.split import Handover, SplitWatcher


@dataclass(slots=True)
class SplitFigures:
    requests: int = 0
    bytes: float = 0.0
    transfer_s: float = 0.0
    wait_s: float = 0.0
    prefill_prompt_tokens: int = 0
    decode_prompt_tokens: int = 0

    @classmethod
    def of(cls, parts: Iterable[SplitFigures]) -> SplitFigures:
        found = list(parts)
        return cls(*(sum(getattr(part, field.name) for part in found) for field in fields(cls)))

    def describe(self, system: System, prefill: Sequence[EngineUsage], decode: Sequence[EngineUsage]) -> Record:
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
    """Follows requests between replicas, so that each has a single `RequestFacts`."""

    def __init__(
        self, logs: Sequence[RequestLog], prefill_replicas: int, predictions: Predictions | None = None
    ) -> None:
        self.figures = SplitFigures()
        self._logs = logs
        self.prefill_replicas = prefill_replicas
        self._predictions = predictions
        self._in_transit: dict[int, tuple[Handover, RequestFacts | None]] = {}  # in transit, by id

    def arrived(self, request: Request) -> None:
        if self._predictions is not None:
            self._predictions.predict(request)

    def handed_over(self, handover: Handover) -> None:
        self._in_transit[handover.request.id] = handover, None

    def completed(self, handover: Handover) -> None:
        _, facts = self._in_transit.pop(handover.request.id)
        assert facts is not None, "the events of a turn are observed before the next one"
        assert handover.begun is not None
        assert handover.completed is not None
        self._logs[handover.target].expect(handover.request, facts, _waited(handover, handover.completed))
        figures = self.figures
        figures.requests += 1
        figures.bytes += handover.size
        figures.transfer_s += handover.completed - handover.begun
        figures.wait_s += handover.begun - handover.ready

    def ended(self, event: Finished) -> None:
        if self._predictions is not None:
            self._predictions.learn(event)

    def takes(self, facts: RequestFacts) -> bool:
        handover, known = self._in_transit.get(facts.id, (None, None))
        if handover is None or known is not None:
            return False
        facts.ended = facts.reason = None
        self._in_transit[facts.id] = handover, facts
        return True

    def observe(self, replica: int, events: Iterable[Event]) -> None:
        tokens = sum(_prompt_tokens(event) for event in events if isinstance(event, Computed))
        if replica < self.prefill_replicas:
            self.figures.prefill_prompt_tokens += tokens
        else:
            self.figures.decode_prompt_tokens += tokens

    def live(self, now: float) -> list[RequestFacts]:
        found = []
        for handover, facts in self._in_transit.values():
            assert facts is not None
            if facts.waits is not None:
                WaitLog().resumed(facts.waits, _waited(handover, now), now)
            found.append(facts)
        return found


def _waited(handover: Handover, now: float) -> dict[WaitReason, float]:
    pulled = now if handover.pulled is None else handover.pulled
    return {WaitReason.NO_KV: pulled - handover.ready, WaitReason.KV_IN_TRANSIT: now - pulled}


def _prompt_tokens(event: Computed) -> int:
    return sum(
        min(slice_.start + slice_.tokens, len(slice_.request.prompt)) - slice_.start
        for slice_ in event.result.plan.slices
        if slice_.start < len(slice_.request.prompt)
    )


def _role(system: System, usages: Sequence[EngineUsage], prompt_tokens: int) -> Record:
    record: Record = {"replicas": len(usages), "hardware": system.hardware, "prompt_tokens": prompt_tokens}
    add_usage(record, usages, target_tokens=saturating_tokens(system.cost, system.max_num_batched_tokens))
    del record["series"]
    return record
