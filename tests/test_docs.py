from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest
from typer.main import get_command

from skipjoin.cli import app
from skipjoin.core.decide.scheduler import Scheduler
from skipjoin.core.engine import EngineCore
from skipjoin.core.events import Event, Preempted, Preemption
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.request import Request
from skipjoin.exec.simulated import SimulatedExecutor
from skipjoin.options import ConfigError, settings_of
from skipjoin.policies.cost import LinearCost
from skipjoin.recipes import Settings, find
from skipjoin.sim.driver import Replica, simulate
from skipjoin.vllm.options import PluginOptions

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "skipjoin"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")])
# Aborts a request before its first token and another one after it, and counts.
ABORTS = """
from skipjoin.core.engine import EngineCore
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.request import Request
from skipjoin.core.decide.scheduler import Scheduler
from skipjoin.core.step import StepResult
from skipjoin.observe.metrics import EngineMetrics
from skipjoin.policies.cost import LinearCost
from skipjoin.recipes import Settings, baselines

policies = baselines.fcfs(Settings(LinearCost(floor=0.01, prefill_token=1e-4), max_seqs=1))
core = EngineCore(Scheduler(policies, KVLedger(8, 0, 8)))
metrics = EngineMetrics(device_blocks=8, block_size=8, block_bytes=1)
for number in range(2):
    core.add(Request(number, 0.0, range(4), 9), 0.0)
core.finish_step(StepResult(core.start_step(0.0), [5], 1.0), 1.0)
for number in range(2):
    core.abort(number, 2.0)
metrics.observe(core.take_events())
print(metrics.snapshot().summed("aborted_before_first_token_total"))
"""


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to a document's headings."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


