from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from skipjoin import LLM
from skipjoin.cli import app
from skipjoin.config import ConfigError
from skipjoin.recipes import RECIPES, find
from support.installed_package import importable, install, project

SKIPJOIN = str(Path(sys.executable).with_name("skipjoin"))
MODULE = "lab_recipes"
SOURCE = '''
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from skipjoin.policy import FixedKey, Option, Params, Settings, preemptive, recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign(Params):
    sign: Annotated[int, Option("1: the shortest prompt first, -1: the longest.", low=-1, high=1)] = 1


@recipe
def by_prompt(s: Settings, p: Sign):
    """Requests by the lengths of their prompts."""
    return preemptive(s, lambda: FixedKey(lambda request: p.sign * len(request.prompt)))


def plain(s: Settings):
    """Is not decorated."""
'''


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    points = {"by-prompt": f"{MODULE}:by_prompt"}
    files = project("prompt-lab", {MODULE: SOURCE}, {"skipjoin.recipes": points})
    return install(files, tmp_path_factory.mktemp("lab"))


@pytest.fixture
def installed(site: Path) -> Iterator[None]:
    with importable(site):
        yield


@pytest.mark.usefixtures("installed")
def test_package_is_imported_on_lookup_of_its_recipe() -> None:
    assert find("fcfs") is RECIPES["fcfs"]
    assert MODULE not in sys.modules
    assert find("by-prompt[sign=-1]").name == "by-prompt[sign=-1]"
    assert MODULE in sys.modules
    assert "by-prompt" not in RECIPES
    with pytest.raises(ConfigError, match=r"one of adaptive, .*by-prompt, .*got 'by-promt'; did you mean by-prompt\?"):
        find("by-promt")


def test_recipe_is_unknown_without_its_package() -> None:
    with pytest.raises(ConfigError, match="recipe must be one of"):
        find("by-prompt")


@pytest.mark.usefixtures("installed")
def test_an_installed_recipe_is_listed_and_runs_in_an_engine() -> None:
    listed = json.loads(CliRunner().invoke(app, ["recipes", "--json"]).stdout)
    assert listed["by-prompt"]["parameters"]["sign"]["default"] == 1
    with LLM(progress=False, recipe="by-prompt[sign=-1]", threads=1, profile="off", kv_cache_gib=0.1) as llm:
        info = llm.engine.info
        assert (info.recipe, info.recipe_params) == ("by-prompt[sign=-1]", {"sign": -1})


@pytest.mark.exhaustive  # as the engine process of a server does
def test_worker_processes_of_a_simulation_find_an_installed_recipe(site: Path, tmp_path: Path) -> None:
    run = subprocess.run(
        [
            *(SKIPJOIN, "simulate", "--model", "opt-13b", "--kv-gib", "4", "--max-num-seqs", "8", "--jobs", "2"),
            *("--recipes", "fcfs,by-prompt,by-prompt[sign=-1]", "--rates", "8", "--requests", "60"),
            *("--out", "out.json"),
        ],
        cwd=tmp_path,
        env=_with_site(site),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    records = {record["recipe"]: record for record in json.loads((tmp_path / "out.json").read_text())}
    assert records.keys() == {"fcfs", "by-prompt", "by-prompt[sign=-1]"}
    mean = {name: record["normalized_latency_s"]["mean"] for name, record in records.items()}
    assert len(set(mean.values())) == 3


def test_the_engine_process_of_a_server_finds_an_installed_recipe(site: Path) -> None:
    command = [SKIPJOIN, "serve", "--recipe", "by-prompt", "--set", "sign=-1", "--port", "0", "--profile", "off"]
    command += ["--threads", "1", "--kv-cache-gib", "0.05", "--swap-space", "0"]
    with subprocess.Popen(command, env=_with_site(site), text=True, stdout=subprocess.PIPE) as server:
        try:
            assert "recipe by-prompt, " in server.stdout.readline()
        finally:
            server.terminate()
            server.wait(timeout=60)


def _with_site(site: Path) -> dict[str, str]:
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


@pytest.mark.parametrize(
    ("points", "name", "error"),
    [
        (
            {"fcfs": f"{MODULE}:by_prompt"},
            "fcfs",
            "recipe 'fcfs' is built in, but entry point fcfs = lab_recipes:by_prompt of distribution prompt-lab 1.0 "
            "has the same name: rename it there, or uninstall that",
        ),
        (
            {"lost": "no_such_module:by_prompt"},
            "lost",
            "recipe 'lost': entry point lost = no_such_module:by_prompt of distribution prompt-lab 1.0 fails to load: "
            "ModuleNotFoundError: No module named 'no_such_module'; update or uninstall it",
        ),
        (
            {"plain": f"{MODULE}:plain"},
            "plain",
            "recipe 'plain': entry point plain = lab_recipes:plain of distribution prompt-lab 1.0 is no function with "
            "the decorator @recipe of skipjoin.policy; update or uninstall it",
        ),
    ],
)
def test_errors_name_the_distribution_and_the_entry_point(
    site: Path, tmp_path: Path, points: dict[str, str], name: str, error: str
) -> None:
    other = tmp_path / "site"
    _copy(site, other, points)
    with importable(other):
        with pytest.raises(ConfigError) as raised:
            find(name)
        assert str(raised.value) == error
        listed = CliRunner().invoke(app, ["recipes"])
        assert (listed.exit_code, listed.stderr) == (2, f"error: {error}\n")
    assert find("fcfs") is RECIPES["fcfs"]


def test_error_of_a_duplicate_recipe_names_both_packages(site: Path, tmp_path: Path) -> None:
    other = tmp_path / "site"
    _copy(site, other, {"by-prompt": f"{MODULE}:by_prompt"}, distribution="other-lab")
    with importable(site), importable(other), pytest.raises(ConfigError) as raised:
        find("by-prompt")
    assert "prompt-lab 1.0" in str(raised.value)
    assert "other-lab 1.0" in str(raised.value)


def _copy(site: Path, other: Path, points: dict[str, str], distribution: str = "prompt-lab") -> None:
    """Copy the installed package with other entry points, which saves a run of pip."""
    (info,) = site.glob("*.dist-info")
    copied = other / f"{distribution.replace('-', '_')}-1.0.dist-info"
    copied.mkdir(parents=True)
    (other / f"{MODULE}.py").write_text((site / f"{MODULE}.py").read_text())
    (copied / "METADATA").write_text((info / "METADATA").read_text().replace("prompt-lab", distribution))
    lines = "".join(f"{name} = {value}\n" for name, value in points.items())
    (copied / "entry_points.txt").write_text(f"[skipjoin.recipes]\n{lines}")
