"""All Prometheus metrics of the engines and of the API process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from skipjoin.core.events import Preemption
from skipjoin.core.request import FinishReason, ServiceClass
from skipjoin.observe.waits import REASONS


class Metric(NamedTuple):
    """Definition of one metric.

    Attributes:
        label: Name of the label, or empty.
        values: All values of the label.
        buckets: Ascending upper bounds of a histogram.
        in_vllm: True if vLLM has a metric of this name and meaning.
        vllm_sum: Label values whose sum is vLLM's metric, which has no such label.
        is_share: Engines are aggregated by mean instead of sum.
        by_class: The metric has an additional label `class` with the values `CLASSES`; vLLM has the sum over classes.
    """

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    label: str = ""
    values: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    in_vllm: bool = True
    vllm_sum: tuple[str, ...] = ()
    is_share: bool = False
    by_class: bool = False

    @property
    def width(self) -> int:
        """Return the length of one class's row, or of the whole row without classes."""
        return len(self.buckets) + 2 if self.kind == "histogram" else max(1, len(self.values))

    def zero(self) -> list[float]:
        """Return the initial row.

        A row has one number per label value. A histogram has the count of each bucket, the count above the last bucket,
        and the sum. With classes, the rows are concatenated in the order of `CLASSES`.
        """
        return [0] * (self.width * (len(CLASSES) if self.by_class else 1))

    def per_class(self, row: Sequence[float]) -> list[Sequence[float]]:
        """Split a row into one per class."""
        return [row[start : start + self.width] for start in range(0, len(row), self.width)]

    def summed(self, row: Sequence[float]) -> list[float]:
        """Return the row summed over classes."""
        return [sum(numbers) for numbers in zip(*self.per_class(row), strict=True)]

    def as_in_vllm(self, row: Sequence[float]) -> tuple[Metric, Sequence[float]]:
        """Convert the metric and its row to vLLM's form."""
        row, plain = self.summed(row), self._replace(by_class=False)
        if not self.vllm_sum:
            return plain, row
        total = sum(row[self.values.index(value)] for value in self.vllm_sum)
        return plain._replace(label="", values=()), [total]


