from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipjoin.core.forecast import LENGTH_EDGES, length_bin, length_quantile
from skipjoin.forecast import ForecastConfig, Forecaster, make_forecaster, words
from skipjoin.forecast.calibrate import Calibrator
from skipjoin.forecast.mass import BINS, EDGES, hazards_of, mass_of, mean, position
from skipjoin.forecast.prior import Prior, first_guess
from skipjoin.options import ConfigError

KINDS = ("learned", "alise")
SHORT, LONG = words("Count to 5"), words("Count to 200")


def make(kind: str = "learned", entries: int = 200, clock=lambda: 0.0, max_age_s: float = 1e9) -> Forecaster:
    config = ForecastConfig(forecaster=kind, forecast_entries=entries, forecast_max_age_s=max_age_s)
    return make_forecaster(config, "model", clock)


def teach(forecaster: Forecaster, requests: int = 150, max_tokens: int = 4096) -> list[float]:
    """Learn from two kinds of prompts, with 11 and about 600 output tokens, and return the forecasts."""
    forecasts = []
    for number in range(requests):
        prompt, tokens = (SHORT, 11) if number % 2 else (LONG, 560 + number % 60)
        predicted = forecaster.forecast(prompt, max_tokens)
        forecasts.append(predicted.forecast.tokens)
        forecaster.learn(predicted, min(tokens, max_tokens), exact=tokens < max_tokens)
    return forecasts


@pytest.mark.parametrize("kind", KINDS)
@given(
    prompt=st.lists(st.integers(0, 200_000), max_size=60),
    max_tokens=st.integers(1, 1 << 20),
    learned=st.lists(st.tuples(st.integers(1, 5000), st.booleans()), max_size=8),
)
def test_a_forecast_is_a_distribution_within_the_cap(kind, prompt, max_tokens, learned) -> None:
    forecaster = make(kind)
    for tokens, exact in learned:
        forecaster.learn(forecaster.forecast(prompt, 8192), tokens, exact=exact)
    predicted = forecaster.forecast(prompt, max_tokens)
    for forecast in (predicted.forecast, forecaster.prior(max_tokens)):
        assert sum(forecast.mass) == pytest.approx(1.0)
        assert min(forecast.mass) >= 0
        assert len(forecast.mass) <= length_bin(max_tokens) + 1
        assert 1 <= forecast.tokens <= max_tokens
    low, high = predicted.interval
    assert 1 <= low <= high <= max_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_forecasters_learn_lengths_by_kind_of_prompt(kind) -> None:
    forecaster = make(kind)
    before = abs(forecaster.forecast(SHORT, 4096).forecast.tokens - 11)
    teach(forecaster)
    short, long = (forecaster.forecast(prompt, 4096).forecast.tokens for prompt in (SHORT, LONG))
    assert abs(short - 11) < before / 2
    assert 400 < long < 800


@pytest.mark.parametrize("kind", KINDS)
def test_forecasts_are_deterministic_and_survive_a_restart(kind, tmp_path) -> None:
    one, other = make(kind), make(kind)
    assert teach(one) == teach(other)
    assert one.save(tmp_path)
    restarted = make(kind)
    assert restarted.load(tmp_path)
    for prompt in (SHORT, LONG, words("something else"), []):
        assert restarted.forecast(prompt, 900).forecast == one.forecast(prompt, 900).forecast
    assert restarted.prior(50) == one.prior(50)


def test_truncated_outputs_are_not_learned_as_exact_lengths() -> None:
    """Every output would have 1,000 tokens, but half of the requests have a max_tokens of 100."""
    forecaster = make()
    for number in range(300):
        max_tokens = 100 if number % 2 else 4096
        predicted = forecaster.forecast(words(f"prompt {number}"), max_tokens)
        forecaster.learn(predicted, min(1000, max_tokens), exact=max_tokens > 1000)
    assert forecaster.prior(4096).tokens > 700
    assert forecaster.forecast(words("prompt 7"), 4096).forecast.tokens > 700
    assert forecaster.forecast(words("prompt 7"), 100).forecast.tokens > 95


def test_intervals_have_their_coverage_at_every_prompt_length() -> None:
    """Lengths are lognormal, and their spread grows with the prompt."""
    drawn = np.random.default_rng(1)
    forecaster = make(entries=1000)
    inside: list[tuple[int, bool]] = []
    for _ in range(1500):
        prompt = drawn.integers(0, 50, size=int(drawn.integers(1, 80))).tolist()
        tokens = max(1, int(np.exp(5 + drawn.normal() * (0.2 + len(prompt) / 60))))
        predicted = forecaster.forecast(prompt, 1 << 20)
        inside.append((len(prompt), predicted.interval[0] <= tokens <= predicted.interval[1]))
        forecaster.learn(predicted, tokens, exact=True)
    later = np.array(inside[600:])
    assert 0.75 <= later[:, 1].mean() <= 0.85
    quartiles = np.searchsorted(np.quantile(later[:, 0], [0.25, 0.5, 0.75]), later[:, 0])
    assert min(later[quartiles == quartile, 1].mean() for quartile in range(4)) >= 0.7


