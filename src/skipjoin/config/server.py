from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, NamedTuple

from skipjoin.config.batches import BatchConfig
from skipjoin.config.key_files import ANY_LATER, AS_ALL, PRIORITY_TIERS, KeyRights, priority_bounds
from skipjoin.config.shared import (
    OutputWeight,
    base_url,
    forecast_option,
    limit_option,
    measurement_option,
    objective_option,
    parallelism_option,
    scheduling_option,
    server_option,
)
from skipjoin.options import ConfigError, Option, check, settings_of
from skipjoin.recipes import OUTPUT_WEIGHT

METRICS_COMPAT = ("none", "vllm")
# One week, the maximum of deadlines and objectives.
MAX_DEADLINE_MS = 7 * 86_400_000
# Share of the default objectives for requests of service_tier priority, which wait only for each other, while default
# objectives allow for waiting.
PRIORITY_SHARE = 0.5
LOG_LEVELS, LOG_FORMATS = ("debug", "info", "warning", "error"), ("text", "json")


# Formats of tool calls: that of the model's chat template, or JSON that the prompt describes.
TOOL_FORMATS = ("auto", "json")


class HangLimits(NamedTuple):
    """Limits of a step and of the time without a heartbeat, after which an engine is killed."""

    step_s: float = 600.0
    hang_s: float = 30.0


HANG_LIMITS = HangLimits()