# Ends of pictures that are shown in one color scheme only.
SCHEMES = ("gh-light-mode-only", "gh-dark-mode-only")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_to_files_and_headings(document: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        name, _, anchor = target.partition("#")
        if "://" in target:
            continue
        file = document.parent / name if name else document
        is_page = anchor and anchor not in SCHEMES
        if not file.exists() or (is_page and anchor not in anchors(file.read_text())):
            broken.append(target)
    assert not broken


@pytest.mark.exhaustive  # continuous integration builds it with `make docs`
def test_site_builds_in_strict_mode(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "cache_salt" in (tmp_path / "python" / "index.html").read_text()
    fetched = [page for page in tmp_path.rglob("*.html") if re.search(r"<(script|link)[^>]+//", page.read_text())]
    assert not fetched


@pytest.mark.parametrize(("name", "limit"), [("README.md", 110), ("CHANGELOG.md", 40)])
def test_document_stays_short(name: str, limit: int) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= limit


def test_readme_leaves_figures_to_the_records() -> None:
    prose = re.sub(r"^```.*?^```|\]\([^)]*\)", "", (ROOT / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len(re.findall(r"\d+(?:[.,]\d+)*", prose)) <= 30


# Decisions are half a page each, and only grow in number.
@pytest.mark.parametrize(("folder", "limit"), [("docs", 27_500), ("docs/decisions", 3_000), ("benchmarks", 15_700)])
def test_hand_written_pages_stay_short(folder: str, limit: int) -> None:
    apart = {ROOT / "docs" / "reference", ROOT / "docs" / "decisions"} - {ROOT / folder}
    pages = [page for page in (ROOT / folder).rglob("*.md") if page.parent not in apart]
    assert sum(len(page.read_text().split()) for page in pages) <= limit


def commands_of(page: Path) -> Iterator[str]:
    for block in re.findall(r"^```\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        for line in re.sub(r"\\\n", " ", block).splitlines():
            yield re.sub(r"(^|\s)# .*", "", line).strip()


def test_first_two_commands_of_the_readme_install_everything_and_serve_or_test(tmp_path: Path) -> None:
    serve, test, *_ = (command for command in commands_of(ROOT / "README.md") if command)
    assert (serve, test) == ("make serve", "make test")
    for command, last in ((serve, "/skipjoin serve smollm2"), (test, "/python -m pytest")):
        planned = subprocess.run(
            [*command.split(), "--dry-run", f"VENV={tmp_path}"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        steps = [
            f"-m venv {tmp_path}",
            "--require-hashes --requirement requirements.lock",
            "--constraint constraints.txt torch",
            "--no-build-isolation --editable .",
            last,
        ]
        places = [planned.find(step) for step in steps]
        assert places[0] > -1
        assert places == sorted(places), planned
    assert re.search(rf"^\$bare .* {test}$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)


def test_commands_and_options_of_the_pages_exist() -> None:
    """Commands of the first steps, and all others."""
    checked = 0
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for line in commands_of(page):
            for text in re.findall(r"(?:^|&& |\$ )(?:\S*/)?skipjoin ((?!-)[a-z].*?)(?= && | \| |$)", line):
                command: Any = get_command(app)
                words = text.split()
                while words and words[0] in getattr(command, "commands", {}):
                    command = command.commands[words.pop(0)]
                known = {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)}
                unknown = {word.partition("=")[0] for word in words if word.startswith("--")} - known
                assert not getattr(command, "commands", {}), f"{page.name}: {line}"
                assert not unknown, f"{page.name}: {line}"
                checked += 1
    assert checked > 20


def test_defaults_of_the_page_of_vllm_are_those_of_its_options() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*?) ?\|", (ROOT / "docs" / "vllm.md").read_text(), re.MULTILINE)
    settings = settings_of(PluginOptions)
    found = {name: text.strip("`") for name, text in rows if name in settings}
    assert len(found) > 3
    for name, text in found.items():
        default = settings[name].default
        shown = f"{default:g}" if isinstance(default, float) else default
        assert text == shown if default is not None else not re.search(r"\d", text), name


def test_files_named_in_the_architecture_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = {name for name in re.findall(r"`([\w/.]+)`", text) if name.endswith((".py", "/"))}
    assert len(named) > 40
    assert not [name for name in named if not any((base / name).exists() for base in (ROOT, ROOT / "src/skipjoin"))]


def test_life_of_a_request_names_few_files() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    walk = text[text.index("## The life of a request") : text.index("## Packages")]
    assert len(set(re.findall(r"`[\w/]+\.py`", walk))) <= 30


def test_tests_named_in_reliability_exist() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "docs" / "reliability.md").read_text())
    assert len(named) > 50
    tests = {file: (ROOT / "tests" / file).read_text() for file, _ in named}
    assert not [(file, name) for file, name in named if not re.search(rf"def {name}\(", tests[file])]


def test_examples_of_the_policy_page_define_recipes(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "add-a-policy.md").read_text()
    file = tmp_path / "my_policy.py"
    file.write_text("\n".join(re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)))
    first, late_and_long = (find(f"{file}:{name}") for name in ("late_first", "late_and_long"))
    cost = LinearCost(floor=0.01, prefill_token=1e-4)
    settings = Settings(cost, max_seqs=2)
    policies = late_and_long.function(settings, late_and_long.read({"limit_s": 0.1, "swap_tokens": 30}))
    events: list[Event] = []
    for built in (first.function(settings), policies):
        events.clear()
        requests = [Request(number, 0.01 * number, range(length), 20) for number, length in enumerate((30, 8, 12, 10))]
        replica = Replica(EngineCore(Scheduler(built, KVLedger(8, 8, 8))), SimulatedExecutor(cost))
        simulate(replica, requests, on_events=events.extend)
        assert all(len(request.progress.output) == 20 for request in requests)
    assert {event.how for event in events if isinstance(event, Preempted)} == {*Preemption} - {Preemption.SPILL}
    with pytest.raises(ConfigError, match=r"limit_s must be in \[0\.01, 3600\], got 0"):
        late_and_long.read({"limit_s": 0.0})


def test_example_of_the_metric_page_counts_early_aborts(tmp_path: Path) -> None:
    """Follow the page in a copy of the package."""
    page = (ROOT / "docs" / "add-a-metric.md").read_text()
    row, count = map(dedent, re.findall(r"^ +```(?:python)?\n(.*?)^ +```", page, re.DOTALL | re.MULTILINE))
    (tmp_path / "skipjoin").mkdir()
    for entry in PACKAGE.iterdir():
        (tmp_path / "skipjoin" / entry.name).symlink_to(entry)
    observe = tmp_path / "skipjoin" / "observe"
    observe.unlink()
    shutil.copytree(PACKAGE / "observe", observe)
    for name, before, added in (
        ("metric_table.py", "ENGINE_METRICS = (\n", indent(row, " " * 4)),
        ("metrics.py", "        assert facts.ended is not None\n", indent(count, " " * 8)),
    ):
        source = (observe / name).read_text()
        assert source.count(before) == 1
        (observe / name).write_text(source.replace(before, before + added))
    done = subprocess.run(
        [sys.executable, "-c", ABORTS],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "[1]\n", done.stderr
