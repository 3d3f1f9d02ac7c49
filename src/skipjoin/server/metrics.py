from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from skipjoin.core.forecast import Forecast
from skipjoin.engine.forecasting import Predicted
from skipjoin.observe.metric_definition import CLASSES, Metric
from skipjoin.observe.metric_snapshot import Snapshot
from skipjoin.observe.metric_table import (
    API_METRICS,
    BATCH_ENDS,
    BATCH_OPEN,
    BATCH_STATUSES,
    CONNECTION_REFUSALS,
    ENGINE_METRICS,
    FORECAST_OUTCOMES,
    FORECAST_SOURCES,
    HTTP_STATUSES,
    LOSSES,
    OTHER_STATUS,
)
from skipjoin.observe.metrics import Histogram
from skipjoin.server.engines.messages import Ready
from skipjoin.system.machine import resident_bytes


class Metrics(Collector):
    """Prometheus metrics of one server. `compat="vllm"` also exports metrics under vLLM's names."""

    def __init__(self, compat: str = "none") -> None:
        self._in_vllm = compat == "vllm"
        self._engine = Snapshot.zero()
        self._api = [metric.zero() for metric in API_METRICS]
        rows = {metric.name: (metric, row) for metric, row in zip(API_METRICS, self._api, strict=True)}
        rejected, self._refusals = rows["admission_rejected_total"]
        self._rejected = dict(zip(rejected.values, range(len(rejected.values)), strict=True))
        self._statuses = rows["http_responses_total"][1]
        self._connections = rows["connections_refused_total"][1]
        self._resident_bytes = rows["api_resident_memory_bytes"][1]
        choices, row = rows["request_params_n"]
        self._choices = Histogram(choices.buckets, row)
        longest, row = rows["request_max_num_generation_tokens"]
        self._longest = Histogram(longest.buckets, row)
        self._replicas = [rows[f"replica{name}"][1] for name in ("s", "s_alive", "_restarts_total")]
        self._moved = rows["requests_moved_total"][1]
        self._lost = rows["requests_lost_total"][1]
        self._forecasts, self._late = rows["forecasts_total"][1], rows["forecasts_late_total"][1]
        self._learned, self._entries = rows["forecasts_learned_total"][1], rows["forecast_index_entries"][1]
        self._batch_lines, self._batches = rows["batch_lines"][1], rows["batches"][1]
        self._batch_ends, self._batch_tokens, self._requeued = (
            rows[f"batch_{name}_total"][1] for name in ("lines_ended", "generation_tokens", "lines_requeued")
        )
        self._interval, self._outcomes = rows["forecast_interval_total"][1], rows["forecast_url_total"][1]
        self._forecast_s, self._answer_s, self._forecast_error, self._forecast_octaves = (
            Histogram(rows[name][0].buckets, rows[name][1])
            for name in ("forecast_seconds", "forecast_url_seconds", "forecast_error_tokens", "forecast_error_octaves")
        )
        self._model = ""
        self._config: dict[str, str] | None = None
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def responded(self, status: int) -> None:
        name = str(status)
        self._statuses[HTTP_STATUSES.index(name if name in HTTP_STATUSES else OTHER_STATUS)] += 1

    def connection_refused(self, reason: str) -> None:
        self._connections[CONNECTION_REFUSALS.index(reason)] += 1

    def rejected(self, reason: str) -> None:
        self._refusals[self._rejected[reason]] += 1

    def choices(self, n: int) -> None:
        self._choices.observe(n)

    def longest(self, tokens: int) -> None:
        """Count the output length of a prompt's longest choice."""
        self._longest.observe(tokens)

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

    def replicas(self, wanted: int, alive: int, restarts: int) -> None:
        for row, number in zip(self._replicas, (wanted, alive, restarts), strict=True):
            row[0] = number

    def moved(self, requests: int) -> None:
        self._moved[0] += requests

    def lost(self, reason: str, requests: int = 1) -> None:
        self._lost[LOSSES.index(reason)] += requests

    def forecast(self, forecast: Forecast, seconds: float) -> None:
        self._count_source(forecast)
        self._forecast_s.observe(seconds)

    def forecast_unready(self, forecast: Forecast, *, is_late: bool) -> None:
        if is_late:
            self._late[0] += 1
        else:
            self._count_source(forecast)

    def answered(self, forecast: Forecast, seconds: float) -> None:
        self._count_source(forecast)
        self._answer_s.observe(seconds)
        self.asked("answered")

    def asked(self, outcome: str) -> None:
        self._outcomes[FORECAST_OUTCOMES.index(outcome)] += 1

    def batch_tokens(self, tokens: int) -> None:
        self._batch_tokens[0] += tokens

    def batch_requeued(self) -> None:
        self._requeued[0] += 1

    def batch_ended(self, state: str, lines: int = 1) -> None:
        self._batch_ends[BATCH_ENDS.index(state)] += lines

    def batches(self, lines: Mapping[str, int], batches: Mapping[str, int]) -> None:
        self._batch_lines[:] = [lines.get(state, 0) for state in BATCH_OPEN]
        self._batches[:] = [batches.get(status, 0) for status in BATCH_STATUSES]

    def indexed(self, entries: int) -> None:
        self._entries[0] = entries

    def learned(self, predicted: Predicted, revised: Forecast | None, tokens: int, *, exact: bool) -> None:
        self._learned[not exact] += 1
        if exact or tokens >= predicted.most:
            expected = (revised or predicted.forecast).tokens
            self._forecast_error.observe(abs(expected - tokens))
            self._forecast_octaves.observe(abs(math.log2(expected / tokens)))
            if revised is None:
                low, high = predicted.interval
                self._interval[0 if tokens < low else 1 if tokens <= high else 2] += 1

    def _count_source(self, forecast: Forecast) -> None:
        self._forecasts[FORECAST_SOURCES.index(forecast.source)] += 1

    def collect(self) -> Iterator[Family]:
        self._resident_bytes[0] = resident_bytes()
        numbers = [*zip(ENGINE_METRICS, self._engine.rows, strict=True), *zip(API_METRICS, self._api, strict=True)]
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
