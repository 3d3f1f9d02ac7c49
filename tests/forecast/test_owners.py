from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from skipjoin.config import ForecastConfig
from skipjoin.config.key_files import owner_of_key
from skipjoin.engine.forecasting import ForecastKeeper, open_keeper
from skipjoin.forecast import Predicted, make_forecaster, owners, words
from skipjoin.forecast.config import make_owner_forecasters
from skipjoin.forecast.encode import HashedTokens
from skipjoin.forecast.owners import OwnerForecasters
from skipjoin.forecast.prior import first_guess
from support.worlds import exhaustive

PROMPT, OTHER = words("Tell me about the sea"), words("Count from one to ten")
KINDS = ("learned", "alise", "prior")
# Its encoder is that of all owners.
ENCODES = make_forecaster(ForecastConfig())


def make(kind: str = "learned", count: int = 10, folder: Path | None = None) -> OwnerForecasters:
    config = ForecastConfig(forecaster=kind, forecast_entries=640)
    return make_owner_forecasters(config, "model", HashedTokens(), count, folder)


def predicted(forecasters: OwnerForecasters, owner: str, prompt=PROMPT) -> Predicted:
    (encoded,) = ENCODES.encode([prompt])
    return forecasters.predict(owner, encoded, 8192)


def teach(forecasters: OwnerForecasters, owner: str, tokens: int, requests: int = 60, prompt=PROMPT) -> None:
    (encoded,) = ENCODES.encode([prompt])
    for _ in range(requests):
        forecasters.learn(owner, forecasters.predict(owner, encoded, 8192), tokens, exact=True)


def expected(forecasters: OwnerForecasters, owner: str, prompt=PROMPT) -> float:
    return predicted(forecasters, owner, prompt).forecast.tokens


@pytest.mark.parametrize("kind", KINDS)
def test_requests_of_one_owner_do_not_change_the_forecasts_of_another(kind: str) -> None:
    forecasters = make(kind)
    teach(forecasters, "victim", 200)
    before = predicted(forecasters, "victim", PROMPT), forecasters.prior("victim", 8192)
    teach(forecasters, "attacker", 4000, 200)
    after = predicted(forecasters, "victim", PROMPT), forecasters.prior("victim", 8192)
    assert after[0].forecast == before[0].forecast
    assert after[0].interval == before[0].interval
    assert after[1] == before[1]
    assert expected(forecasters, "attacker") > 1000


def total_variation(before: np.ndarray, after: np.ndarray) -> float:
    return float(np.abs(before - after).sum() / 2)


@pytest.mark.parametrize(
    ("others", "tokens"), [exhaustive(0, 1), (0, 4000), (1, 4000), exhaustive(3, 1), exhaustive(8, 4000)]
)
def test_one_owner_has_a_bounded_effect_on_the_shared_forecasts(others: int, tokens: int) -> None:
    forecasters = make("prior")
    for number in range(others):
        teach(forecasters, f"other {number}", 300, 600)
    before = forecasters.shared()
    teach(forecasters, "attacker", tokens, 2000)
    weight = 600 / 640  # the weight of each other owner, at most 1
    assert 0.5 / (others + 2) < total_variation(before, forecasters.shared()) <= 1 / (1 + others * weight + 1)


def test_a_new_owner_starts_from_the_shared_forecasts() -> None:
    forecasters = make()
    assert np.allclose(forecasters.shared(), first_guess())
    initial = expected(forecasters, "a")
    for owner in "bcdefg":
        teach(forecasters, owner, 900, 100, OTHER)
    assert expected(forecasters, "h") > 2 * initial
    assert forecasters.prior("i", 8192).tokens == pytest.approx(forecasters.prior("h", 8192).tokens, rel=0.05)
    teach(forecasters, "h", 20, 40)
    assert expected(forecasters, "h") < 60  # the shared forecasts count as two requests


@pytest.mark.parametrize("kind", ["learned", "alise"])
def test_a_server_without_keys_forecasts_like_a_single_forecaster(kind: str) -> None:
    config = ForecastConfig(forecaster=kind, forecast_dir="none")
    keeper = open_keeper(config, model="model", folder=".", text_of=str)
    single = make_forecaster(config, "model")
    for number in range(120):
        prompt, tokens = ((PROMPT, 40), (OTHER, 700))[number % 2]
        one, other = keeper.forecast(prompt, 8192, "anonymous"), single.forecast(prompt, 8192)
        assert one.forecast == other.forecast
        keeper.learn(one, tokens, exact=True, owner="anonymous")
        single.learn(other, tokens, exact=True)
    assert keeper.prior(100, "anonymous") == single.prior(100)
    assert len(keeper) == len(single) == 120


def test_many_owners_take_bounded_memory_and_are_restored_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owners, "MAX_OWNERS", 8)
    forecasters = make(count=1000, folder=tmp_path)
    assert predicted(forecasters, "first", PROMPT).forecast.tokens > 0
    for number in range(40):
        teach(forecasters, f"owner {number}", 11, 12)
    assert len(forecasters._owners) == 8
    assert len(forecasters) <= 8 * 640 // 64  # each owner has at most its share of the entries
    assert forecasters._changed <= set(forecasters._owners)
    before = expected(forecasters, "owner 39")
    assert abs(expected(forecasters, "owner 0") - before) < 5  # its state was saved on eviction


def test_states_contain_hashed_keys_and_belong_to_their_owner(tmp_path: Path) -> None:
    key = "sk-very-secret-key"
    forecasters = make(folder=tmp_path)
    teach(forecasters, owner_of_key(key.encode()), 700)
    teach(forecasters, "other", 11)
    assert forecasters.save()
    described = [json.loads((folder / "state.json").read_text()) for folder in sorted(tmp_path.iterdir())]
    assert {row["owner"] for row in described} == {owner_of_key(key.encode()), "other"}
    for file in tmp_path.rglob("*"):
        assert key not in file.name
        assert file.is_dir() or key.encode() not in file.read_bytes()
    again = make(folder=tmp_path)
    assert expected(again, owner_of_key(key.encode())) == pytest.approx(700, rel=0.3)
    assert expected(again, "other") == pytest.approx(11, rel=0.5)


def open_kept(folder: Path, owner_count: int) -> ForecastKeeper:
    config = ForecastConfig(forecaster="learned", forecast_dir=str(folder))
    return open_keeper(config, model="model", folder=".", text_of=str, owners=owner_count)


def test_a_state_without_owner_is_not_used_for_an_owner(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It has the format without owners. Servers without keys use it, and servers with keys leave it unchanged."""
    keeper = open_kept(tmp_path, 0)
    for _ in range(60):
        keeper.learn(keeper.forecast(PROMPT, 8192), 1500, exact=True)
    keeper.close()
    (folder,) = tmp_path.iterdir()
    assert "owner" not in json.loads((folder / "state.json").read_text())
    assert open_kept(tmp_path, 0).forecast(PROMPT, 8192).forecast.tokens > 1000
    with caplog.at_level(logging.INFO):
        keyed = open_kept(tmp_path, 3)
    assert f"the state of all requests in {folder} is not used" in caplog.text
    assert keyed.forecast(PROMPT, 8192, "a").forecast.tokens < 400
    keyed.learn(keyed.forecast(PROMPT, 8192, "a"), 30, exact=True, owner="a")
    keyed.close()
    assert len(list(tmp_path.iterdir())) == 2
    assert open_kept(tmp_path, 0).forecast(PROMPT, 8192).forecast.tokens > 1000
