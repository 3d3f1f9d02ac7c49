from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from skipjoin.core.request import ServiceClass

# The index is `is_best_effort`.
CLASSES = (ServiceClass.REAL_TIME.value, ServiceClass.BEST_EFFORT.value)


class Metric(NamedTuple):
    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    label: str = ""
    values: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # ascending upper bounds of a histogram
    in_vllm: bool = False  # vLLM has a metric of this name and meaning
    vllm_sum: tuple[str, ...] = ()  # label values whose sum is vLLM's metric, which has no such label
    is_share: bool = False  # engines are aggregated by mean instead of sum
    by_class: bool = False  # there is an additional label `class`, without which vLLM has the sum

    @property
    def width(self) -> int:
        return len(self.buckets) + 2 if self.kind == "histogram" else max(1, len(self.values))

    def zero(self) -> list[float]:
        """Return the initial row: one number per label value, for each of `CLASSES` in turn.

        A histogram has the count of each bucket, the count above the last bucket, and the sum.
        """
        return [0] * (self.width * (len(CLASSES) if self.by_class else 1))

    def per_class(self, row: Sequence[float]) -> list[Sequence[float]]:
        return [row[start : start + self.width] for start in range(0, len(row), self.width)]

    def summed(self, row: Sequence[float]) -> list[float]:
        return [sum(numbers) for numbers in zip(*self.per_class(row), strict=True)]

    def as_in_vllm(self, row: Sequence[float]) -> tuple[Metric, Sequence[float]]:
        row, plain = self.summed(row), self._replace(by_class=False)
        if not self.vllm_sum:
            return plain, row
        total = sum(row[self.values.index(value)] for value in self.vllm_sum)
        return plain._replace(label="", values=()), [total]


def gauge(name: str, help: str, label: str = "", values: tuple[str, ...] = (), **more: Any) -> Metric:
    return Metric(name, "gauge", help, label, values, **more)


def counter(name: str, help: str, label: str = "", values: tuple[str, ...] = (), **more: Any) -> Metric:
    return Metric(name, "counter", help, label, values, **more)


def histogram(name: str, help: str, buckets: tuple[float, ...], **more: Any) -> Metric:
    return Metric(name, "histogram", help, buckets=buckets, **more)
