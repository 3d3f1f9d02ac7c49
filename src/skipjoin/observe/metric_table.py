from __future__ import annotations

from skipjoin.core.events import Preemption
from skipjoin.core.request import FinishReason
from skipjoin.observe.metric_definition import Metric, counter, gauge, histogram
from skipjoin.observe.waits import REASONS

# Spans one token on a fast device to a request that waits for minutes.
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
_LENGTHS = tuple(float(1 << n) for n in (0, 2, 4, 6, *range(7, 18)))
_BATCH = tuple(float(1 << n) for n in (0, *range(3, 15)))
_PREEMPTIONS_PER_REQUEST = (0.0, *(float(1 << n) for n in range(11)))
_FORECAST_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.1, 1.0)
_ANSWER_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_OCTAVES = (0.125, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
_USED = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 8.0)
FINISH_REASONS = tuple(reason.value for reason in FinishReason)
PREEMPTIONS = tuple(how.name.lower() for how in Preemption)
_PROACTIVE = ("false", "true")
_TIERS = ("device", "cpu")
# Values of `Forecast.source`.
FORECAST_SOURCES = ("prior", "learned", "alise-similar", "alise-mlp", "url")
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
    gauge("num_requests_running", "Number of requests in the running batch.", by_class=True, in_vllm=True),
    gauge(
        "num_requests_waiting",
        "Number of requests that are not running, including preempted ones.",
        by_class=True,
        in_vllm=True,
    ),
    gauge("batch_cap", "Batch size up to which a step takes best-effort requests. Only the recipe bros changes it."),
    gauge("num_requests_swapped", "Number of waiting requests with KV on the CPU tier."),
    gauge("kv_compressed_bytes", "Stored size of KV on the CPU tier as 8-bit codes."),
    gauge(
        "kv_cache_usage_perc", "Share of the device's KV blocks that are in use, 0 to 1.", is_share=True, in_vllm=True
    ),
    gauge("kv_cached_blocks", "Number of free device blocks in the prefix cache."),
    gauge("kv_leased_blocks", "Number of these that are kept for programs that pause."),
    gauge("kv_cpu_cached_blocks", "Number of free blocks of the CPU tier in the prefix cache."),
    gauge("kv_shared_blocks", "Number of device blocks that several requests hold."),
    gauge("kv_bidirectional_blocks", "Number of bidirectional blocks, which two requests fill."),
    gauge(
        "kv_hosted_requests",
        "Number of requests with KV in blocks that another one reserves. Only the recipe econoserve nests them.",
    ),
    gauge("kv_hosted_blocks", "Number of these blocks."),
    counter("kv_nested_reservations_total", "Requests that have been hosted."),
    counter("kv_vacated_reservations_total", "Number of times that a hosted request lost its KV."),
    gauge(
        "queue_requests",
        "Number of requests per level of the feedback queue, 0 first. Only the recipe fastserve has levels.",
        "level",
        tuple(map(str, range(16))),
    ),
    counter("queue_demotions_total", "Number of times that a request used up its quantum and went down."),
    counter("queue_promotions_total", "Number of times that a starving request went to the first level."),
    gauge(
        "deadline_requests",
        "Number of real-time requests by whether their next token is late. Only the recipe bros has such deadlines.",
        "state",
        ("in_time", "late"),
    ),
    counter(
        "kv_checkpointed_slots_total",
        "Tokens whose KV was saved before the other request of their bidirectional block overwrote it.",
    ),
    counter("kv_checkpointed_bytes_total", "Size of the saved KV."),
    counter("kv_restores_total", "Number of times that a request's saved KV was restored."),
    counter(
        "kv_blocks_recovered_total", "Leaked KV blocks that were reclaimed. Any is a bug, which the log describes."
    ),
    counter(
        "prefix_cache_queries_total",
        "Prompt tokens of admitted requests that may use the prefix cache, once per request.",
        in_vllm=True,
    ),
    counter(
        "prefix_cache_hits_total",
        "Prompt tokens found in the prefix cache, by tier.",
        "tier",
        _TIERS,
        vllm_sum=_TIERS,
        in_vllm=True,
    ),
    counter("prefix_cache_saved_bytes_total", "Cached KV copied to the CPU tier before the device lost it."),
    counter(
        "num_preemptions_total",
        "Preemptions, by what happened to the KV: kept (pause), swapped out in part (spill) or whole (swap), dropped "
        "(drop). vLLM's metric excludes pause.",
        "how",
        PREEMPTIONS,
        vllm_sum=("spill", "swap", "drop"),
        by_class=True,
        in_vllm=True,
    ),
    counter("prompt_tokens_total", "Prompt tokens of requests that got their first token.", in_vllm=True),
    counter("generation_tokens_total", "Generated tokens.", by_class=True, in_vllm=True),
    counter(
        "request_success_total",
        "Finished requests, by reason.",
        "finished_reason",
        FINISH_REASONS,
        by_class=True,
        in_vllm=True,
    ),
    counter("deadline_dropped_total", "Requests aborted by their deadline."),
    counter("engine_steps_total", "Number of steps."),
    counter("engine_restarts_total", "Number of times that all ranks were restarted."),
    counter(
        "swap_out_bytes_total",
        "KV swapped out, in the CPU tier's format; proactive swaps overlap with steps.",
        "proactive",
        _PROACTIVE,
    ),
    counter(
        "swap_in_bytes_total",
        "KV swapped in, in the CPU tier's format; proactive swaps overlap with steps.",
        "proactive",
        _PROACTIVE,
    ),
    counter("swap_wasted_bytes_total", "KV swapped in for requests that computed no token before they lost KV again."),
    counter(
        "wait_seconds_total",
        "Time that requests waited, by reason. Live requests count up to their latest change.",
        "reason",
        tuple(REASONS),
    ),
    counter("swap_stall_seconds_total", "Time that steps waited for copies of KV."),
    counter(
        "swap_delay_seconds_total",
        "Time for which copies of KV delayed finished requests: steps that they missed, and steps that waited.",
    ),
    counter("stage_busy_seconds_total", "Time that pipeline stages worked, summed over stages."),
    counter(
        "stage_idle_seconds_total",
        "Time that pipeline stages were idle between steps although there were requests, summed over stages.",
    ),
    counter("slo_attained_total", "Soft objectives that requests met, by objective.", "slo", OBJECTIVES, by_class=True),
    counter(
        "slo_missed_total", "Soft objectives that requests missed, by objective.", "slo", OBJECTIVES, by_class=True
    ),
    *(
        histogram(
            f"slo_{objective}_used_ratio",
            f"Time that requests with a soft {objective.upper()} objective took, as a share of it. The rest is slack; "
            "above 1 they missed it.",
            _USED,
            by_class=True,
        )
        for objective in OBJECTIVES
    ),
    counter("recomputed_tokens_total", "Tokens computed again after their KV was dropped."),
    histogram(
        "time_to_first_token_seconds",
        "Time from arrival at the engine to the first token.",
        _SECONDS,
        by_class=True,
        in_vllm=True,
    ),
    histogram(
        "inter_token_latency_seconds", "Time between tokens of a request.", _TOKEN_SECONDS, by_class=True, in_vllm=True
    ),
    histogram(
        "request_time_per_output_token_seconds",
        "Mean time per output token after the first, one value per request.",
        _TOKEN_SECONDS,
        by_class=True,
        in_vllm=True,
    ),
    histogram(
        "e2e_request_latency_seconds",
        "Time from arrival at the engine to the end.",
        _SECONDS,
        by_class=True,
        in_vllm=True,
    ),
    histogram(
        "request_queue_time_seconds",
        "Time from arrival at the engine to the first step.",
        _SECONDS,
        by_class=True,
        in_vllm=True,
    ),
    histogram("request_prefill_time_seconds", "Time from the first step to the first token.", _SECONDS, in_vllm=True),
    histogram("request_decode_time_seconds", "Time from the first token to the last.", _SECONDS, in_vllm=True),
    histogram("request_inference_time_seconds", "Time from the first step to the last token.", _SECONDS, in_vllm=True),
    histogram("request_prompt_tokens", "Prompt tokens of a request.", _LENGTHS, in_vllm=True),
    histogram("request_generation_tokens", "Generated tokens of a request.", _LENGTHS, in_vllm=True),
    histogram(
        "request_params_max_tokens", "Maximum number of tokens that a request may generate.", _LENGTHS, in_vllm=True
    ),
    histogram("request_preemptions", "Preemptions of a request.", _PREEMPTIONS_PER_REQUEST, by_class=True),
    histogram("iteration_tokens_total", "Tokens computed in a step.", _BATCH, in_vllm=True),
    gauge("adapter_bytes", "Memory of adapters."),
    gauge("engine_resident_memory_bytes", "Resident memory of the engine processes, without their ranks."),
)
"""Metrics of an engine. Histograms over requests count a request when it ends, for any reason."""

