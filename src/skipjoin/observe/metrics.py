from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from skipjoin.core.events import Arrived, Computed, Event, Finished, Planned, Restarted
from skipjoin.core.request import FinishReason
from skipjoin.core.step import Direction
from skipjoin.observe.metric_definition import CLASSES, Metric
from skipjoin.observe.metric_snapshot import Snapshot
from skipjoin.observe.metric_table import ENGINE_METRICS, FINISH_REASONS, OBJECTIVES, engine_metric
from skipjoin.observe.requests import RequestFacts, RequestLog
from skipjoin.observe.stages import StageUse
from skipjoin.observe.usage import EngineUsage


class Histogram:
    __slots__ = ("_bounds", "_row")

    def __init__(self, bounds: Sequence[float], row: list[float]) -> None:
        self._bounds = bounds
        self._row = row

    def observe(self, value: float, times: int = 1) -> None:
        self._row[bisect_left(self._bounds, value)] += times
        self._row[-1] += value * times


def _histograms(rows: Mapping[str, list[float]]) -> dict[str, Histogram]:
    metrics = map(engine_metric, rows)
    return {
        metric.name: Histogram(metric.buckets, rows[metric.name]) for metric in metrics if metric.kind == "histogram"
    }


class _ClassCounts:
    def __init__(self) -> None:
        rows = self.rows = {metric.name: [0.0] * metric.width for metric in ENGINE_METRICS if metric.by_class}
        self._generated = rows["generation_tokens_total"]
        self._success = rows["request_success_total"]
        self._objectives = {True: rows["slo_attained_total"], False: rows["slo_missed_total"]}
        self._histograms = _histograms(rows)

    def first(self, facts: RequestFacts) -> None:
        self._generated[0] += 1
        if facts.earlier_tokens:  # another engine has counted what follows
            return
        assert facts.first_token is not None
        ttft = facts.ttft(facts.first_token)
        self._histograms["time_to_first_token_seconds"].observe(ttft)
        self._judge("ttft", ttft, facts.target.ttft_s)

    def next(self, gap: float, times: int) -> None:
        self._generated[0] += times
        self._histograms["inter_token_latency_seconds"].observe(gap, times)

    def ended(self, facts: RequestFacts, now: float) -> None:
        assert facts.reason is not None
        self._success[FINISH_REASONS.index(facts.reason)] += 1
        self._histograms["e2e_request_latency_seconds"].observe(facts.jct(now))
        self._histograms["request_preemptions"].observe(facts.preemptions)
        self._judge_end(facts, now)
        if facts.earlier_tokens:  # no single engine observed the other durations
            return
        self._histograms["request_queue_time_seconds"].observe(facts.queue(now))
        if (tpot := facts.tpot(now)) is not None:
            self._histograms["request_time_per_output_token_seconds"].observe(tpot)

    def _judge_end(self, facts: RequestFacts, now: float) -> None:
        """Count objectives that are decided when a request finishes.

        A missing token counts as missed. An aborted request misses only the objectives that had passed by then.
        """
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
            self._objectives[seconds <= bound_s][OBJECTIVES.index(objective)] += 1
            if bound_s > 0 and seconds < math.inf:
                self._histograms[f"slo_{objective}_used_ratio"].observe(seconds / bound_s)


