from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from test_predict_command import rows, run, write

from skipjoin.config import EngineConfig
from skipjoin.engine.forecasting import chosen_forecasts, open_keeper
from skipjoin.forecast import ForecastConfig, make_forecaster, words
from skipjoin.forecast.evaluate import Sample
from skipjoin.forecast.train import train_alise
from skipjoin.forecast.trained import Trained
from skipjoin.options import ConfigError

# Text of a prompt by its only token, as a server's tokenizer has it.
TEXTS = {1: "count to five", 2: "tell a long story about a thing7"}


def text_of(prompt) -> str:
    return TEXTS[prompt[0]]


@pytest.fixture(scope="module", params=["alise", "learned"])
def state(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    found = run(
        "train", "--trace", write(folder / "t.jsonl.gz", rows(300)), "--out", folder / "state",
        "--forecaster", request.param,
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    return folder / "state"


def lengths(keeper) -> list[float]:
    return [keeper.forecast([token], 4096).forecast.tokens for token in TEXTS]


def keep(state: Path, folder: Path):
    config = chosen_forecasts(
        ForecastConfig(forecast_state=str(state), forecast_dir=str(folder)), EngineConfig(recipe="alise")
    )
    assert config is not None
    return open_keeper(config, model="tally", folder="", text_of=text_of)


def test_a_server_starts_from_the_trained_state_and_keeps_what_it_learns(state: Path, tmp_path: Path) -> None:
    keeper = keep(state, tmp_path / "own")
    short, long = lengths(keeper)
    assert short < 40
    assert long > 200
    for _ in range(60):
        keeper.learn(keeper.forecast([1], 4096), 900, exact=True)
    keeper.close()
    assert lengths(keep(state, tmp_path / "own"))[0] > 4 * short
    assert lengths(keep(state, tmp_path / "another"))[0] == pytest.approx(short)
    # What was learned from a trained state does not stand in for another one, nor for learning from nothing.
    fresh = ForecastConfig(forecaster="alise", forecast_dir=str(tmp_path / "own"))
    assert len(open_keeper(fresh, model="tally", folder="", text_of=text_of)) == 0
    with pytest.raises(ConfigError, match="forecaster must be"):
        Trained.open(state).configure(ForecastConfig(forecaster="prior"))
    with pytest.raises(ConfigError, match="forecast_url"):
        chosen_forecasts(ForecastConfig(forecast_state=str(state)), EngineConfig(), url="http://127.0.0.1:1")


def test_a_state_without_texts_or_with_damage_is_refused(state: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs the texts"):
        make_forecaster(ForecastConfig(forecast_state=str(state)))
    with pytest.raises(ConfigError, match="there is no folder"):
        Trained.open(tmp_path / "missing")
    make_forecaster(ForecastConfig(forecaster="alise")).save(tmp_path)
    with pytest.raises(ConfigError, match="it was not trained"):
        Trained.open(next(tmp_path.iterdir()))
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in state.iterdir():
        content = file.read_bytes()
        (copy / file.name).write_bytes(content[:-1] + b"?" if file.suffix == ".safetensors" else content)
    with pytest.raises(ConfigError, match="is not what was written"):
        make_forecaster(ForecastConfig(forecast_state=str(copy)), text_of=text_of)


def test_evaluate_measures_a_trained_state(state: Path, tmp_path: Path) -> None:
    found = run(
        "evaluate", "--trace", write(tmp_path / "t.jsonl", rows(60)), "--state", state, "--json", tmp_path / "r"
    )
    assert found.exit_code == 0, found.output
    by_name = {one["name"]: one for one in json.loads((tmp_path / "r").read_text())["forecasters"]}
    assert by_name["trained"]["r"] > 0.9
    assert by_name["trained"]["mae"] < 0.5 * by_name["prior"]["mae"]


def test_equal_prompts_and_conversations_are_on_one_side_of_the_split(tmp_path: Path) -> None:
    from skipjoin.cli.predict_train import _held_out  # noqa: PLC0415

    lines = [{"prompt": f"question {number % 60}", "output_tokens": 3} for number in range(300)]
    conversations = [line | {"conv": f"c{number % 40}", "prompt": f"q {number}"} for number, line in enumerate(lines)]
    for given, key in ((lines, "prompt"), (conversations, "conv")):
        file = write(tmp_path / "t.jsonl", given)
        held = _held_out(file, [Sample(words(line["prompt"]), 3) for line in given])
        sides = {line[key]: set() for line in given}
        for line, is_held in zip(given, held, strict=True):
            sides[line[key]].add(is_held)
        assert all(len(side) == 1 for side in sides.values())
        assert 0.05 < np.mean(held) < 0.4


def test_held_out_rows_choose_and_do_not_train() -> None:
    """With lengths that no prompt explains, the error on held-out rows is that of a constant; a leak would lower it."""
    drawn = np.random.default_rng(0)
    samples = [Sample(words(f"prompt {number}"), int(np.exp(drawn.normal(5, 1)))) for number in range(400)]
    held = [number % 5 == 0 for number in range(400)]
    forecaster = make_forecaster(ForecastConfig(forecaster="alise"))
    found = train_alise(forecaster, forecaster.model, samples, held, lambda *_: None)
    logs = np.log([sample.tokens for sample in samples])
    constant = np.abs(logs[held] - np.median(logs[held])).mean()
    assert found.chosen.error > 0.9 * constant
    assert found.chosen.error <= found.decoder_error
    assert (found.rows, found.held_out) == (400, 80)


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (rows(12), "held out, fewer than 10"),
        ([*rows(30), {"prompt": "x", "output_tokens": "many"}], "line 31.*output_tokens.*must be an integer"),
        ([{"prompt_tokens": 3, "output_tokens": 4}] * 40, "no texts"),
    ],
)
def test_invalid_traces_give_a_one_line_error(tmp_path: Path, lines, text) -> None:
    found = run("train", "--trace", write(tmp_path / "t.jsonl", lines), "--out", tmp_path / "state")
    assert found.exit_code == 2
    *described, error = found.output.strip().splitlines()
    assert error.startswith("error: ")
    assert described in ([], [f"t.jsonl: {len(lines)} requests"])
    assert re.search(text, found.output)
    assert not (tmp_path / "state").exists()


def test_the_state_has_no_prompts(state: Path) -> None:
    described = json.loads((state / "state.json").read_text())
    assert described["trained"]["rows"] == 300
    for file in state.iterdir():
        assert b"story" not in file.read_bytes()
