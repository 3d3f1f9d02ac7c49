from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from skipjoin.observe.metric_definition import CLASSES, Metric
from skipjoin.observe.metric_snapshot import Snapshot
from skipjoin.observe.metric_table import API_METRICS, ENGINE_METRICS, HTTP_STATUSES, OTHER_STATUS
from skipjoin.observe.metrics import Histogram
from skipjoin.server.engines.messages import Ready
from skipjoin.system.machine import resident_bytes


class Metrics(Collector):
    """Prometheus metrics of one server, with `compat="vllm"` also under vLLM's names."""

    def __init__(self, compat: str = "none") -> None:
        self._in_vllm = compat == "vllm"
        self._engine = Snapshot.zero()
        self._metrics = {metric.name: metric for metric in API_METRICS}
        self._rows = {metric.name: metric.zero() for metric in API_METRICS}
        self._model = ""
        self._config: dict[str, str] | None = None
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def count(self, name: str, value: str = "", n: float = 1) -> None:
        """Add to a counter. `value` is that of its label."""
        self._rows[name][self._metrics[name].values.index(value) if value else 0] += n

    def observe(self, name: str, value: float) -> None:
        Histogram(self._metrics[name].buckets, self._rows[name]).observe(value)

    def set(self, name: str, number: float) -> None:
        self._rows[name][0] = number

    def set_each(self, name: str, numbers: Mapping[str, float]) -> None:
        """Set a gauge by the values of its label, 0 for those without a number."""
        self._rows[name][:] = [numbers.get(value, 0) for value in self._metrics[name].values]

    def responded(self, status: int) -> None:
        self.count("http_responses_total", str(status) if str(status) in HTTP_STATUSES else OTHER_STATUS)

    def ready(self, info: Ready, model: str) -> None:
        self._model = model
        self._config = {
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.device_blocks),
            "num_cpu_blocks": str(info.cpu_blocks),
            "swap_dtype": info.swap_dtype,
            "recipe": info.recipe,
        }

    def engine(self, snapshot: Snapshot) -> None:
        self._engine = snapshot

    def collect(self) -> Iterator[Family]:
        self.set("api_resident_memory_bytes", resident_bytes())
        numbers = [
            *zip(ENGINE_METRICS, self._engine.rows, strict=True),
            *zip(API_METRICS, self._rows.values(), strict=True),
        ]
        yield from _families("skipjoin", numbers, {})
        if self._config is not None:
            yield InfoMetricFamily("skipjoin:cache_config", "The KV pool.", self._config)
            if self._in_vllm:
                # vLLM has a label for its data-parallel engines; here all are aggregated.
                labels = {"model_name": self._model, "engine": "0"}
                theirs = [metric.as_in_vllm(row) for metric, row in numbers if metric.in_vllm]
                yield from _families("vllm", theirs, labels)
                yield InfoMetricFamily("vllm:cache_config", "The KV pool.", {**labels, **self._config})

    def render(self) -> bytes:
        return generate_latest(self._registry)


def _families(
    prefix: str, numbers: Iterable[tuple[Metric, Sequence[float]]], labels: dict[str, str]
) -> Iterator[Family]:
    for metric, row in numbers:
        names = [*labels, *(["class"] if metric.by_class else []), *([metric.label] if metric.label else [])]
        family = _KINDS[metric.kind](f"{prefix}:{metric.name}", metric.help, labels=names)
        common = list(labels.values())
        if not metric.by_class:
            _add_samples(family, metric, row, common)
        else:
            for name, part in zip(CLASSES, metric.per_class(row), strict=True):
                _add_samples(family, metric, part, [*common, name])
        yield family


_KINDS = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily}


def _add_samples(family: Any, metric: Metric, row: Sequence[float], common: list[str]) -> None:
    if metric.kind == "histogram":
        bounds = [*map(floatToGoString, metric.buckets), "+Inf"]
        family.add_metric(common, list(zip(bounds, accumulate(row[:-1]), strict=True)), row[-1])
        return
    for value, number in zip(metric.values or (None,), row, strict=True):
        family.add_metric([*common, *([] if value is None else [value])], number)
