"""Write deploy/grafana/skipjoin.json, the Grafana dashboard, from the panels below.

python tools/dashboard.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

OUT = Path(__file__).resolve().parents[1] / "deploy/grafana/skipjoin.json"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
# Queries select the servers that the variable names.
PICK = 'instance=~"$instance"'
COLUMNS, WIDTH, HEIGHT = 3, 8, 8


class Panel(NamedTuple):
    """Time series: queries by legend. `m` in a query is `skipjoin:` and `{}` selects the servers."""

    title: str
    queries: dict[str, str]
    unit: str = "short"
    description: str = ""


def rate(metric: str, by: str) -> str:
    """Return the rate of a counter, by a label."""
    return f"sum by ({by}) (rate({metric}{{}}[$__rate_interval]))"


def quantiles(metric: str) -> dict[str, str]:
    """Return the queries of a latency histogram."""
    buckets = f"sum by (le, class) (rate({metric}_bucket{{}}[$__rate_interval]))"
    return {f"p{share * 100:g} {{{{class}}}}": f"histogram_quantile({share}, {buckets})" for share in (0.5, 0.95, 0.99)}


ROWS: dict[str, list[Panel]] = {
    "Load": [
        Panel(
            "Requests",
            {
                "running {{class}}": "sum by (class) (m_num_requests_running{})",
                "waiting {{class}}": "sum by (class) (m_num_requests_waiting{})",
                "swapped": "sum(m_num_requests_swapped{})",
            },
        ),
        Panel(
            "Tokens per second",
            {
                "prompt": "sum(rate(m_prompt_tokens_total{}[$__rate_interval]))",
                "generated {{class}}": rate("m_generation_tokens_total", "class"),
                "recomputed": "sum(rate(m_recomputed_tokens_total{}[$__rate_interval]))",
            },
        ),
        Panel(
            "Finished requests per second", {"{{finished_reason}}": rate("m_request_success_total", "finished_reason")}
        ),
    ],
    "Latency": [
        Panel("Time to first token", quantiles("m_time_to_first_token_seconds"), "s"),
        Panel("Inter-token latency", quantiles("m_inter_token_latency_seconds"), "s"),
        Panel("End-to-end latency", quantiles("m_e2e_request_latency_seconds"), "s"),
        Panel("Time in queue", quantiles("m_request_queue_time_seconds"), "s"),
        Panel(
            "Why requests wait",
            {"{{reason}}": rate("m_wait_seconds_total", "reason")},
            "short",
            "Number of requests that wait for each reason, on average.",
        ),
        Panel(
            "Objectives met",
            {
                "{{slo}} {{class}}": "sum by (slo, class) (rate(m_slo_attained_total{}[$__rate_interval])) / "
                "(sum by (slo, class) (rate(m_slo_attained_total{}[$__rate_interval])) + "
                "sum by (slo, class) (rate(m_slo_missed_total{}[$__rate_interval])))"
            },
            "percentunit",
        ),
        Panel("Time to first token / objective", quantiles("m_slo_ttft_used_ratio"), "percentunit"),
    ],
    "Scheduling": [
        Panel("Preemptions per second", {"{{how}}": rate("m_num_preemptions_total", "how")}),
        Panel("Preemptions per request", quantiles("m_request_preemptions")),
        Panel(
            "Levels of the feedback queue",
            {
                "level {{level}}": "sum by (level) (m_queue_requests{})",
                "demotions per second": "sum(rate(m_queue_demotions_total{}[$__rate_interval]))",
                "promotions per second": "sum(rate(m_queue_promotions_total{}[$__rate_interval]))",
            },
            "short",
            "Recipe fastserve.",
        ),
        Panel(
            "Deadlines and nested reservations",
            {
                "next token {{state}}": "sum by (state) (m_deadline_requests{})",
                "hosted requests": "sum(m_kv_hosted_requests{})",
                "lost their KV per second": "sum(rate(m_kv_vacated_reservations_total{}[$__rate_interval]))",
            },
            "short",
            "Recipes bros and econoserve.",
        ),
        Panel(
            "Mean tokens per step",
            {
                "tokens": "sum(rate(m_iteration_tokens_total_sum{}[$__rate_interval])) / "
                "sum(rate(m_iteration_tokens_total_count{}[$__rate_interval]))"
            },
        ),
    ],
    "KV cache": [
        Panel("KV blocks in use", {"{{instance}}": "m_kv_cache_usage_perc{}"}, "percentunit"),
        Panel(
            "Prefix cache hits",
            {
                "{{tier}}": "sum by (tier) (rate(m_prefix_cache_hits_total{}[$__rate_interval])) / on () group_left () "
                "sum(rate(m_prefix_cache_queries_total{}[$__rate_interval]))"
            },
            "percentunit",
        ),
        Panel(
            "Swapping",
            {
                "out, proactive {{proactive}}": rate("m_swap_out_bytes_total", "proactive"),
                "in, proactive {{proactive}}": rate("m_swap_in_bytes_total", "proactive"),
                "stalled seconds per second": "sum(rate(m_swap_stall_seconds_total{}[$__rate_interval]))",
            },
            "Bps",
        ),
    ],
    "Server": [
        Panel("Responses per second", {"{{status}}": rate("m_http_responses_total", "status")}),
        Panel(
            "Refusals per second",
            {
                "request: {{reason}}": rate("m_admission_rejected_total", "reason"),
                "connection: {{reason}}": rate("m_connections_refused_total", "reason"),
            },
        ),
        Panel(
            "Engines",
            {
                "configured": "sum(m_replicas{})",
                "alive": "sum(m_replicas_alive{})",
                "restarts": "sum(m_replica_restarts_total{}) + sum(m_engine_restarts_total{})",
                "requests lost: {{reason}}": "sum by (reason) (m_requests_lost_total{})",
            },
        ),
        Panel(
            "Resident memory",
            {
                "engines {{instance}}": "m_engine_resident_memory_bytes{}",
                "API {{instance}}": "m_api_resident_memory_bytes{}",
            },
            "bytes",
        ),
        Panel("Batch lines", {"{{state}}": "sum by (state) (m_batch_lines{})"}),
        Panel("Forecasts per second", {"{{source}}": rate("m_forecasts_total", "source")}),
    ],
}


def expression(query: str) -> str:
    """Return a query with full names and the selector."""
    return re.sub(r"\bm_", "skipjoin:", query).replace("{}", "{" + PICK + "}")


def panel(one: Panel, number: int, column: int, top: int) -> dict[str, Any]:
    """Return Grafana's object of a panel."""
    targets = [
        {"refId": chr(ord("A") + at), "datasource": DATASOURCE, "expr": expression(query), "legendFormat": legend}
        for at, (legend, query) in enumerate(one.queries.items())
    ]
    defaults = {"unit": one.unit, "min": 0, "custom": {"fillOpacity": 10, "showPoints": "never"}}
    return {
        "id": number,
        "type": "timeseries",
        "title": one.title,
        "description": one.description,
        "datasource": DATASOURCE,
        "gridPos": {"x": column * WIDTH, "y": top, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }


def dashboard() -> dict[str, Any]:
    """Return Grafana's object of the dashboard."""
    panels: list[dict[str, Any]] = []
    top, number = 0, 0
    for title, members in ROWS.items():
        number += 1
        grid = {"x": 0, "y": top, "w": COLUMNS * WIDTH, "h": 1}
        panels.append({"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": grid, "panels": []})
        top += 1
        for at, one in enumerate(members):
            number += 1
            panels.append(panel(one, number, at % COLUMNS, top + at // COLUMNS * HEIGHT))
        top += (len(members) + COLUMNS - 1) // COLUMNS * HEIGHT
    instances = "label_values(skipjoin:num_requests_running, instance)"
    return {
        "uid": "skipjoin",
        "title": "Skipjoin",
        "tags": ["llm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
                {
                    "name": "instance",
                    "label": "Server",
                    "type": "query",
                    "datasource": DATASOURCE,
                    "query": {"query": instances, "refId": "instances"},
                    "refresh": 2,
                    "includeAll": True,
                    "multi": True,
                    "allValue": ".*",
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": panels,
    }


def text() -> str:
    """Return the file's content."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    OUT.write_text(text(), encoding="utf-8")
