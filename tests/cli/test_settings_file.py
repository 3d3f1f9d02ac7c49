from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from skipjoin.cli import app
from skipjoin.cli.settings_file import unknown_variables

FILE = """\
# A comment.
model: tally
profile: off
max_num_seqs: 64
port: 1000
recipe: fastserve
set: {starvation_s: 3, paced: false}
api-key: [a, b c]
enforce-eager: true
dtype: float32
"""


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    def run_server(engine: Any, server: Any, forecasts: Any, **_: Any) -> int:
        names = ("model", "profile", "max_num_seqs", "recipe_params", "enforce_eager", "dtype")
        found.append({name: getattr(engine, name) for name in names} | {"port": server.port, "keys": server.api_keys})
        return 0

    monkeypatch.setattr("skipjoin.server.lifecycle.run_server", run_server)
    monkeypatch.delenv("SKIPJOIN_API_KEY", raising=False)
    return found


def test_flags_override_the_environment_which_overrides_a_file(
    served: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(FILE)
    monkeypatch.setenv("SKIPJOIN_PORT", "2000")
    monkeypatch.setenv("SKIPJOIN_DTYPE", "bfloat16")
    for args in ([], ["--port", "3000", "--set", "quantum_s=2", "--no-enforce-eager"]):
        run = CliRunner().invoke(app, ["serve", "--config", str(file), *args])
        assert run.exit_code == 0, run.output
    params = {"starvation_s": 3.0, "paced": False}
    first = {"model": "tally", "profile": "off", "max_num_seqs": 64, "recipe_params": params, "enforce_eager": True}
    first |= {"dtype": "bfloat16", "port": 2000, "keys": ("a", "b c")}
    assert served == [first, first | {"port": 3000, "recipe_params": {"quantum_s": 2.0}, "enforce_eager": False}]


def test_single_value_is_accepted_for_a_list(served: list[dict[str, Any]], tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("api-key: secret\nrecipe: fastserve\nset: starvation_s=3\n")
    run = CliRunner().invoke(app, ["serve", "--config", str(file)])
    assert run.exit_code == 0, run.output
    assert (served[0]["keys"], served[0]["recipe_params"]) == (("secret",), {"starvation_s": 3.0})


def test_environment_sets_model_and_parameters(served: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPJOIN_MODEL", "/some/model")
    monkeypatch.setenv("SKIPJOIN_RECIPE", "fastserve")
    monkeypatch.setenv("SKIPJOIN_SET", "starvation_s=3 paced=false")
    monkeypatch.setenv("SKIPJOIN_MAX_NUM_SEQ", "7")
    run = CliRunner().invoke(app, ["serve"])
    assert (served[0]["model"], served[0]["recipe_params"]) == ("/some/model", {"starvation_s": 3.0, "paced": False})
    assert "warning: SKIPJOIN_MAX_NUM_SEQ is no setting; did you mean max_num_seqs" in run.stderr
    monkeypatch.setenv("SKIPJOIN_PORT", "five")
    assert "(from SKIPJOIN_PORT=five)" in CliRunner().invoke(app, ["serve"]).stderr
    assert list(unknown_variables(["SKIPJOIN_PORT"], {"SKIPJOIN_PORT": "1", "PORT": "1"})) == []


def test_paths_that_no_shell_has_expanded_are_in_the_home_folder(
    served: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "server.yaml").write_text("model: ~/models/one\nprofile: ~/none.json\n")
    for args in (["--profile", "off"], ["--profile=off", "--port=0"], ["--profile=off", "--timeline=~/missing/a"]):
        CliRunner().invoke(app, ["serve", "--config=~/server.yaml", *args])
    assert [found["model"] for found in served] == [str(tmp_path / "models" / "one")] * 3
    wrong = CliRunner().invoke(app, ["serve", "--config=~/server.yaml"])
    assert f"--profile {tmp_path}/none.json cannot be read" in wrong.stderr


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("prot: 5\n", ", line 1: there is no setting 'prot'; did you mean port?"),
        ("\nport: 5\nport: 6\n", ", line 3: port is given twice"),
        ("scheduling-policy: fcfs\nrecipe: fcfs\n", ", line 2: recipe is given twice"),
        ("port:\n", ", line 1: port must have a value"),
        ("api-key: null\n", ", line 1: api-key must have a value"),
        ("api-key: [a, ~]\n", ", line 1: api-key must have a value"),
        ("set: {a: [1]}\n", ", line 1: set must have one value, not several"),
        ("port: [1, 2]\n", ", line 1: port must have one value, not several"),
        ("config: other.yaml\n", ", line 1: there is no setting 'config'"),
        ("- port\n", " must be a mapping, such as port: 8000"),
        ("port: [5\n", ": not YAML: "),
        ("set: " + "[" * 3000 + "]" * 3000, ": its values are nested too deeply"),
        ("\nport: five\n", "server.yaml: five)"),
        ("port: 70000\n", "port must be in [0, 65535], got 70000"),
        (None, ": No such file or directory"),
    ],
)
def test_invalid_file_error_names_the_line(tmp_path: Path, text: str | None, error: str) -> None:
    file = tmp_path / "server.yaml"
    if text is not None:
        file.write_text(text)
    run = CliRunner().invoke(app, ["serve", "--config", str(file)])
    assert run.exit_code == 2, run.output
    assert error in run.stderr


def test_simulate_accepts_a_settings_file(tmp_path: Path) -> None:
    file = tmp_path / "runs.yaml"
    file.write_text("model: opt-13b\nrates: 1,2\nrequests: 2\nlengths: fixed:16,2\nrecipes: lifo\n")
    run = CliRunner().invoke(app, ["simulate", "--config", str(file)])
    assert "recipe must be one of" in run.stderr
    run = CliRunner().invoke(app, ["simulate", "--config", str(file), "--recipes", "fcfs", "--jobs", "1"])
    assert run.exit_code == 0, run.output
    assert "2/2" in run.output
