from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from skipjoin.config import EngineConfig, ForecastConfig
from skipjoin.engine.forecasting import chosen_forecasts
from skipjoin.forecast import Forecaster, default_folder, make_forecaster, words
from skipjoin.forecast.store import STATE

PROMPT = words("Tell me about the sea")


def make(served: str = "model", entries: int = 50) -> Forecaster:
    return make_forecaster(ForecastConfig(forecast_entries=entries), served, lambda: 0.0)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    forecaster = make()
    for _ in range(30):
        forecaster.learn(forecaster.forecast(PROMPT, 4096), 700, exact=True)
    assert forecaster.save(tmp_path)
    (folder,) = tmp_path.iterdir()
    return folder


def change_json(folder: Path, **values: object) -> None:
    file = folder / STATE
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def arrays(folder: Path) -> Path:
    (file,) = folder.glob("*.safetensors")
    return file


def with_valid_hash(folder: Path, change) -> None:
    """Change the arrays and update their hash in the JSON file, so that the hash does not reveal the damage."""
    import hashlib  # noqa: PLC0415

    found = load_file(arrays(folder))
    change(found)
    save_file(found, arrays(folder))
    change_json(folder, sha256=hashlib.sha256(arrays(folder).read_bytes()).hexdigest())


DAMAGE = {
    "garbage JSON": lambda folder: (folder / STATE).write_bytes(b"\xff{"),
    "empty JSON": lambda folder: (folder / STATE).write_bytes(b""),
    "a JSON list": lambda folder: (folder / STATE).write_text("[]"),
    "another format": lambda folder: change_json(folder, format=99),
    "another model": lambda folder: change_json(folder, served="other"),
    "another width": lambda folder: change_json(folder, width=8),
    "a path outside": lambda folder: change_json(folder, arrays="../../etc/passwd"),
    "missing arrays": lambda folder: arrays(folder).unlink(),
    "truncated arrays": lambda folder: arrays(folder).write_bytes(arrays(folder).read_bytes()[:1000]),
    "garbage arrays": lambda folder: arrays(folder).write_bytes(os.urandom(4096)),
    "a missing array": lambda folder: with_valid_hash(folder, lambda found: found.pop("prior.ended")),
    "an array of another shape": lambda folder: with_valid_hash(
        folder, lambda found: found.update({"prior.ended": np.zeros(3)})
    ),
    "numbers that are not finite": lambda folder: with_valid_hash(
        folder, lambda found: found["model.head.weights"].fill(np.nan)
    ),
    "fewer vectors than lengths": lambda folder: with_valid_hash(
        folder, lambda found: found.update({"model.index.vectors": np.zeros((7, 256), np.float16)})
    ),
    "vectors of another width": lambda folder: with_valid_hash(
        folder, lambda found: found.update({"model.index.vectors": np.zeros((30, 7), np.float16)})
    ),
    "lengths of zero tokens": lambda folder: with_valid_hash(folder, lambda found: found["model.index.tokens"].fill(0)),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_state_is_moved_aside_with_one_warning(saved: Path, damage, caplog) -> None:
    damage(saved)
    forecaster = make()
    assert not forecaster.load(saved.parent)
    assert len(caplog.records) == 1
    assert saved.name in caplog.text
    assert not saved.exists()
    assert len(list(saved.parent.glob("*.bad-*"))) == 1
    # The forecaster starts without state and can be saved.
    assert forecaster.forecast(PROMPT, 4096).forecast == make().forecast(PROMPT, 4096).forecast
    assert forecaster.save(saved.parent)
    assert make().load(saved.parent)


def test_the_number_of_damaged_states_is_limited(tmp_path: Path) -> None:
    for _ in range(6):
        make().save(tmp_path)
        (folder,) = (found for found in tmp_path.iterdir() if ".bad-" not in found.name)
        (folder / STATE).write_text("damaged")
        make().load(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_states_of_models_are_separate(saved: Path) -> None:
    other = make("other/model")
    assert not other.load(saved.parent)
    assert other.save(saved.parent)
    assert len(list(saved.parent.iterdir())) == 2
    assert make().load(saved.parent)


@pytest.mark.parametrize("failing", ["write", "fsync", "replace"])
def test_a_full_disk_preserves_the_old_state(saved: Path, monkeypatch, caplog, failing: str) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    forecaster = make()
    forecaster.learn(forecaster.forecast(PROMPT, 100), 5, exact=True)
    with monkeypatch.context() as patch:
        if failing == "write":
            patch.setattr(os, "fdopen", full)
        else:
            patch.setattr(os, failing, full)
        assert not forecaster.save(saved.parent)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "No space left" in caplog.text
    assert make().load(saved.parent)
    assert {file.suffix for file in saved.iterdir()} == {".json", ".safetensors"}


def test_saving_again_replaces_the_files(saved: Path) -> None:
    forecaster = make()
    forecaster.load(saved.parent)
    forecaster.learn(forecaster.forecast(PROMPT, 4096), 3, exact=True)
    forecaster.save(saved.parent)
    assert sorted(file.suffix for file in saved.iterdir()) == [".json", ".safetensors"]


def test_a_folder_that_cannot_be_created_gives_a_warning(tmp_path: Path, caplog) -> None:
    (tmp_path / "file").write_text("")
    assert not make().save(tmp_path / "file")
    assert not make().load(tmp_path / "file")
    assert len(caplog.records) <= 2


def test_the_default_folder_is_in_the_user_cache(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("SKIPJOIN_FORECAST_DIR", str(tmp_path / "own"))
    assert default_folder() == tmp_path / "own"
    monkeypatch.delenv("SKIPJOIN_FORECAST_DIR")
    assert default_folder() == tmp_path / "skipjoin" / "forecasts"


def test_folders_are_private_to_the_user(tmp_path: Path) -> None:
    """This holds for any umask, and whether the server or the first save creates the folder."""
    engine = EngineConfig(recipe="fcfs")
    before = os.umask(0o022)
    try:
        chosen_forecasts(ForecastConfig(forecast_dir=str(tmp_path / "named")), engine)
        assert make().save(tmp_path / "default")
    finally:
        os.umask(before)
    folders = [tmp_path / "named", tmp_path / "default", *(tmp_path / "default").iterdir()]
    assert [folder.stat().st_mode & 0o777 for folder in folders] == [0o700] * 3
