#!/usr/bin/env bash
# Finding: prometheus_client gives a metric with a colon two names in OpenMetrics: its own for the type, and another one
#   with an underscore for the value.
# Version: prometheus_client 0.26.0
# Guess: A scraper finds vllm:num_requests_running under this name in any format, as names may have colons.
# What happens: To a scraper that accepts OpenMetrics 1.0.0 and says nothing about escaping, as Prometheus 2 does, names
#   of values are escaped by the rules of labels. Types belong to names without values, so all values are untyped.
#   With escaping=allow-utf-8, as Prometheus 3 asks, and in the older text format, the colon stays.
# Why it matters: Boards and alerts for vllm:... find nothing, depending on the scraper's version alone. Skipjoin
#   answers in the text format, whatever is asked.
source "$(dirname "$0")/support.bash"
packages prometheus_client==0.26.0
"$PYTHON" - <<'PY' | expect '# TYPE vllm:running gauge
vllm_running 1.0
vllm:running: gauge, values: 0
vllm_running: unknown, values: 1
with allow-utf-8: vllm:running 1.0
as text: vllm:running 1.0'
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.parser import text_string_to_metric_families

OPEN = "application/openmetrics-text;version=1.0.0"
PROMETHEUS_2 = f"{OPEN};q=0.8,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5"
registry = CollectorRegistry()
Gauge("vllm:running", "Requests.", registry=registry).set(1)


def lines(accept):
    encode, _ = choose_encoder(accept)
    return encode(registry).decode()


print("\n".join(line for line in lines(PROMETHEUS_2).splitlines() if line.startswith(("# TYPE", "vllm"))))
for family in text_string_to_metric_families(lines(PROMETHEUS_2)):
    print(f"{family.name}: {family.type}, values: {len(family.samples)}")
for name, accept in (("with allow-utf-8", f"{OPEN};escaping=allow-utf-8"), ("as text", "text/plain;version=0.0.4")):
    print(f"{name}: {next(line for line in lines(accept).splitlines() if line.startswith('vllm'))}")
PY
