from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from skipjoin.observe.metric_table import ENGINE_INDEX, ENGINE_METRICS, engine_metric


class Snapshot(NamedTuple):
    """Metrics of an engine: one row per entry of `ENGINE_METRICS`, as in `Metric.zero`."""

    rows: list[list[float]]

    @classmethod
    def zero(cls) -> Snapshot:
        return cls([metric.zero() for metric in ENGINE_METRICS])

    def row(self, name: str) -> list[float]:
        return self.rows[ENGINE_INDEX[name]]

    def summed(self, name: str) -> list[float]:
        return engine_metric(name).summed(self.row(name))

    def at_rest(self) -> Snapshot:
        """Return a copy for an engine that is gone: gauges are zero, counters stay."""
        pairs = zip(ENGINE_METRICS, self.rows, strict=True)
        return Snapshot([metric.zero() if metric.kind == "gauge" else row for metric, row in pairs])


def merged(live: Sequence[Snapshot], *, gone: Snapshot | None = None) -> Snapshot:
    engines = [*live, *([gone] if gone is not None else [])]
    rows = []
    for index, metric in enumerate(ENGINE_METRICS):
        row = [sum(numbers) for numbers in zip(*(snapshot.rows[index] for snapshot in engines), strict=True)]
        rows.append([number / max(1, len(live)) for number in row] if metric.is_share else row)
    return Snapshot(rows)
