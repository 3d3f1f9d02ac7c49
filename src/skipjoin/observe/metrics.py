"""What Prometheus reads of an engine, folded from core events: the table of all metrics, and what counts them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple

from skipjoin.core.events import (
    Admitted,
    Arrived,
    Computed,
    Event,
    Finished,
    Moved,
    Planned,
    Preempted,
    Preemption,
    Restarted,
    Started,
)
from skipjoin.core.request import FinishReason, Request, ServiceClass
from skipjoin.core.step import Direction
from skipjoin.observe.requests import RequestFacts, RequestLog
from skipjoin.observe.stages import StageUse
from skipjoin.observe.usage import EngineUsage
from skipjoin.observe.waits import REASONS


class Metric(NamedTuple):
    """One line of the table.

    label, values: its label, if it has one, and all values of that. by_class: it has the label `class` besides, with
    the values `CLASSES`; vLLM has the sum over them. buckets: upper bounds of a histogram, ascending. in_vllm: whether
    vLLM has it, under the same name and with the same meaning. vllm_sum: vLLM has it without the label, as the sum over
    these values. is_share: of several engines the mean counts, not the sum.
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
        """Numbers of one class, or of all where it has no classes."""
        return len(self.buckets) + 2 if self.kind == "histogram" else max(1, len(self.values))

    def zero(self) -> list[float]:
        """Its numbers before anything happened: one per label value; of a histogram the counts of its buckets and
        of what lies above them, then the sum. With classes, all of that for each class, in the order of `CLASSES`."""
        return [0] * (self.width * (len(CLASSES) if self.by_class else 1))

    def per_class(self, row: Sequence[float]) -> list[Sequence[float]]:
        """The numbers of each class; of all requests where it has no classes."""
        return [row[start : start + self.width] for start in range(0, len(row), self.width)]

    def summed(self, row: Sequence[float]) -> list[float]:
        """The numbers of all classes together."""
        return [sum(numbers) for numbers in zip(*self.per_class(row), strict=True)]

    def as_in_vllm(self, row: Sequence[float]) -> tuple[Metric, Sequence[float]]:
        """The metric and its numbers as vLLM has them."""
        row, plain = self.summed(row), self._replace(by_class=False)
        if not self.vllm_sum:
            return plain, row
        total = sum(row[self.values.index(value)] for value in self.vllm_sum)
        return plain._replace(label="", values=()), [total]