_objective = partial(objective_option, above=0, high=MAX_DEADLINE_MS)
_asked = partial(Option, above=0, high=MAX_DEADLINE_MS, group="Objectives that requests may ask for")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(BatchConfig):
    host: Annotated[str, server_option("Address to listen on.", is_common=True)] = "127.0.0.1"
    port: Annotated[int, server_option("Port to listen on; 0 picks a free one.", low=0, high=65535, is_common=True)] = (
        8000
    )
    served_model_name: Annotated[
        str | None,
        server_option("Name of the model for clients (default: its own name).", metavar="NAME", is_common=True),
    ] = None
    chat_template: Annotated[
        str | None, server_option("Jinja chat template instead of the model's.", metavar="FILE")
    ] = None
    tool_format: Annotated[
        str,
        server_option(
            "Format of tool calls: that of the model's chat template (auto), or, where it has none that is known, JSON "
            "that the prompt describes and a grammar enforces (json)",
            choices=TOOL_FORMATS,
        ),
    ] = "auto"
    max_queued_requests: Annotated[
        int,
        limit_option(
            "Maximum number of requests in the server, waiting and running; more are refused with 429.",
            low=1,
            high=1 << 40,
            flags=("--max-num-queued-reqs",),
            metavar="REQUESTS",
            is_common=True,
        ),
    ] = 1024
    max_queued_tokens: Annotated[
        int,
        limit_option(
            "Maximum number of prompt tokens of waiting requests; more are refused with 429.",
            low=1,
            high=1 << 40,
            flags=("--max-num-queued-tokens",),
            metavar="TOKENS",
        ),
    ] = 1 << 20
    default_deadline_s: Annotated[
        float | None,
        limit_option(
            "Time after which a request without its own deadline is aborted (default: never).", above=0, high=1e9
        ),
    ] = None
    priority_range: Annotated[
        str | None,
        limit_option(
            "Priorities that clients may set, besides 0; lower is earlier (default: 0 and higher).", metavar="LOW:HIGH"
        ),
    ] = None
    priority_tier: Annotated[
        str,
        limit_option(
            "Clients that may use service_tier priority, whose requests preempt those of other tiers",
            choices=PRIORITY_TIERS,
        ),
    ] = "none"
    fair_by: Annotated[
        str,
        scheduling_option(
            "Clients between which the service is shared fairly: API keys, adapters, or values of the field user, "
            "which clients must then not choose themselves; auto shares it between API keys if there are several and "
            "the recipe's bound on waiting allows it",
            choices=("auto", "none", "key", "user", "adapter"),
        ),
    ] = "auto"
    program_by: Annotated[
        str,
        scheduling_option(
            "What names the program of a request, such as an agent's run: the header x-program-id; or without it a "
            "session that clients send (prompt_cache_key, metadata.session_id, x-llm-d-inference-fairness-id); or "
            "without these the field user",
            choices=("none", "header", "session", "user"),
        ),
    ] = "session"
    unknown_fields: Annotated[
        str,
        server_option(
            "What happens to unknown fields of requests: a 400 that names them, or a line in the log for each name",
            choices=("refuse", "warn"),
        ),
    ] = "refuse"
    fair_output_weight: OutputWeight = OUTPUT_WEIGHT
    slo_ttft_ms: Annotated[float | None, _objective("Time to the first token (default: none).", is_common=True)] = None
    slo_tpot_ms: Annotated[
        float | None, _objective("Time per token after the first (default: none).", is_common=True)
    ] = None
    slo_jct_ms: Annotated[float | None, _objective("Time from arrival to the last token (default: none).")] = None
    priority_ttft_ms: Annotated[
        float | None, _objective("Time to the first token with service_tier priority (default: half of --slo-ttft-ms).")
    ] = None
    priority_tpot_ms: Annotated[
        float | None,
        _objective("Time per token after the first with service_tier priority (default: half of --slo-tpot-ms)."),
    ] = None
    min_slo_ttft_ms: Annotated[
        float | None, _asked("Minimum time to the first token that a request may ask for (default: any above 0).")
    ] = None
    max_slo_ttft_ms: Annotated[
        float | None, _asked("Maximum time to the first token that a request may ask for (default: a week).")
    ] = None
    min_slo_tpot_ms: Annotated[
        float | None,
        _asked("Minimum time per token after the first that a request may ask for (default: any above 0)."),
    ] = None
    max_slo_tpot_ms: Annotated[
        float | None, _asked("Maximum time per token after the first that a request may ask for (default: a week).")
    ] = None
    shutdown_timeout_s: Annotated[
        float,
        limit_option(
            "Time for running requests to finish after SIGTERM.", above=0, high=1e9, flags=("--shutdown-timeout",)
        ),
    ] = 30.0
    step_timeout_s: Annotated[
        float,
        limit_option(
            "Maximum time of a step; an engine whose step takes longer counts as hung (--hang-timeout).",
            above=0,
            high=1e9,
            flags=("--step-timeout",),
        ),
    ] = HANG_LIMITS.step_s
    hang_timeout_s: Annotated[
        float,
        limit_option(
            "Time without a heartbeat after which an engine process prints its stacks and is killed.",
            low=1,
            high=1e9,
            flags=("--hang-timeout",),
        ),
    ] = HANG_LIMITS.hang_s
    max_body_bytes: Annotated[int, limit_option("Maximum size of a request's body.", low=1, high=1 << 40)] = 4 << 20
    max_header_bytes: Annotated[int, limit_option("Maximum size of a request's headers.", low=1, high=1 << 40)] = (
        64 << 10
    )
    max_connections: Annotated[
        int,
        limit_option(
            "Maximum number of connections; another one closes an idle one. The limit of open files may allow fewer.",
            low=1,
            high=1 << 20,
            metavar="CONNECTIONS",
        ),
    ] = 4096
    max_connections_per_address: Annotated[
        int | None,
        limit_option(
            "Maximum number of connections of one client address without a valid key (default: an eighth of "
            "--max-connections, or three quarters if no key is required).",
            low=1,
            high=1 << 20,
            metavar="CONNECTIONS",
        ),
    ] = None
    max_connections_per_key: Annotated[
        int | None,
        limit_option(
            "Maximum number of connections of one API key (default: three quarters of --max-connections).",
            low=1,
            high=1 << 20,
            metavar="CONNECTIONS",
        ),
    ] = None
    write_timeout_s: Annotated[
        float,
        limit_option("Time after which a client that does not read its response is disconnected.", above=0, high=1e9),
    ] = 60.0
    max_prompt_scores: Annotated[
        int,
        limit_option(
            "Maximum number of prompt log-probabilities in one response: tokens, times 1 + logprobs, times n.",
            low=1,
            high=1 << 30,
            metavar="SCORES",
        ),
    ] = 1 << 18
    forecast_url: Annotated[
        str | None,
        forecast_option(
            "OpenAI-compatible server that predicts output lengths, such as http://127.0.0.1:9000. Requests do not "
            "wait for it."
        ),
    ] = None
    forecast_model: Annotated[
        str | None, forecast_option("Model of that server (default: the one that it serves).", metavar="NAME")
    ] = None
    forecast_timeout_s: Annotated[
        float, forecast_option("Timeout of a prediction by that server.", above=0, high=600)
    ] = 5.0
    metrics_compat: Annotated[
        str, measurement_option("Also export metrics under vLLM's names", choices=METRICS_COMPAT)
    ] = "none"
    otlp_traces_endpoint: Annotated[
        str | None,
        measurement_option(
            "OpenTelemetry collector for the traces of requests, such as http://127.0.0.1:4318/v1/traces (default: "
            "requests are not traced).",
            metavar="URL",
        ),
    ] = None
    replicas: Annotated[
        int,
        parallelism_option(
            "Engines behind this server, placed by Ray, each with its own model and KV cache.",
            low=1,
            high=4096,
            is_common=True,
        ),
    ] = 1
    log_level: Annotated[
        str,
        server_option(
            "Minimum level of the log; info logs each request except successful GETs",
            choices=LOG_LEVELS,
            is_common=True,
        ),
    ] = "info"
    log_format: Annotated[str, server_option("Format of log lines", choices=LOG_FORMATS)] = "text"
    console: Annotated[
        bool,
        server_option(
            "Serve /debug, the states and histories of requests without their texts: all of them for keys with "
            "operator=yes in the key file, own ones for other keys."
        ),
    ] = True

    def __post_init__(self) -> None:
        check(self)
        if self.served_model_name is not None and not self.served_model_name.strip():
            raise ConfigError("served_model_name must not be empty")
        self.check_access()
        if self.fair_by == "key" and not (self.api_keys or self.api_key_file):
            raise ConfigError("fair_by key needs API keys, which tell clients apart: set api_keys or api_key_file")
        if self.sharing == "none" and any(rights.weight != 1 for rights in self.key_rights.values()):
            raise ConfigError("weight of API keys needs fair_by key or user, by which they share the service")
        _ = self.priorities
        for name in ("priority_ttft_ms", "priority_tpot_ms"):
            if getattr(self, name) is not None and not self._may_have_priority_tier:
                raise ConfigError(f"{name} is for requests of service_tier priority: set priority_tier all")
        for name in ("ttft", "tpot"):
            self._check_order(f"priority_{name}_ms", f"slo_{name}_ms")
            self._check_order(f"min_slo_{name}_ms", f"max_slo_{name}_ms")
        if self.otlp_traces_endpoint is not None:
            base_url("otlp_traces_endpoint", self.otlp_traces_endpoint)
        if self.forecast_url is not None:
            base_url("forecast_url", self.forecast_url)
        else:
            self._check_unasked("forecast_model", "forecast_timeout_s")
        self.check_batches()

    @property
    def sharing(self) -> str:
        if self.fair_by == "auto":
            return "key" if len(set(self.api_keys)) > 1 else "none"
        return self.fair_by

    @property
    def _may_have_priority_tier(self) -> bool:
        some = self.priority_tier == "all" or any(rights.tier for rights in self.key_rights.values())
        return some or self.api_key_file is not None

    @property
    def hang_limits(self) -> HangLimits:
        return HangLimits(self.step_timeout_s, self.hang_timeout_s)

    @property
    def priorities(self) -> tuple[int, int]:
        return ANY_LATER if self.priority_range is None else priority_bounds("priority_range", self.priority_range)

    def rights_of(self, owner: str) -> KeyRights:
        own = self.key_rights.get(owner, AS_ALL)
        return KeyRights(
            self.priorities if own.priorities is None else own.priorities,
            self.priority_tier == "all" if own.tier is None else own.tier,
            own.is_operator,
            own.weight,
        )

    def default_ms(self, name: str, *, is_urgent: bool) -> float | None:
        default: float | None = getattr(self, f"slo_{name}_ms")
        if not is_urgent or name == "jct":
            return default
        own: float | None = getattr(self, f"priority_{name}_ms")
        return own if own is not None or default is None else default * PRIORITY_SHARE

    def asked_bounds_ms(self, name: str) -> tuple[float | None, float]:
        """Return the bounds of a requested objective; None allows any above 0."""
        if name == "jct":
            return None, MAX_DEADLINE_MS
        return getattr(self, f"min_slo_{name}_ms"), getattr(self, f"max_slo_{name}_ms") or MAX_DEADLINE_MS

    def _check_order(self, smaller: str, larger: str) -> None:
        low, high = getattr(self, smaller), getattr(self, larger)
        if low is not None and high is not None and low > high:
            raise ConfigError(f"{smaller} must be at most {larger}, which is {high:g}, got {low:g}")

    def _check_unasked(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) != settings_of(type(self))[name].default:
                raise ConfigError(f"{name} is for another server that forecasts: set forecast_url")
