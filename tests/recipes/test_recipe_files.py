from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from skipjoin import LLM
from skipjoin.cli import app
from skipjoin.config import ConfigError, EngineConfig
from skipjoin.recipes import RECIPES, find
from skipjoin.report.results import load_results

PAGE = Path(__file__).parents[2] / "docs" / "add-a-policy.md"
HEAD = "from __future__ import annotations\nfrom skipjoin.recipes import Params, Settings, baselines, recipe\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with the example of docs/add-a-policy.md."""
    (code,) = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "my_policy.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_recipe_of_a_file_is_simulated_along_with_others(folder: Path) -> None:
    """The first request runs alone; of the two others, the last one is due first."""
    (folder / "trace.csv").write_text(
        "arrival_s,prompt_tokens,output_tokens,deadline_s\n0,500,400,\n1,500,400,900\n2,500,4,90\n"
    )
    options = ["--model", "opt-13b", "--trace", "trace.csv", "--max-num-seqs", "1", "--out", "out.json", "--jobs", "1"]
    run = CliRunner().invoke(app, ["simulate", "--recipe", "fcfs,./my_policy.py:edf", *options])
    assert run.exit_code == 0, run.output
    fcfs, edf = load_results([folder / "out.json"])
    assert [record["recipe"] for record in (fcfs, edf)] == ["fcfs", "my_policy.py:edf"]
    assert edf["jct_s"]["p50"] < fcfs["jct_s"]["p50"]


def test_an_engine_finds_a_recipe_of_a_file_from_any_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = dict(RECIPES)
    config = EngineConfig(recipe="./my_policy.py:edf")
    monkeypatch.chdir("/")
    assert find(config.recipe).function is find(str(folder / "my_policy.py:edf")).function
    assert find(config.recipe).name == "my_policy.py:edf"
    assert known == RECIPES
    assert "edf" not in RECIPES


def test_a_recipe_of_a_file_has_parameters_and_may_share_a_name_with_the_package(folder: Path) -> None:
    (folder / "own.py").write_text(
        f"{HEAD}from dataclasses import dataclass\nfrom typing import Annotated\nfrom skipjoin.options import Option\n"
        "@dataclass(frozen=True, slots=True, kw_only=True)\n"
        "class Own(Params):\n    size: Annotated[int, Option('A size.', low=1)] = 3\n"
        "@recipe\ndef fcfs(s: Settings, p: Own):\n    return baselines.fcfs(s)\n"
    )
    fcfs = RECIPES["fcfs"]
    assert EngineConfig(recipe="own.py:fcfs", recipe_params={"size": 5}).recipe_params == {"size": 5}
    with pytest.raises(ConfigError, match="size must be at least 1, got 0"):
        EngineConfig(recipe="own.py:fcfs", recipe_params={"size": 0})
    assert find("fcfs") is fcfs


FAULTY = f"""\
{HEAD}from skipjoin.policies.ordering import FixedKey
from skipjoin.recipes.parts import preemptive

@recipe
def faulty(s: Settings):
    \"\"\"Orders by a missing attribute.\"\"\"
    return preemptive(s, lambda: FixedKey(lambda request: request.missing))
"""
FAULT = r"faulty\.py, line 9: AttributeError: 'Request' object has no attribute 'missing'"


def test_a_run_time_error_of_a_recipe_file_is_one_line_with_its_place(folder: Path) -> None:
    (folder / "faulty.py").write_text(FAULTY)
    options = ["--model", "opt-13b", "--rates", "1", "--duration", "9", "--jobs", "1"]
    run = CliRunner().invoke(app, ["simulate", "--recipe", "./faulty.py:faulty", *options])
    assert run.exit_code == 2
    assert re.search(rf"^error: recipe: .*{FAULT}$", run.output, re.MULTILINE)
    assert "Traceback" not in run.output
    with LLM("tally", recipe="./faulty.py:faulty", profile="off") as llm, pytest.raises(ConfigError, match=FAULT):
        llm.generate("Count from 3 to 12")


def test_recipes_of_a_file_are_listed_by_the_names_to_use(folder: Path) -> None:
    run = CliRunner().invoke(app, ["recipes", "./my_policy.py"])
    assert run.exit_code == 0, run.output
    (name,) = re.findall(r"^(\S+): ", run.output, re.MULTILINE)
    assert find(name).name == "my_policy.py:edf"
    (folder / "none.py").write_text("")
    run = CliRunner().invoke(app, ["recipes", "none.py"])
    assert (run.exit_code, run.output) == (
        2,
        "error: none.py has no function with the decorator @recipe of skipjoin.policy\n",
    )


@pytest.mark.parametrize(
    ("name", "code", "error"),
    [
        ("none.py:edf", None, r"recipe: .*none\.py: No such file or directory"),
        ("own.py:edf", f"{HEAD}\nundefined\n", r"own\.py, line 4: NameError: name 'undefined' is not defined"),
        ("own.py:edf", "def (:\n", r"own\.py: SyntaxError: .*line 1"),
        ("own.py:edf", "x = 1\n", r"own\.py has no function with the decorator @recipe"),
        ("own.py:edf", f"{HEAD}@recipe\ndef edg(s: Settings): ...\n", "there is no 'edf'; did you mean edg?"),
        ("own.py:edf", f"{HEAD}@recipe\ndef edf(s: Settings, p): ...\n", "the argument 'p' needs an annotation"),
        ("own.py:edf", f"{HEAD}@recipe\ndef edf(): ...\n", "a recipe has one or two arguments"),
        (
            "own.py",
            f"{HEAD}@recipe\ndef a_b(s: Settings): ...\n",
            r"recipe must be FILE:NAME for a file: .* has a-b",
        ),
    ],
)
def test_errors_of_a_recipe_file_name_the_file_and_the_cause(
    folder: Path, name: str, code: str | None, error: str
) -> None:
    if code is not None:
        (folder / "own.py").write_text(code)
    with pytest.raises(ConfigError, match=error):
        EngineConfig(recipe=name)