# From a token on a fast device to a request that waited for minutes.
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
_LENGTHS = tuple(float(1 << n) for n in (0, 2, 4, 6, *range(7, 18)))
_BATCH = tuple(float(1 << n) for n in (0, *range(3, 15)))
_FORECAST_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.1, 1.0)
_ANSWER_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_OCTAVES = (0.125, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
_REASONS = tuple(reason.value for reason in FinishReason)
_HOW = tuple(how.name.lower() for how in Preemption)
_PROACTIVE = ("false", "true")
_TIERS = ("device",)
# The index is `is_best_effort`.
CLASSES = (ServiceClass.REAL_TIME.value, ServiceClass.BEST_EFFORT.value)
# What makes forecasts of output lengths, as `Forecast.source` says.
FORECAST_SOURCES = ("prior", "learnt", "alise-similar", "alise-mlp", "url")
# States of a batch's lines, and of batches, as the API names them.
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
# What becomes of a question to the server that forecasts; unneeded: its request ended first.
FORECAST_OUTCOMES = ("answered", "timeout", "error", "nonsense", "skipped", "unneeded")
_OBJECTIVES = ("ttft", "tpot", "jct")
# Statuses of answers that are counted by themselves, and what the others count as; 499: the client has left.
OTHER_STATUS = "other"
HTTP_STATUSES = (
    *("200", "400", "401", "403", "404", "405", "408", "409", "413", "415", "429", "431", "499", "500", "503"),
    OTHER_STATUS,
)
# Why the server refused a connection or ended it: there were too many, so that it was not taken or made way for a new
# one; the client took too long to send, sent what is no HTTP, or took too long to read.
CONNECTION_REFUSALS = ("no_room", "idle", "late", "invalid", "slow_reader")

ENGINE_METRICS = (
    Metric("num_requests_running", "gauge", "Requests in the running batch.", by_class=True),
    Metric("num_requests_waiting", "gauge", "Requests that are not running, preempted ones included.", by_class=True),
    Metric("batch_cap", "gauge", "Up to how many requests a step takes best-effort ones now.", in_vllm=False),
    Metric("num_requests_swapped", "gauge", "Waiting requests with KV on the host.", in_vllm=False),
    Metric("kv_compressed_bytes", "gauge", "KV on the host as 8-bit codes, as stored.", in_vllm=False),
    Metric("kv_cache_usage_perc", "gauge", "Share of the device's KV blocks that are not free, 0 to 1.", is_share=True),
    Metric("kv_cached_blocks", "gauge", "Free KV blocks of the device whose KV later prompts may use.", in_vllm=False),
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
        "num_preemptions_total",
        "counter",
        "Times a request had to make way, by what became of its KV: kept, moved to the host in part or whole, dropped.",
        "how",
        _HOW,
        # A request whose KV stays where it is has no counterpart there.
        vllm_sum=("spill", "swap", "drop"),
        by_class=True,
    ),
    Metric("prompt_tokens_total", "counter", "Prompt tokens of requests that got their first token."),
    Metric("generation_tokens_total", "counter", "Tokens generated.", by_class=True),
    Metric(
        "request_success_total", "counter", "Requests that ended, by why.", "finished_reason", _REASONS, by_class=True
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
        _OBJECTIVES,
        in_vllm=False,
        by_class=True,
    ),
    Metric(
        "slo_missed_total",
        "counter",
        "Soft objectives of requests that were missed, by objective.",
        "slo",
        _OBJECTIVES,
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

# Why a request is not tried again: no engine will come, none came in time, or engines died while it ran.
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


class Snapshot(NamedTuple):
    """An engine's metrics at one moment. rows: as `Metric.zero`, for each of `ENGINE_METRICS`."""

    rows: list[list[float]]

    @classmethod
    def zero(cls) -> Snapshot:
        """Before anything happened."""
        return cls([metric.zero() for metric in ENGINE_METRICS])

    def row(self, name: str) -> list[float]:
        """The numbers of one metric."""
        return self.rows[_INDEX[name]]

    def summed(self, name: str) -> list[float]:
        """The numbers of one metric, of all classes together."""
        return ENGINE_METRICS[_INDEX[name]].summed(self.row(name))

    def at_rest(self) -> Snapshot:
        """The same of an engine that is gone: nothing runs, what was counted stays."""
        pairs = zip(ENGINE_METRICS, self.rows, strict=True)
        return Snapshot([metric.zero() if metric.kind == "gauge" else row for metric, row in pairs])


def merged(live: Sequence[Snapshot], *, gone: Snapshot | None = None) -> Snapshot:
    """Of several engines together. gone: what those counted that are there no more."""
    engines = [*live, *([gone] if gone is not None else [])]
    rows = []
    for index, metric in enumerate(ENGINE_METRICS):
        row = [sum(numbers) for numbers in zip(*(snapshot.rows[index] for snapshot in engines), strict=True)]
        rows.append([number / max(1, len(live)) for number in row] if metric.is_share else row)
    return Snapshot(rows)


class Histogram:
    """Counts values into a row of numbers."""

    __slots__ = ("_bounds", "_row")

    def __init__(self, bounds: Sequence[float], row: list[float]) -> None:
        self._bounds = bounds
        self._row = row

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value; a bucket's bound belongs to it."""
        self._row[bisect_left(self._bounds, value)] += times
        self._row[-1] += value * times


class _ClassCounts:
    """What is counted of the requests of one class. rows: as of one class in `Metric.zero`, by name."""

    def __init__(self) -> None:
        rows = self.rows = {metric.name: [0.0] * metric.width for metric in ENGINE_METRICS if metric.by_class}
        self._generated = rows["generation_tokens_total"]
        self._success = rows["request_success_total"]
        self._preemptions = rows["num_preemptions_total"]
        self._objectives = {True: rows["slo_attained_total"], False: rows["slo_missed_total"]}
        self._ttft, self._between, self._tpot, self._e2e, self._queue = (
            Histogram(ENGINE_METRICS[_INDEX[name]].buckets, rows[name])
            for name in (
                "time_to_first_token_seconds",
                "inter_token_latency_seconds",
                "request_time_per_output_token_seconds",
                "e2e_request_latency_seconds",
                "request_queue_time_seconds",
            )
        )

    def first(self, facts: RequestFacts) -> None:
        """A request got its first token here."""
        self._generated[0] += 1
        if facts.earlier_tokens:  # another engine has counted what follows
            return
        assert facts.first_token is not None
        ttft = facts.ttft(facts.first_token)
        self._ttft.observe(ttft)
        self._judge("ttft", ttft, facts.target.ttft_s)

    def next(self, gap: float, times: int) -> None:
        """So many tokens came, each of them `gap` seconds after its request's token before."""
        self._generated[0] += times
        self._between.observe(gap, times)

    def preempted(self, how: Preemption) -> None:
        """A request had to make way."""
        self._preemptions[_HOW.index(how.name.lower())] += 1

    def ended(self, facts: RequestFacts, now: float) -> None:
        """A request ended now."""
        assert facts.reason is not None
        self._success[_REASONS.index(facts.reason)] += 1
        self._e2e.observe(facts.jct(now))
        self._judge_end(facts, now)
        if facts.earlier_tokens:  # no engine saw all of the others
            return
        self._queue.observe(facts.queue(now))
        if (tpot := facts.tpot(now)) is not None:
            self._tpot.observe(tpot)

    def _judge_end(self, facts: RequestFacts, now: float) -> None:
        """Count the objectives that the end of a request decides. What did not come is missed; of a request that was
        aborted only if it was late by then."""
        target = facts.target
        if facts.is_complete:
            self._judge("jct", facts.jct(now), target.jct_s)
            if not facts.earlier_tokens and (tpot := facts.tpot(now)) is not None:
                self._judge("tpot", tpot, target.tpot_s)
            return
        is_aborted = facts.reason == FinishReason.ABORT.value
        waited_s = facts.jct(now) if is_aborted else math.inf
        missing = {"jct": target.jct_s}
        if facts.first_token is None and not facts.earlier_tokens:
            missing["ttft"] = target.ttft_s
        if not is_aborted:
            missing["tpot"] = target.tpot_s
        for objective, bound_s in missing.items():
            if waited_s > bound_s:
                self._judge(objective, waited_s, bound_s)

    def _judge(self, objective: str, seconds: float, bound_s: float) -> None:
        if bound_s < math.inf:
            self._objectives[seconds <= bound_s][_OBJECTIVES.index(objective)] += 1


class EngineMetrics:
    """Counts what core events tell; what it counts of requests and KV is what `RequestLog` and `EngineUsage` say.

    device_blocks, block_size: the KV pool. block_bytes: of one block on the host, all layers; is_compressed: whether it
    holds codes there. resident_bytes: reads the memory of the engine's process.
    """

    def __init__(
        self,
        *,
        device_blocks: int,
        block_size: int,
        block_bytes: int,
        is_compressed: bool = False,
        resident_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self._resident_bytes = resident_bytes
        self._device_blocks = device_blocks
        self._block_size = block_size
        self._block_bytes = block_bytes
        self._compressed_bytes = block_bytes if is_compressed else 0
        self._rows = {metric.name: metric.zero() for metric in ENGINE_METRICS if not metric.by_class}
        self._classes = tuple(_ClassCounts() for _ in CLASSES)
        self._gaps: list[tuple[float, bool]] = []  # between tokens, of the events at hand
        self._log = RequestLog(self._ended, on_first=self._got_first, on_gap=self._gaps.append)
        self._usage = EngineUsage(device_blocks=device_blocks, block_size=block_size, block_bytes=block_bytes)
        self._stages = StageUse()
        self._live: set[Request] = set()
        self._new: set[Request] = set()  # those that were not admitted yet
        self._running: set[Request] = set()
        self._on_host: dict[Request, int] = {}  # blocks
        self._in_flight = 0
        self._held = 0
        self._now = 0.0  # when something happened last
        self._handlers: dict[type, Callable[[Any], None]] = {
            Admitted: self._admit,
            Arrived: self._arrive,
            Started: self._start,
            Preempted: self._preempt,
            Planned: self._plan,
            Computed: self._compute,
            Moved: self._move,
            Finished: self._forget,
            Restarted: self._restart,
        }

        rows = self._rows
        self._stall = rows["swap_stall_seconds_total"]
        self._prompt_tokens = rows["prompt_tokens_total"]
        self._late = rows["deadline_dropped_total"]
        self._restarts = rows["engine_restarts_total"]
        self._swapped = {
            Direction.OUT: rows["swap_out_bytes_total"],
            Direction.IN: rows["swap_in_bytes_total"],
        }
        self._prefill = self._histogram("request_prefill_time_seconds")
        self._decode = self._histogram("request_decode_time_seconds")
        self._inference = self._histogram("request_inference_time_seconds")
        self._prompt_length = self._histogram("request_prompt_tokens")
        self._output_length = self._histogram("request_generation_tokens")
        self._output_limit = self._histogram("request_params_max_tokens")
        self._batch = self._histogram("iteration_tokens_total")

    def observe(self, events: Iterable[Event]) -> None:
        """Take what happened, in order."""
        events = tuple(events)
        for event in events:
            if (handle := self._handlers.get(type(event))) is not None:
                handle(event)
        self._log.observe(events)
        self._usage.observe(events)
        self._stages.observe(events)
        if gaps := self._gaps:
            # The tokens of a step come together, and so did most of the tokens before them.
            for (gap, is_best_effort), count in Counter(gaps).items():
                self._classes[is_best_effort].next(gap, count)
            gaps.clear()

    def shares(self, *, cached: int, shared: int, lent: int) -> None:
        """Take how many device blocks are free and cached, how many have several holders, and in how many of those each
        has slots of its own, which no event tells."""
        self._rows["kv_cached_blocks"][0] = cached
        self._rows["kv_shared_blocks"][0] = shared
        self._rows["kv_lent_blocks"][0] = lent

    def recovered(self, blocks: int) -> None:
        """Count blocks that nothing accounted for."""
        self._rows["kv_blocks_recovered_total"][0] += blocks

    def snapshot(self) -> Snapshot:
        """The numbers as of now; they change no more."""
        rows = self._rows
        # Between stages a request may be chosen without an event until its step ends: the counters do not fall then.
        waits = rows["wait_seconds_total"]
        waits[:] = map(max, waits, self._log.waits.totals(self._now))
        rows["engine_steps_total"][0] = self._usage.steps
        rows["recomputed_tokens_total"][0] = self._usage.recomputed_tokens
        ends = self._usage.shared_ends
        rows["kv_checkpointed_slots_total"][0] = ends.slots
        rows["kv_checkpointed_bytes_total"][0] = ends.slots * self._block_bytes / self._block_size
        rows["kv_restores_total"][0] = ends.restores
        rows["stage_busy_seconds_total"][0] = sum(self._stages.busy)
        rows["stage_idle_seconds_total"][0] = sum(self._stages.idle)
        rows["engine_resident_memory_bytes"][0] = self._resident_bytes()
        rows["num_requests_swapped"][0] = len(self._on_host)
        rows["kv_compressed_bytes"][0] = self._compressed_bytes * sum(self._on_host.values())
        # No event tells of blocks that come home after the last step.
        is_busy = self._live or self._in_flight
        rows["kv_cache_usage_perc"][0] = self._held / self._device_blocks if is_busy else 0
        self._count_requests()
        return Snapshot([self._numbers(metric) for metric in ENGINE_METRICS])

    def _count_requests(self) -> None:
        for index, counts in enumerate(self._classes):
            running = sum(request.is_best_effort == index for request in self._running)
            live = sum(request.is_best_effort == index for request in self._live)
            counts.rows["num_requests_running"][0] = running
            counts.rows["num_requests_waiting"][0] = live - running

    def _numbers(self, metric: Metric) -> list[float]:
        if not metric.by_class:
            return self._rows[metric.name].copy()
        return list(chain.from_iterable(counts.rows[metric.name] for counts in self._classes))

    def _histogram(self, name: str) -> Histogram:
        return Histogram(ENGINE_METRICS[_INDEX[name]].buckets, self._rows[name])

    # -- steps --------------------------------------------------------------------------------------------

    def _plan(self, event: Planned) -> None:
        self._in_flight += 1
        self._held = event.held
        self._rows["batch_cap"][0] = event.cap
        self._now = event.now

    def _compute(self, event: Computed) -> None:
        result = event.result
        plan = result.plan
        self._in_flight -= 1
        self._now = event.now
        if plan.blocking:  # what an executor measures for no copies is noise
            self._stall[0] += result.moving
        if plan.slices:
            self._batch.observe(sum(piece.tokens for piece in plan.slices))
        for proactive, moves in enumerate((plan.blocking, plan.overlapped)):
            for move in moves:
                if (row := self._swapped.get(move.direction)) is not None:
                    row[proactive] += round(move.blocks(self._block_size) * self._block_bytes)

    def _restart(self, event: Restarted) -> None:
        self._restarts[0] += 1
        self._in_flight = self._held = 0
        self._on_host.clear()

    def _move(self, event: Moved) -> None:
        move = event.move
        if move.direction is Direction.IN:
            self._on_host.pop(move.request, None)
        elif move.request in self._live:
            self._on_host[move.request] = self._on_host.get(move.request, 0) + len(move.target)

    def _arrive(self, event: Arrived) -> None:
        self._live.add(event.request)
        self._new.add(event.request)
        self._now = event.now

    def _admit(self, event: Admitted) -> None:
        request = event.request
        if request not in self._new:
            return
        self._new.remove(request)
        if request.prefix is not None and not request.resumed_tokens:  # else another engine has counted them
            self._rows["prefix_cache_queries_total"][0] += len(request.prompt)
            self._rows["prefix_cache_hits_total"][0] += event.cached

    def _start(self, event: Started) -> None:
        self._running.add(event.request)
        self._on_host.pop(event.request, None)  # its KV comes back before it runs

    def _preempt(self, event: Preempted) -> None:
        self._running.discard(event.request)
        self._classes[event.request.is_best_effort].preempted(event.how)
        if event.how is Preemption.DROP:
            self._on_host.pop(event.request, None)

    def _forget(self, event: Finished) -> None:
        request = event.request
        self._now = event.now
        self._live.discard(request)
        self._new.discard(request)
        self._running.discard(request)
        self._on_host.pop(request, None)

    # -- requests -----------------------------------------------------------------------------------------

    def _got_first(self, facts: RequestFacts) -> None:
        self._classes[facts.is_best_effort].first(facts)
        if not facts.earlier_tokens:  # else another engine has counted them
            self._prompt_tokens[0] += facts.prompt_tokens

    def _ended(self, facts: RequestFacts) -> None:
        assert facts.ended is not None
        now = facts.ended
        self._classes[facts.is_best_effort].ended(facts, now)
        self._late[0] += facts.reason == FinishReason.DEADLINE.value
        self._prompt_length.observe(facts.prompt_tokens)
        self._output_length.observe(facts.output_tokens)
        self._output_limit.observe(facts.output_limit)
        if facts.earlier_tokens:  # no engine saw all of the others
            return
        for histogram, value in (
            (self._prefill, facts.prefill(now)),
            (self._decode, facts.decode()),
            (self._inference, facts.inference()),
        ):
            if value is not None:
                histogram.observe(value)
