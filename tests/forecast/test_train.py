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
from skipjoin.forecast.train import TRAINING, part_of_group, train_alise
from skipjoin.forecast.trained import Trained
from skipjoin.options import ConfigError

# Text of a prompt by its only token, as a server's tokenizer has it.
TEXTS = {1: "count to five", 2: "tell a long story about a thing7"}


def text_of(prompt) -> str:
    return TEXTS[prompt[0]]


@pytest.fixture(scope="module", params=["alise", "learned"])
def state(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    lines = rows(300, conv=lambda number, _: number + 1)
    found = run(
        "train", "--trace", write(folder / "t.jsonl.gz", lines), "--out", folder / "state",
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
    by_name = {forecaster["name"]: forecaster for forecaster in json.loads((tmp_path / "r").read_text())["forecasters"]}
    assert by_name["trained"]["r"] > 0.9
    assert by_name["trained"]["mae"] < 0.5 * by_name["prior"]["mae"]


def test_equal_prompts_and_conversations_are_on_one_side_of_the_split(tmp_path: Path) -> None:
    from skipjoin.cli.predict_train import _parts  # noqa: PLC0415

    lines = [{"prompt": f"question {number % 60}", "output_tokens": 3} for number in range(300)]
    conversations = [line | {"conv": f"c{number % 40}", "prompt": f"q {number}"} for number, line in enumerate(lines)]
    for given, key in ((lines, "prompt"), (conversations, "conv")):
        file = write(tmp_path / "t.jsonl", given)
        parts = _parts(file, [Sample(words(line["prompt"]), 3) for line in given])
        sides = {line[key]: set() for line in given}
        for line, part in zip(given, parts, strict=True):
            sides[line[key]].add(part)
        assert all(len(side) == 1 for side in sides.values())
        assert 0.05 < np.mean(np.array(parts) > 0) < 0.4


def test_rows_that_choose_neither_train_nor_judge() -> None:
    """With lengths that no prompt explains, held-out rows are in order by chance; a leak would order them better."""
    drawn = np.random.default_rng(0)
    samples = [Sample(words(f"prompt {number}"), int(np.exp(drawn.normal(5, 1)))) for number in range(800)]
    parts = [(1 + number // 5 % 2) * (number % 5 == 0) for number in range(800)]
    forecaster = make_forecaster(ForecastConfig(forecaster="alise"))
    found = train_alise(forecaster, forecaster.model, samples, parts, lambda *_: None)
    assert abs(found.order - 0.5) < 0.04
    assert found.chosen.order > 0.52  # the best of 500 choices on the rows that chose
    assert (found.rows, found.held_out) == (800, 160)


def as_long_as_prompts(count: int) -> list[dict]:
    drawn = np.random.default_rng(0)
    return [
        {"prompt": " ".join(f"w{word}" for word in drawn.integers(50, size=length)), "output_tokens": int(10 * length)}
        for length in drawn.integers(2, 400, size=count)
    ]


def opposite_when_held_out(count: int) -> list[dict]:
    """Return rows whose first word means the opposite in those that are held out."""
    return [
        {
            "prompt": f"{'brief' if number % 2 else 'long'} {number}",
            "output_tokens": 10 + number % 7 + 400 * ((number % 2 == 0) == (part_of_group(str(number)) == TRAINING)),
            "conv": str(number),
        }
        for number in range(count)
    ]


# Words are random, but lengths of prompts calibrate the prior; or words mislead.
@pytest.mark.parametrize(
    ("forecaster", "lines"), [("alise", as_long_as_prompts(400)), ("learned", opposite_when_held_out(300))]
)
def test_a_forecaster_that_orders_worse_than_the_prior_is_not_written(tmp_path: Path, forecaster: str, lines) -> None:
    found = run(
        "train", "--trace", write(tmp_path / "t.jsonl", lines), "--out", tmp_path / "state", "--forecaster", forecaster
    )
    assert found.exit_code == 2
    own, prior = map(float, re.findall(r"\d\.\d{3}", found.output))
    assert own < prior
    assert not (tmp_path / "state").exists()


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
