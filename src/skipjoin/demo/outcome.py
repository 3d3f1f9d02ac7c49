from __future__ import annotations

import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from skipjoin.demo.load import BACKGROUND, CHAT
from skipjoin.loadtest.client import Exchange
from skipjoin.loadtest.targets import Target
from skipjoin.observe.record import Record

_PREEMPTIONS, _WAITS = "num_preemptions_total", "wait_seconds_total"
_METRICS_TIMEOUT_S = 5.0
# Largest batch of the demonstration.
MAX_SLOTS = 256
# Reasons with a smaller share of all waiting are not worth a column.
_MIN_SHARE = 0.001


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """Counters of a server's metrics, None if missing. `waits` are seconds by reason."""

    preemptions: float | None = None
    waits: Mapping[str, float] | None = None

    def since(self, before: EngineCounts) -> EngineCounts:
        preemptions, waits = None, None
        if self.preemptions is not None and before.preemptions is not None:
            preemptions = self.preemptions - before.preemptions
        if self.waits is not None and before.waits is not None:
            waits = {reason: seconds - before.waits.get(reason, 0.0) for reason, seconds in self.waits.items()}
        return EngineCounts(preemptions, waits)


def engine_counts(target: Target) -> EngineCounts:
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    request = urllib.request.Request(f"{target.base_url}/metrics", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_METRICS_TIMEOUT_S) as response:
            families = list(text_string_to_metric_families(response.read().decode("utf-8", "replace")))
    except (OSError, ValueError):
        return EngineCounts()
    samples = [sample for family in families for sample in family.samples]
    preempted = [sample.value for sample in samples if sample.name.endswith(f":{_PREEMPTIONS}")]
    waits = {sample.labels.get("reason", ""): sample.value for sample in samples if sample.name.endswith(f":{_WAITS}")}
    return EngineCounts(sum(preempted) if preempted else None, waits or None)


@dataclass(frozen=True, slots=True)
class Outcome:
    name: str
    record: Record
    exchanges: Sequence[Exchange]
    counts: EngineCounts
    slots: int | None = None

    @property
    def chat(self) -> Record:
        return self._part(CHAT)

    @property
    def background_s(self) -> float | None:
        """End of the last background job, None if one failed."""
        jobs = [exchange for exchange in self.exchanges if exchange.job.stream == BACKGROUND]
        ends = [job.facts.ended for job in jobs if job.failure is None and job.facts.ended is not None]
        return max(ends) if jobs and len(ends) == len(jobs) else None

    @property
    def failed(self) -> int:
        counts = self.record["requests"]
        return int(counts["rejected"] + counts["errors"])

    @property
    def max_open(self) -> int:
        changes = []
        for exchange in self.exchanges:
            if exchange.sent is not None and exchange.facts.ended is not None:
                changes += [(exchange.sent, 1), (exchange.facts.ended, -1)]
        now = most = 0
        for _, change in sorted(changes):
            now += change
            most = max(most, now)
        return most

    @property
    def waits(self) -> dict[str, float]:
        waits = self.counts.waits or {}
        least = _MIN_SHARE * sum(waits.values())
        longest = sorted(waits.items(), key=lambda item: item[1], reverse=True)
        return {reason: seconds for reason, seconds in longest if seconds > 0 and seconds >= least}

    def _part(self, stream: str) -> Record:
        part: Record = self.record.get("classes", {}).get(stream, self.record)
        return part


def verdict(outcomes: Sequence[Outcome]) -> str:
    own = [outcome for outcome in outcomes if outcome.slots is not None]
    if not own:
        return ""
    most, slots = max(item.max_open for item in own), own[0].slots
    if slots is not None and most > slots:
        return (
            f"Scheduling helps while more requests are open than the batch or the KV cache holds: here up to {most} "
            f"were open, and the batch has {slots} slots. With room for all of them, every recipe runs the same batch "
            f"and they tie; --max-num-seqs {min(2 * most, MAX_SLOTS)} shows it."
        )
    remedy = f"--max-num-seqs {min(4, most - 1)}" if most > 1 else "--background 6 --max-num-seqs 4"
    return (
        f"At most {most} requests were open and the batch has {slots} slots, so every recipe ran the same batch and "
        "they tie. Scheduling helps while more requests are open than the batch or the KV cache holds; "
        f"{remedy} shows it."
    )


def headline(outcomes: Sequence[Outcome]) -> str:
    medians = [(outcome.name, outcome.chat["ttft_s"]["p50"]) for outcome in outcomes]
    return "A chat's first token (median): " + ", ".join(
        f"{name} {'none' if s is None else f'{s:.2f} s'}" for name, s in medians
    )
