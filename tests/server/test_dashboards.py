from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from server_worlds import ServerProcess

from support.scripts import load

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
ALERTS = DEPLOY / "prometheus/alerts.yml"
# A name, and its labels in a selector or a grouping.
NAME = re.compile(r"skipjoin:\w+")


def dashboard() -> dict[str, Any]:
    return json.loads((DEPLOY / "grafana/skipjoin.json").read_text())


def panel_queries() -> list[str]:
    return [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])]


def alert_queries() -> list[str]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule["expr"] for rule in group["rules"]]


def test_dashboard_is_up_to_date() -> None:
    tool = load("tools/dashboard.py")
    assert tool.OUT.read_text() == tool.text(), "run python tools/dashboard.py"


def test_every_query_finds_its_metrics_and_labels_in_a_loaded_server(server: ServerProcess) -> None:
    for _ in range(3):
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "abc", "max_tokens": 5, "ignore_eos": True})
    server.wait_idle()
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    samples = {re.split(r"[{ ]", line)[0] for line in lines if not line.startswith("#")}
    labels = {label for line in lines for label in re.findall(r"[{,](\w+)=", line)} | {"instance", "le", "job"}
    queries = panel_queries() + alert_queries()
    assert len(queries) > 40
    for query in queries:
        names = NAME.findall(query)
        assert names or query.startswith("up{"), query
        assert set(names) <= samples, query
        used = re.findall(r"(\w+)=~?\"", query) + [
            label.strip() for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(",")
        ]
        assert set(used) <= labels, query


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool (Debian's package prometheus)")
def test_prometheus_accepts_all_expressions_and_alerts_fire(tmp_path: Path) -> None:
    panels = [
        {"record": f"panel_{number}", "expr": query.replace("$__rate_interval", "1m").replace("$instance", ".*")}
        for number, query in enumerate(panel_queries())
    ]
    rules = tmp_path / "panels.yml"
    rules.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": panels}]}))
    for command in (("check", "rules", rules, ALERTS), ("test", "rules", DEPLOY / "prometheus/alerts_test.yml")):
        done = subprocess.run(["promtool", *map(str, command)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
