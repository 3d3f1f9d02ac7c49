from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from typer import testing
from typer.testing import CliRunner, Result

from skipjoin.cli import app
from skipjoin.forecast import ForecastConfig, make_forecaster, words

TEXTS = {"count to five": 12, "tell a long story about a {}": 400, "translate {} into french": 40}


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["predict", *map(str, args)])


def rows(count: int, **more) -> list[dict]:
    drawn = np.random.default_rng(0)
    found = []
    for number in range(count):
        text, tokens = list(TEXTS.items())[int(drawn.integers(len(TEXTS)))]
        tokens = max(1, int(tokens * np.exp(drawn.normal() * 0.1)))
        extra = {name: value(number, tokens) for name, value in more.items()}
        found.append({"prompt": text.format(f"thing{number}"), "output_tokens": tokens} | extra)
    return found


def write(file: Path, lines: list[dict]) -> Path:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    file.write_bytes(gzip.compress(text.encode()) if file.suffix == ".gz" else text.encode())
    return file


def test_evaluate_ranks_forecasters_by_quality(tmp_path: Path) -> None:
    trace = write(
        tmp_path / "t.jsonl.gz",
        rows(400, split=lambda number, _: "train" if number % 2 else "val", again=lambda _, tokens: tokens * 2),
    )
    found = run("evaluate", "--trace", trace, "--second-run", "again", "--json", tmp_path / "out.json")
    assert found.exit_code == 0, found.output
    record = json.loads((tmp_path / "out.json").read_text())
    assert (record["train"], record["test"]) == (200, 200)
    assert record["machine"]
    by_name = {forecaster["name"]: forecaster for forecaster in record["forecasters"]}
    assert list(by_name) == ["proxy", "alise", "head", "learned", "prior", "oracle", "permuted"]
    for name in ("proxy", "alise", "head", "learned"):
        assert by_name[name]["r"] > 0.9
        assert by_name[name]["pairwise"] > 0.8
        assert by_name[name]["milliseconds"] > 0
        assert name in found.output
    assert abs(by_name["permuted"]["r"]) < 0.3
    assert by_name["oracle"]["r"] == pytest.approx(1.0)
    assert by_name["oracle"]["mae"] > 50  # the second run is twice as long


def test_a_conversation_is_never_split_between_train_and_test(tmp_path: Path) -> None:
    from skipjoin.cli.predict import is_training_row  # noqa: PLC0415

    parts = {
        conv: {is_training_row({"conv": conv}, place, 100) for place in range(100)} for conv in ("a", "b", "c", "d")
    }
    assert all(len(part) == 1 for part in parts.values())
    assert len(set.union(*parts.values())) == 2
    assert [is_training_row({}, place, 4) for place in range(4)] == [True, True, False, False]


@pytest.mark.parametrize(
    ("lines", "options", "text"),
    [
        (rows(40), ["--second-run", "other"], "no column other"),
        (rows(40), ["--entries", 0], "entries must be in"),
        (rows(40), ["--encoder", "/missing"], "nor a folder"),
        (rows(12), [], "fewer than 10"),
        ([{"prompt_tokens": 3, "output_tokens": 4}] * 40, [], "no texts"),
        ([], [], "no rows"),
    ],
)
def test_invalid_input_gives_a_one_line_error(tmp_path: Path, lines, options, text) -> None:
    found = run("evaluate", "--trace", write(tmp_path / "t.jsonl", lines), *options)
    assert found.exit_code == 2
    assert text in found.output
    *described, error = found.output.strip().splitlines()
    assert error.startswith("error: ")
    assert described in ([], [f"t.jsonl: {len(lines)} requests"])


def test_export_contains_no_prompts_and_reset_removes_states(tmp_path: Path) -> None:
    for served, secret in (("one", "swordfish"), ("two", "password")):
        forecaster = make_forecaster(ForecastConfig(forecast_entries=50), served, lambda: 7.0)
        for tokens in (5, 6, 7):
            forecaster.learn(forecaster.forecast(words(secret), 100), tokens, exact=tokens < 7)
        forecaster.save(tmp_path)
    out = tmp_path / "out.jsonl"
    assert run("export", "--forecast-dir", tmp_path, "--out", out).exit_code == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    entries = [line for line in lines if "output_tokens" in line]
    assert [(line["output_tokens"], line["exact"]) for line in entries] == [(5, True), (6, True), (7, False)] * 2
    assert sum("length_distribution" in line for line in lines) == 2
    hashes = [str(number) for secret in ("swordfish", "password") for number in words(secret)]
    for file in tmp_path.rglob("*"):
        if file.is_file():
            assert not any(text.encode() in file.read_bytes() for text in ["swordfish", "password", *hashes])
    assert "removed" in run("reset", "--forecast-dir", tmp_path, "--model", "one").output
    assert len([folder for folder in tmp_path.iterdir() if folder.is_dir()]) == 1
    run("reset", "--forecast-dir", tmp_path, "--yes")
    assert "nothing was learned" in run("reset", "--forecast-dir", tmp_path).output
    assert run("export", "--forecast-dir", tmp_path, "--out", out).exit_code == 2


@pytest.mark.parametrize(
    ("answer", "options", "remains"),
    [
        (None, "", True),
        (None, "--yes", False),
        (None, "--model one", False),
        ("n\n", "", True),
        ("y\n", "", False),
    ],
)
def test_reset_of_all_models_names_them_and_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str | None, options: str, remains: bool
) -> None:
    make_forecaster(ForecastConfig(forecast_entries=50), "one", lambda: 7.0).save(tmp_path)

    monkeypatch.setattr(testing._NamedTextIOWrapper, "isatty", lambda stream: answer is not None, raising=False)
    [state] = tmp_path.iterdir()
    command = ["predict", "reset", "--forecast-dir", str(tmp_path), *options.split()]
    found = CliRunner().invoke(app, command, input=answer)
    assert state.exists() == remains
    assert found.exit_code == (0 if not remains else 1 if answer else 2)
    assert str(state) in found.output
    assert ("--model or --yes" in found.output) == (remains and answer is None)