# Reasons why a request is not retried: no engine will start, none started in time, or engines died while it ran.
LOSSES = ("engine_dead", "no_replica", "engine_lost")

API_METRICS = (
    counter(
        "http_responses_total",
        "HTTP responses, by status. A stream counts by its initial status; 499 is a client that disconnected before a "
        "response.",
        "status",
        HTTP_STATUSES,
    ),
    counter(
        "connections_refused_total",
        "Connections refused (no_room) or closed: idle for a new one (idle), more than the share of an address or key "
        "(share), slow to send (late), not HTTP (invalid), slow to read (slow_reader).",
        "reason",
        CONNECTION_REFUSALS,
    ),
    gauge("api_resident_memory_bytes", "Resident memory of the API process."),
    counter(
        "admission_rejected_total",
        "Requests refused by admission, by the exceeded limit, or during shutdown (draining).",
        "reason",
        ("requests", "tokens", "draining"),
    ),
    histogram(
        "request_params_n",
        "Choices that a request asks for, one value per prompt.",
        (1.0, 2.0, 4.0, 8.0, 16.0),
        in_vllm=True,
    ),
    histogram(
        "request_max_num_generation_tokens", "Generated tokens of a prompt's longest choice.", _LENGTHS, in_vllm=True
    ),
    gauge("adapters", "Number of adapters that requests may choose."),
    gauge("replicas", "Number of configured engines."),
    gauge("replicas_alive", "Number of engines that accept requests."),
    counter("replica_restarts_total", "Number of engines started in place of one that died."),
    counter("requests_moved_total", "Number of times that a request's engine died and another took it over."),
    counter(
        "requests_lost_total",
        "Requests that failed because engines died: none will start (engine_dead), none started in time (no_replica), "
        "or too many died while they ran it (engine_lost).",
        "reason",
        LOSSES,
    ),
    counter("forecasts_total", "Forecasts of output lengths, by source.", "source", FORECAST_SOURCES),
    counter("forecasts_late_total", "Forecasts that were ready after their request had started."),
    histogram("forecast_seconds", "Time to make a forecast.", _FORECAST_SECONDS),
    counter(
        "forecast_url_total",
        "Predictions by the server of --forecast-url, by outcome: skipped if too many are open, unneeded if the "
        "request finished first.",
        "outcome",
        FORECAST_OUTCOMES,
    ),
    histogram("forecast_url_seconds", "Time of a prediction by that server.", _ANSWER_SECONDS),
    counter(
        "forecasts_learned_total", "Outputs learned from; censored ones were cut off.", "kind", ("exact", "censored")
    ),
    histogram("forecast_error_tokens", "Absolute forecast error; outputs that were cut off do not count.", _LENGTHS),
    histogram(
        "forecast_error_octaves",
        "Absolute forecast error as a power of two: 1 is twice or half the length. Aborted and expired requests do "
        "not count.",
        _OCTAVES,
    ),
    counter(
        "forecast_interval_total",
        "Output lengths, by their position relative to the forecast's 80 % interval. Aborted and expired requests do "
        "not count.",
        "place",
        ("below", "inside", "above"),
    ),
    gauge("forecast_index_entries", "Number of outputs to predict from."),
    gauge("batch_lines", "Number of lines of batches in progress, by state.", "state", BATCH_OPEN),
    counter("batch_lines_ended_total", "Finished lines of batches, by state.", "state", BATCH_ENDS),
    gauge("batches", "Number of batches, by status.", "status", BATCH_STATUSES),
    counter(
        "batch_generation_tokens_total", "Tokens generated for lines of batches. Tokens of a repeated line count again."
    ),
    counter(
        "batch_lines_requeued_total", "Number of times that a line was queued again because an engine died or was full."
    ),
)
"""Metrics of the API process."""

ENGINE_INDEX = {metric.name: index for index, metric in enumerate(ENGINE_METRICS)}


def engine_metric(name: str) -> Metric:
    return ENGINE_METRICS[ENGINE_INDEX[name]]