# Spans one token on a fast device to a request that waits for minutes.
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
_LENGTHS = tuple(float(1 << n) for n in (0, 2, 4, 6, *range(7, 18)))
_BATCH = tuple(float(1 << n) for n in (0, *range(3, 15)))
_FORECAST_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.1, 1.0)
_ANSWER_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_OCTAVES = (0.125, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
FINISH_REASONS = tuple(reason.value for reason in FinishReason)
PREEMPTIONS = tuple(how.name.lower() for how in Preemption)
_PROACTIVE = ("false", "true")
_TIERS = ("device", "host")
# The index is `is_best_effort`.
CLASSES = (ServiceClass.REAL_TIME.value, ServiceClass.BEST_EFFORT.value)
# Values of `Forecast.source`.
FORECAST_SOURCES = ("prior", "learnt", "alise-similar", "alise-mlp", "url")
# States of batch lines and of batches, as in the API.
BATCH_OPEN, BATCH_ENDS = ("ready", "running"), ("done", "failed", "expired", "cancelled")
BATCH_STATUSES = (
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
)
# Outcomes of a call to the prediction server; unneeded: the request finished before the call.
FORECAST_OUTCOMES = ("answered", "timeout", "error", "nonsense", "skipped", "unneeded")
OBJECTIVES = ("ttft", "tpot", "jct")
# Response statuses with their own label value; all others count as OTHER_STATUS. 499: the client disconnected.
OTHER_STATUS = "other"
HTTP_STATUSES = (
    *("200", "400", "401", "403", "404", "405", "408", "409", "413", "415", "429", "431", "499", "500", "503"),
    OTHER_STATUS,
)
# Reasons for refusing or closing a connection. At the connection limit: no_room (refused), idle and share (closed for a
# new one). By the client's fault: late (slow to send), invalid (not HTTP), slow_reader.
CONNECTION_REFUSALS = ("no_room", "idle", "share", "late", "invalid", "slow_reader")

ENGINE_METRICS = (
    Metric("num_requests_running", "gauge", "Requests in the running batch.", by_class=True),
    Metric("num_requests_waiting", "gauge", "Requests that are not running, preempted ones included.", by_class=True),
    Metric("batch_cap", "gauge", "Up to how many requests a step takes best-effort ones now.", in_vllm=False),
    Metric("num_requests_swapped", "gauge", "Waiting requests with KV on the host.", in_vllm=False),
    Metric("kv_compressed_bytes", "gauge", "KV on the host as 8-bit codes, as stored.", in_vllm=False),
    Metric("kv_cache_usage_perc", "gauge", "Share of the device's KV blocks that are not free, 0 to 1.", is_share=True),
    Metric("kv_cached_blocks", "gauge", "Free KV blocks of the device whose KV later prompts may use.", in_vllm=False),
    Metric("kv_host_cached_blocks", "gauge", "The same on the host.", in_vllm=False),
    Metric("kv_shared_blocks", "gauge", "KV blocks of the device that several requests hold.", in_vllm=False),
    Metric("kv_lent_blocks", "gauge", "KV blocks that two requests fill from both ends.", in_vllm=False),
    Metric(
        "kv_checkpointed_slots_total",
        "counter",
        "Tokens whose KV was saved before the other request of their block wrote there.",
        in_vllm=False,
    ),
    Metric("kv_checkpointed_bytes_total", "counter", "Bytes of these.", in_vllm=False),
    Metric("kv_restores_total", "counter", "Times that a request got KV back that was saved so.", in_vllm=False),
    Metric(
        "kv_blocks_recovered_total",
        "counter",
        "KV blocks that nothing accounted for and that were freed; any of them is a bug.",
        in_vllm=False,
    ),
    Metric(
        "prefix_cache_queries_total",
        "counter",
        "Prompt tokens of requests that were admitted and may use the KV of others, counted once.",
    ),
    Metric(
        "prefix_cache_hits_total",
        "counter",
        "Those of them whose KV was there, by where.",
        "tier",
        _TIERS,
        vllm_sum=_TIERS,
    ),
    Metric(
        "prefix_cache_saved_bytes_total",
        "counter",
        "Bytes of KV that were copied to the host before the device lost them, for later prompts.",
        in_vllm=False,
    ),
    Metric(
        "num_preemptions_total",
        "counter",
        "Times a request had to make way, by what became of its KV: kept, moved to the host in part or whole, dropped.",
        "how",
        PREEMPTIONS,
        # vLLM has no preemption that keeps the KV on the device.
        vllm_sum=("spill", "swap", "drop"),
        by_class=True,
    ),
    Metric("prompt_tokens_total", "counter", "Prompt tokens of requests that got their first token."),
    Metric("generation_tokens_total", "counter", "Tokens generated.", by_class=True),
    Metric(
        "request_success_total",
        "counter",
        "Requests that ended, by why.",
        "finished_reason",
        FINISH_REASONS,
        by_class=True,
    ),
    Metric("deadline_dropped_total", "counter", "Requests given up because their time ran out.", in_vllm=False),
    Metric("engine_steps_total", "counter", "Steps.", in_vllm=False),
    Metric("engine_restarts_total", "counter", "Times all ranks were started anew.", in_vllm=False),
    Metric(
        "swap_out_bytes_total",
        "counter",
        "KV copied to the host; proactive: overlapped with steps.",
        "proactive",
        _PROACTIVE,
        in_vllm=False,
    ),
    Metric(
        "swap_in_bytes_total",
        "counter",
        "KV copied back from the host; proactive: overlapped with steps.",
        "proactive",
        _PROACTIVE,
        in_vllm=False,
    ),
    Metric(
        "wait_seconds_total",
        "counter",
        "Time that requests waited, by the reason; of live requests as far as it is known.",
        "reason",
        tuple(REASONS),
        in_vllm=False,
    ),
    Metric("swap_stall_seconds_total", "counter", "Time that steps stood still for copies of KV.", in_vllm=False),
    Metric(
        "stage_busy_seconds_total", "counter", "Time that pipeline stages worked, all stages together.", in_vllm=False
    ),
    Metric(
        "stage_idle_seconds_total",
        "counter",
        "Time that pipeline stages stood still between steps while there were requests, all stages together.",
        in_vllm=False,
    ),
    Metric(
        "slo_attained_total",
        "counter",
        "Soft objectives of requests that were met, by objective.",
        "slo",
        OBJECTIVES,
        in_vllm=False,
        by_class=True,
    ),
    Metric(
        "slo_missed_total",
        "counter",
        "Soft objectives of requests that were missed, by objective.",
        "slo",
        OBJECTIVES,
        in_vllm=False,
        by_class=True,
    ),
    Metric("recomputed_tokens_total", "counter", "Tokens computed again after their KV was dropped.", in_vllm=False),
    Metric(
        "time_to_first_token_seconds", "histogram", "From arrival to the first token.", buckets=_SECONDS, by_class=True
    ),
    Metric(
        "inter_token_latency_seconds",
        "histogram",
        "Between tokens of one request.",
        buckets=_TOKEN_SECONDS,
        by_class=True,
    ),
    Metric(
        "request_time_per_output_token_seconds",
        "histogram",
        "Time per output token after the first, one value per request.",
        buckets=_TOKEN_SECONDS,
        by_class=True,
    ),
    Metric("e2e_request_latency_seconds", "histogram", "From arrival to end.", buckets=_SECONDS, by_class=True),
    Metric(
        "request_queue_time_seconds", "histogram", "From arrival to the first step.", buckets=_SECONDS, by_class=True
    ),
    Metric("request_prefill_time_seconds", "histogram", "From the first step to the first token.", buckets=_SECONDS),
    Metric("request_decode_time_seconds", "histogram", "From the first token to the last.", buckets=_SECONDS),
    Metric("request_inference_time_seconds", "histogram", "From the first step to the last token.", buckets=_SECONDS),
    Metric("request_prompt_tokens", "histogram", "Prompt tokens of a request.", buckets=_LENGTHS),
    Metric("request_generation_tokens", "histogram", "Tokens generated for a request.", buckets=_LENGTHS),
    Metric("request_params_max_tokens", "histogram", "Most tokens a request may generate.", buckets=_LENGTHS),
    Metric("iteration_tokens_total", "histogram", "Tokens computed in a step.", buckets=_BATCH),
    Metric("engine_resident_memory_bytes", "gauge", "Memory of the engines' processes that is in RAM.", in_vllm=False),
)
"""What an engine counts. A request counts in histograms over requests when it ends, however it ends."""

# Reasons why a request is not retried: no engine will start, none started in time, or engines died while it ran.
LOSSES = ("engine_dead", "no_replica", "engine_lost")

DOOR_METRICS = (
    Metric(
        "http_responses_total",
        "counter",
        "Answers by their HTTP status; a stream counts by what it begins with.",
        "status",
        HTTP_STATUSES,
        in_vllm=False,
    ),
    Metric(
        "connections_refused_total",
        "counter",
        "Connections that the server refused or ended, by why.",
        "reason",
        CONNECTION_REFUSALS,
        in_vllm=False,
    ),
    Metric("api_resident_memory_bytes", "gauge", "Memory of the API process that is in RAM.", in_vllm=False),
    Metric(
        "admission_rejected_total",
        "counter",
        "Requests refused at the door, by the limit they met.",
        "reason",
        ("requests", "tokens", "draining"),
        in_vllm=False,
    ),
    Metric("request_params_n", "histogram", "Choices that a request asks for.", buckets=(1.0, 2.0, 4.0, 8.0, 16.0)),
    Metric("replicas", "gauge", "Engines that there should be.", in_vllm=False),
    Metric("replicas_alive", "gauge", "Engines that take requests.", in_vllm=False),
    Metric("replica_restarts_total", "counter", "Engines that were started in place of one that died.", in_vllm=False),
    Metric("requests_moved_total", "counter", "Times a request's engine died under it.", in_vllm=False),
    Metric(
        "requests_lost_total",
        "counter",
        "Requests that got an error because engines died, by why they were not tried again.",
        "reason",
        LOSSES,
        in_vllm=False,
    ),
    Metric(
        "forecasts_total",
        "counter",
        "Forecasts of output lengths, by what made them.",
        "source",
        FORECAST_SOURCES,
        in_vllm=False,
    ),
    Metric("forecasts_late_total", "counter", "Forecasts that came after their request was sent.", in_vllm=False),
    Metric("forecast_seconds", "histogram", "To make a forecast.", buckets=_FORECAST_SECONDS, in_vllm=False),
    Metric(
        "forecast_url_total",
        "counter",
        "Questions to the server of --forecast-url, by what became of them.",
        "outcome",
        FORECAST_OUTCOMES,
        in_vllm=False,
    ),
    Metric(
        "forecast_url_seconds",
        "histogram",
        "From a question to that server until its answer.",
        buckets=_ANSWER_SECONDS,
        in_vllm=False,
    ),
    Metric(
        "forecasts_learnt_total",
        "counter",
        "Outputs that were learnt from; censored: they did not end by themselves.",
        "kind",
        ("exact", "censored"),
        in_vllm=False,
    ),
    Metric(
        "forecast_error_tokens",
        "histogram",
        "Distance of the forecast from the output's length; outputs that were cut off are left out.",
        buckets=_LENGTHS,
        in_vllm=False,
    ),
    Metric(
        "forecast_error_octaves",
        "histogram",
        "Distance of the forecast from the output's length, as a power of two, without aborted and expired requests.",
        buckets=_OCTAVES,
        in_vllm=False,
    ),
    Metric(
        "forecast_interval_total",
        "counter",
        "Output lengths by where they lie beside the forecast's 80 % interval, without aborted and expired requests.",
        "place",
        ("below", "inside", "above"),
        in_vllm=False,
    ),
    Metric("forecast_index_entries", "gauge", "Outputs that forecasts are made from.", in_vllm=False),
    Metric("batch_lines", "gauge", "Lines of batches in progress, by state.", "state", BATCH_OPEN, in_vllm=False),
    Metric("batch_lines_ended_total", "counter", "Lines that ended, by how.", "state", BATCH_ENDS, in_vllm=False),
    Metric("batches", "gauge", "Batches, by status.", "status", BATCH_STATUSES, in_vllm=False),
    Metric(
        "batch_generation_tokens_total",
        "counter",
        "Tokens generated for lines of batches; those of a line that runs again count again.",
        in_vllm=False,
    ),
    Metric(
        "batch_lines_requeued_total",
        "counter",
        "Times a line of a batch was put back to run again, as an engine ended or took no work.",
        in_vllm=False,
    ),
)
"""What only the process that speaks to clients knows."""

_INDEX = {metric.name: index for index, metric in enumerate(ENGINE_METRICS)}


def engine_metric(name: str) -> Metric:
    """Return the engine metric of that name."""
    return ENGINE_METRICS[_INDEX[name]]


class Snapshot(NamedTuple):
    """An engine's metrics at one time: one row per entry of `ENGINE_METRICS`, as in `Metric.zero`."""

    rows: list[list[float]]

    @classmethod
    def zero(cls) -> Snapshot:
        """Return the metrics of a new engine."""
        return cls([metric.zero() for metric in ENGINE_METRICS])

    def row(self, name: str) -> list[float]:
        """Return the row of one metric."""
        return self.rows[_INDEX[name]]

    def summed(self, name: str) -> list[float]:
        """Return the row of one metric, summed over classes."""
        return engine_metric(name).summed(self.row(name))

    def at_rest(self) -> Snapshot:
        """Return a copy for an engine that is gone: gauges are zero, counters stay."""
        pairs = zip(ENGINE_METRICS, self.rows, strict=True)
        return Snapshot([metric.zero() if metric.kind == "gauge" else row for metric, row in pairs])


def merged(live: Sequence[Snapshot], *, gone: Snapshot | None = None) -> Snapshot:
    """Aggregate the metrics of live engines and the counters of engines that are gone."""
    engines = [*live, *([gone] if gone is not None else [])]
    rows = []
    for index, metric in enumerate(ENGINE_METRICS):
        row = [sum(numbers) for numbers in zip(*(snapshot.rows[index] for snapshot in engines), strict=True)]
        rows.append([number / max(1, len(live)) for number in row] if metric.is_share else row)
    return Snapshot(rows)
