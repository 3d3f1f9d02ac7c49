from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from skipjoin.engine.learned import SAVE_EVERY_S, LearnedKeeper, state_file
from skipjoin.policies.length_model import LengthModel


def test_learned_lengths_are_saved_when_due_and_at_the_end(tmp_path: Path) -> None:
    now, file = [0.0], tmp_path / "folder" / "state.json"
    model = LengthModel()
    keeper = LearnedKeeper(model, file, lambda: now[0])
    keeper.load()
    keeper.save_if_due()
    model.note(None, 3, ended=True)
    keeper.save_if_due()
    now[0] = SAVE_EVERY_S
    keeper.save_if_due()
    keeper.close()
    assert json.loads(file.read_text()) == model.state()
    model.note(None, 4, ended=False)
    LearnedKeeper(model, file).close()
    assert json.loads(file.read_text()) != model.state(), "nothing was learned since the keeper was made"
    again = LengthModel()
    LearnedKeeper(again, file).load()
    assert again.hazards(None)[3] > LengthModel().hazards(None)[3]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"edges": [1]}', pytest.param("[" * 9999, id="deep")])
def test_a_damaged_state_is_learned_again(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    file = state_file(str(tmp_path), "org/model", "adaptive")
    file.write_text(content)
    model = LengthModel()
    with caplog.at_level(logging.WARNING):
        LearnedKeeper(model, file).load()
    assert model.state() == LengthModel().state()
    assert str(file) in caplog.text


def test_each_model_and_recipe_has_its_own_state(tmp_path: Path) -> None:
    pairs = [("a", "x"), ("a", "y"), ("b", "x"), ("a/b", "x"), ("a-b", "x")]
    assert len({state_file(str(tmp_path), *pair) for pair in pairs}) == len(pairs)