def test_permuted_lengths_give_uncorrelated_forecasts() -> None:
    drawn = np.random.default_rng(2)
    forecaster = make(entries=1000)
    pairs = []
    for number in range(1000):
        predicted = forecaster.forecast(drawn.integers(0, 200, size=12).tolist(), 4096)
        tokens = int(np.exp(drawn.normal() + 4)) + 1
        if number >= 300:
            pairs.append((predicted.forecast.tokens, tokens))
        forecaster.learn(predicted, tokens, exact=True)
    assert abs(np.corrcoef(np.log(np.array(pairs)).T)[0, 1]) < 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_entries_are_bounded_in_number_and_age(kind, tmp_path) -> None:
    now = [0.0]
    forecaster = make(kind, entries=50, clock=lambda: now[0], max_age_s=100)
    index = forecaster.model._index
    teach(forecaster, 120)
    assert len(index) == 50
    now[0] = 99.0
    teach(forecaster, 10)
    assert len(index) == 50
    now[0] = 101.0
    teach(forecaster, 1)
    assert len(index) == 11
    forecaster.save(tmp_path)
    restarted = make(kind, entries=50, clock=lambda: now[0], max_age_s=100)
    assert restarted.load(tmp_path)
    assert len(restarted.model._index) == 11


def test_settings_outside_their_bounds_are_refused() -> None:
    for values, text in (
        ({"forecaster": "crystal"}, "forecaster must be one of"),
        ({"forecaster": "prior", "forecast_encoder": "embeddings"}, "must be hashed with forecaster prior"),
        ({"forecast_entries": 0}, "forecast_entries must be in"),
        ({"forecast_max_age_s": 0}, "forecast_max_age_s must be in"),
    ):
        with pytest.raises(ConfigError, match=text):
            ForecastConfig(**values)


@given(st.lists(st.floats(1e-6, 1), min_size=BINS, max_size=BINS), st.integers(1, 1 << 20))
def test_distributions_agree_with_their_hazards_ranks_and_quantiles(weights, tokens) -> None:
    mass = np.array(weights) / sum(weights)
    assert mass_of(hazards_of(mass)) == pytest.approx(mass, abs=1e-6)
    end = length_bin(tokens)
    below = mass[:end].sum()
    assert below <= position(mass, tokens) <= below + mass[end] + 1e-9
    assert length_quantile(mass, 0.1) <= length_quantile(mass, 0.5) <= length_quantile(mass, 0.9)
    assert 1 <= mean(mass, tokens) <= tokens


def test_the_prior_corrects_for_aborted_requests() -> None:
    """The prior is a Kaplan-Meier estimate: of 1,000 requests of 64 or 1,024 tokens, every fourth is aborted at 200."""
    prior = Prior()
    for number in range(1000):
        tokens = 64 if number % 2 else 1024
        aborted = number % 4 == 0
        prior.learn(length_bin(min(tokens, 200) if aborted else tokens), not aborted or tokens < 200)
    mass = prior.mass()
    assert mass[length_bin(64)] == pytest.approx(0.5, abs=0.02)
    assert mass[length_bin(1024)] == pytest.approx(0.5, abs=0.02)
    assert first_guess().sum() == pytest.approx(1.0)


def test_calibration_widens_overconfident_forecasts() -> None:
    drawn = np.random.default_rng(3)
    calibrator = Calibrator()
    for _ in range(2000):
        # Calibrated forecasts have uniform ranks; these are concentrated at both ends, as those of narrow forecasts.
        calibrator.learn(10, float(np.clip(0.5 + drawn.choice([-1, 1]) * drawn.uniform(0.3, 0.5), 1e-6, 1)), True)
    narrow = np.exp(-0.5 * ((np.arange(BINS) - 16) / 1.5) ** 2)
    narrow /= narrow.sum()
    wide = calibrator.apply(narrow, 10)
    assert wide.sum() == pytest.approx(1.0)
    assert length_quantile(wide, 0.9) / length_quantile(wide, 0.1) > 1.3 * length_quantile(
        narrow, 0.9
    ) / length_quantile(narrow, 0.1)


def test_edges_match_the_core() -> None:
    assert len(EDGES) == len(LENGTH_EDGES) == BINS


@pytest.mark.parametrize("threads", [None, 2])
def test_openblas_has_one_thread_unless_the_environment_sets_more(threads: int | None) -> None:
    """The API process loads numpy with its forecasters; its subprocesses inherit the environment unchanged."""
    name = "OPENBLAS_NUM_THREADS"
    environment = {key: value for key, value in os.environ.items() if key != name}
    variables = environment if threads is None else environment | {name: str(threads)}
    program = f"import os, psutil, skipjoin.forecast; print(psutil.Process().num_threads(), os.environ.get({name!r}))"
    run = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True)
    # OpenBLAS starts at most as many threads as this process may use processors.
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    assert run.stdout.split() == [str(min(threads or 1, usable)), str(threads)]
