"""What Prometheus reads at /metrics. Names follow vLLM's under the prefix `skipjoin:`; labels have few values.

All times are measured in the API process on one monotonic clock, except the queue time, which the engine tells.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest

from skipjoin.core.request import FinishReason
from skipjoin.server.messages import Ready, Stats

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
_LENGTHS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
REJECTIONS = ("requests", "tokens", "draining")


class Metrics:
    """One server's metrics, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._told = Stats(0, 0, 0, 0, 0)

        def name(text: str) -> str:
            return f"skipjoin:{text}"

        registry = self.registry
        self._running = Gauge(name("num_requests_running"), "Requests in the running batch", registry=registry)
        self._waiting = Gauge(name("num_requests_waiting"), "Requests that wait to run", registry=registry)
        self._kv_usage = Gauge(name("kv_cache_usage_perc"), "Share of KV blocks in use, 0 to 1", registry=registry)
        self._config = Info(name("cache_config"), "The KV pool", registry=registry)
        self._preemptions = Counter(name("num_preemptions"), "Preemptions of running requests", registry=registry)
        self._steps = Counter(name("engine_steps"), "Engine steps that brought tokens", registry=registry)
        self._prompt_tokens = Counter(name("prompt_tokens"), "Prompt tokens of ended requests", registry=registry)
        self.generated = Counter(name("generation_tokens"), "Tokens generated", registry=registry)
        success = Counter(name("request_success"), "Requests that ended", ["finished_reason"], registry=registry)
        self._success = {reason.value: success.labels(reason.value) for reason in FinishReason}
        rejected = Counter(name("admission_rejected"), "Requests refused at the door", ["reason"], registry=registry)
        self._rejected = {reason: rejected.labels(reason) for reason in REJECTIONS}
        self.first_token = Histogram(
            name("time_to_first_token_seconds"), "From submission", buckets=_SECONDS, registry=registry
        )
        self.inter_token = Histogram(
            name("inter_token_latency_seconds"), "Between tokens", buckets=_TOKEN_SECONDS, registry=registry
        )
        self._e2e = Histogram(
            name("e2e_request_latency_seconds"), "From submission to end", buckets=_SECONDS, registry=registry
        )
        self.queue_time = Histogram(
            name("request_queue_time_seconds"), "From arrival to first run", buckets=_SECONDS, registry=registry
        )
        self._prompt_length = Histogram(
            name("request_prompt_tokens"), "Prompt lengths", buckets=_LENGTHS, registry=registry
        )
        self._output_length = Histogram(
            name("request_generation_tokens"), "Output lengths", buckets=_LENGTHS, registry=registry
        )

    def finished(self, reason: str, seconds: float, *, prompt_tokens: int, generated: int) -> None:
        """A sequence is over."""
        self._success[reason].inc()
        self._prompt_tokens.inc(prompt_tokens)
        self._e2e.observe(seconds)
        self._prompt_length.observe(prompt_tokens)
        self._output_length.observe(generated)

    def rejected(self, reason: str) -> None:
        """A request was refused; reason: one of `REJECTIONS`."""
        self._rejected[reason].inc()

    def ready(self, info: Ready) -> None:
        """The engine is up."""
        blocks = {"block_size": str(info.block_size), "num_gpu_blocks": str(info.device_blocks)}
        self._config.info({**blocks, "recipe": info.recipe})

    def engine(self, stats: Stats, info: Ready | None) -> None:
        """The engine told its numbers."""
        self._running.set(stats.running)
        self._waiting.set(stats.waiting)
        if info is not None:
            self._kv_usage.set(stats.blocks_used / info.device_blocks)
        self._preemptions.inc(stats.preemptions - self._told.preemptions)
        self._steps.inc(stats.steps - self._told.steps)
        self._told = stats

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)
