from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from skipjoin.core.decide.scheduler import Scheduler
from skipjoin.core.events import Event, Preempted, Preemption
from skipjoin.core.request import Request
from skipjoin.core.waits import WaitReason
from skipjoin.version import VERSION


@dataclass(slots=True)
class Tally:
    """Counts since the engine started, and seconds of planning, vLLM's `schedule`, and the planner's other work.

    `amended` are planned requests that vLLM did not run for lack of room.
    """

    steps: int = 0
    amended: int = 0
    preempted_by_vllm: int = 0
    preempted: Counter[Preemption] = field(default_factory=Counter)
    plan_s: float = 0.0
    vllm_s: float = 0.0
    update_s: float = 0.0
    other_s: float = 0.0

    def take(self, events: list[Event]) -> list[Request]:
        """Count the events and clear them. Return the requests whose KV the plan drops."""
        dropped = []
        for event in events:
            if isinstance(event, Preempted):
                self.preempted[event.how] += 1
                if event.how is Preemption.DROP:
                    dropped.append(event.request)
        events.clear()
        return dropped

    def described(self) -> str:
        per_step = 1e6 / max(1, self.steps)
        return (
            f"{self.steps} steps, {self.preempted[Preemption.PAUSE]} requests paused, "
            f"{self.preempted[Preemption.SWAP]} moved to CPU memory, {self.preempted[Preemption.DROP]} dropped, "
            f"{self.preempted_by_vllm} preempted by vLLM, "
            f"{self.amended} without room; microseconds per step: plan {self.plan_s * per_step:.0f}, "
            f"vLLM {self.vllm_s * per_step:.0f}, update {self.update_s * per_step:.0f}, "
            f"other {self.other_s * per_step:.0f}"
        )


class EngineCollector(Collector):
    """Collector that reads the counts on each scrape, so that steps do no work for it."""

    def __init__(
        self, core: Scheduler, mirrors: Mapping[str, Request], tally: Tally, *, recipe: str, vllm_version: str
    ) -> None:
        self._core, self._mirrors, self._tally = core, mirrors, tally
        self._info = {"recipe": recipe, "version": VERSION, "vllm": vllm_version}

    def collect(self) -> Iterator[Metric]:
        core, tally = self._core, self._tally
        waits: Counter[WaitReason] = Counter()
        running = parked = on_cpu = 0
        for request in list(self._mirrors.values()):
            if request.progress.in_flight or request.progress.last_plan >= core.latest_plan:
                running += 1
                continue
            waits[core.waits.get(request, core.tail).reason] += 1
            held = core.kv.blocks_of(request)
            on_cpu += held is not None and held.swapped_out > 0
            parked += held is not None and not held.swapped_out
        yield InfoMetricFamily("skipjoin:scheduler", "Scheduler of this engine.", self._info)
        yield GaugeMetricFamily("skipjoin:num_requests_running", "Requests in the running batch.", running)
        yield GaugeMetricFamily("skipjoin:num_requests_parked", "Waiting requests with KV on the device.", parked)
        yield GaugeMetricFamily("skipjoin:num_requests_on_cpu", "Waiting requests with KV on the CPU tier.", on_cpu)
        family = GaugeMetricFamily("skipjoin:num_requests_waiting", "Waiting requests by reason.", labels=["reason"])
        for reason in WaitReason:
            family.add_metric([reason.value], waits[reason])
        yield family
        preempted = CounterMetricFamily("skipjoin:preemptions", "Preempted requests by kind.", labels=["kind"])
        for how in Preemption:
            preempted.add_metric([how.name.lower()], tally.preempted[how])
        preempted.add_metric(["by_vllm"], tally.preempted_by_vllm)
        yield preempted
        yield CounterMetricFamily("skipjoin:steps", "Scheduled steps.", tally.steps)
        yield CounterMetricFamily("skipjoin:amended_requests", "Planned requests without room.", tally.amended)
        seconds = CounterMetricFamily("skipjoin:scheduler_seconds", "Scheduling time by part.", labels=["part"])
        for part in ("plan", "vllm", "update", "other"):
            seconds.add_metric([part], getattr(tally, f"{part}_s"))
        yield seconds
        forecast = GaugeMetricFamily("skipjoin:forecast_tokens", "Mean forecast of live requests by source.")
        forecasts = [mirror.progress.forecast for mirror in list(self._mirrors.values())]
        told = [expected for expected in forecasts if expected is not None]
        forecast.add_metric([], sum(expected.tokens for expected in told) / len(told) if told else 0.0)
        yield forecast