class EngineMetrics:
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
        self._histograms = _histograms(self._rows)
        self._classes = tuple(_ClassCounts() for _ in CLASSES)
        self._gaps: list[tuple[float, bool]] = []  # inter-token latencies of the current `observe` call
        self._log = RequestLog(self._ended, on_first=self._got_first, on_gap=self._gaps.append)
        self._usage = EngineUsage(device_blocks=device_blocks, block_size=block_size, block_bytes=block_bytes)
        self._stages = StageUse()
        self._residency = self._usage.residency
        self._in_flight = 0
        self._held = 0
        self._now = 0.0  # time of the last event
        self._handlers: dict[type, Callable[[Any], None]] = {
            Arrived: self._pass_time,
            Planned: self._plan,
            Computed: self._compute,
            Finished: self._pass_time,
            Restarted: self._restart,
        }

    def observe(self, events: Iterable[Event]) -> None:
        events = tuple(events)
        for event in events:
            if (handle := self._handlers.get(type(event))) is not None:
                handle(event)
        self._log.observe(events)
        self._usage.observe(events)
        self._stages.observe(events)
        if gaps := self._gaps:
            # Most gaps of a step are equal, so counting them first is cheaper.
            for (gap, is_best_effort), count in Counter(gaps).items():
                self._classes[is_best_effort].next(gap, count)
            gaps.clear()

    def measured(self, figures: Mapping[str, Sequence[float]]) -> None:
        for name, values in figures.items():
            self._rows[name][:] = values

    def recovered(self, blocks: int) -> None:
        self._rows["kv_blocks_recovered_total"][0] += blocks

    def snapshot(self) -> Snapshot:
        rows = self._rows
        # With pipeline stages, `Started` may come after the decision and lower the total, but counters must not fall.
        waits = rows["wait_seconds_total"]
        waits[:] = map(max, waits, self._log.waits.totals(self._now))
        rows["engine_steps_total"][0] = self._usage.steps
        rows["recomputed_tokens_total"][0] = self._usage.recomputed_tokens
        ends, reservations = self._usage.shared_ends, self._usage.reservations
        rows["kv_hosted_requests"][0], rows["kv_hosted_blocks"][0] = reservations.nested
        rows["kv_nested_reservations_total"][0] = reservations.hosted
        rows["kv_vacated_reservations_total"][0] = reservations.vacated
        rows["kv_checkpointed_slots_total"][0] = ends.slots
        rows["kv_checkpointed_bytes_total"][0] = ends.slots * self._block_bytes / self._block_size
        rows["kv_restores_total"][0] = ends.restores
        rows["stage_busy_seconds_total"][0] = sum(self._stages.busy)
        rows["stage_idle_seconds_total"][0] = sum(self._stages.idle)
        rows["engine_resident_memory_bytes"][0] = self._resident_bytes()
        self._count_kv()
        # No event reports blocks that are freed after the last step.
        is_busy = self._residency.live or self._in_flight
        rows["kv_cache_usage_perc"][0] = self._held / self._device_blocks if is_busy else 0
        self._count_requests()
        return Snapshot([self._numbers(metric) for metric in ENGINE_METRICS])

    def _count_kv(self) -> None:
        rows, residency, prefixes = self._rows, self._residency, self._residency.prefixes
        rows["num_requests_swapped"][0] = len(residency.cpu_blocks)
        rows["kv_compressed_bytes"][0] = self._compressed_bytes * sum(residency.cpu_blocks.values())
        rows["swap_out_bytes_total"][:] = residency.swapped_bytes[Direction.OUT]
        rows["swap_in_bytes_total"][:] = residency.swapped_bytes[Direction.IN]
        rows["swap_wasted_bytes_total"][0] = residency.wasted_bytes
        rows["prefix_cache_queries_total"][0] = prefixes.queried
        rows["prefix_cache_hits_total"][:] = prefixes.hit - prefixes.hit_on_cpu, prefixes.hit_on_cpu
        rows["prefix_cache_saved_bytes_total"][0] = prefixes.saved_bytes

    def _count_requests(self) -> None:
        residency = self._residency
        for index, counts in enumerate(self._classes):
            running = sum(request.is_best_effort == index for request in residency.running)
            live = sum(request.is_best_effort == index for request in residency.live)
            counts.rows["num_requests_running"][0] = running
            counts.rows["num_requests_waiting"][0] = live - running
            counts.rows["num_preemptions_total"][:] = residency.preemptions[index].values()

    def _numbers(self, metric: Metric) -> list[float]:
        if not metric.by_class:
            return self._rows[metric.name].copy()
        return list(chain.from_iterable(counts.rows[metric.name] for counts in self._classes))

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
        if plan.blocking:  # without copies the measurement is noise
            self._rows["swap_stall_seconds_total"][0] += result.moving
        if plan.slices:
            self._histograms["iteration_tokens_total"].observe(sum(slice_.tokens for slice_ in plan.slices))

    def _restart(self, event: Restarted) -> None:
        self._rows["engine_restarts_total"][0] += 1
        self._in_flight = self._held = 0

    def _pass_time(self, event: Arrived | Finished) -> None:
        self._now = event.now

    # -- requests -----------------------------------------------------------------------------------------

    def _got_first(self, facts: RequestFacts) -> None:
        self._classes[facts.is_best_effort].first(facts)
        if not facts.earlier_tokens:  # else another engine has counted them
            self._rows["prompt_tokens_total"][0] += facts.prompt_tokens

    def _ended(self, facts: RequestFacts) -> None:
        assert facts.ended is not None
        now = facts.ended
        self._classes[facts.is_best_effort].ended(facts, now)
        self._rows["swap_delay_seconds_total"][0] += facts.swapping_s
        self._rows["deadline_dropped_total"][0] += facts.reason == FinishReason.DEADLINE.value
        # No single engine observed the durations of a request that moved.
        has_moved = bool(facts.earlier_tokens)
        for name, value in (
            ("request_prompt_tokens", facts.prompt_tokens),
            ("request_generation_tokens", facts.output_tokens),
            ("request_params_max_tokens", facts.output_limit),
            ("request_prefill_time_seconds", None if has_moved else facts.prefill(now)),
            ("request_decode_time_seconds", None if has_moved else facts.decode()),
            ("request_inference_time_seconds", None if has_moved else facts.inference()),
        ):
            if value is not None:
                self._histograms[name].observe(value)
