from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from skipjoin import LLM, SamplingParams
from skipjoin.cli import app
from skipjoin.config import ConfigError, EngineConfig
from skipjoin.config.profile import (
    CACHE_VARIABLE,
    FORMAT,
    FitErrors,
    ProfileKey,
    cache_path,
    cached_profile,
    measures_alone,
    read_profile,
    write_profile,
)
from skipjoin.core.step import StepShape
from skipjoin.engine.build import assemble
from skipjoin.engine.profiling import startup
from skipjoin.engine.profiling.profiler import Effort
from skipjoin.engine.profiling.startup import profile_model
from skipjoin.policies.cost import LearningCost, LinearCost
from support.profiles import KEY, PROFILE

SECONDS = st.floats(0, 1e3)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv(CACHE_VARIABLE, str(folder))
    return folder


@given(terms=st.tuples(st.floats(1e-9, 1e3), *[SECONDS] * 6), errors=st.tuples(SECONDS, SECONDS), name=st.text())
def test_profile_round_trips_through_a_file(
    terms: tuple[float, ...], errors: tuple[float, float], name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("written") / "profile.json"
    profile = dataclasses.replace(
        PROFILE,
        key=dataclasses.replace(KEY, model=name),
        cost=LinearCost(*terms),
        stage_shares=(1.0,),
        errors=FitErrors(*errors, 1, 1),
    )
    write_profile(profile, path)
    assert read_profile(path) == profile
    assert [found.name for found in path.parent.iterdir()] == [path.name]


def damaged(change: Callable[[dict[str, Any]], object]) -> str:
    raw: dict[str, Any] = {"format": FORMAT, **json.loads(json.dumps(dataclasses.asdict(PROFILE)))}
    change(raw)
    return json.dumps(raw)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", f"format must be {FORMAT}, got None"),
        (damaged(lambda raw: raw.update(format=1)), f"format must be {FORMAT}, got 1"),
        (damaged(lambda raw: raw.pop("cost")), "cost is missing"),
        (damaged(lambda raw: raw["cost"].pop("decode")), "cost.decode is missing"),
        (damaged(lambda raw: raw["cost"].update(decode=-1e-9)), "cost.decode must be finite and at least 0"),
        (damaged(lambda raw: raw["cost"].update(decode=float("nan"))), "cost.decode must be finite"),
        (damaged(lambda raw: raw["cost"].update(decode=10**400)), "cost.decode must be finite"),
        (damaged(lambda raw: raw["cost"].update(decode="fast")), "cost.decode must be a value of type float"),
        (damaged(lambda raw: raw["cost"].update(floor=0.0)), "floor must be above 0"),
        (damaged(lambda raw: raw.update(cost=3)), "cost must be an object, got 3"),
        (damaged(lambda raw: raw["transfer_in"].update(block=float("inf"))), "transfer_in.block must be finite"),
        (damaged(lambda raw: raw.update(block_size=0)), "block_size must be at least 1, got 0"),
        (damaged(lambda raw: raw.update(stage_shares=[0.5, 0.5])), "stage_shares must be 1 numbers above 0, got [0.5"),
        (damaged(lambda raw: raw.update(block_size=1.5)), "block_size must be a value of type int"),
        (damaged(lambda raw: raw.update(block_size=True)), "block_size must be a value of type int"),
        (damaged(lambda raw: raw["samples"][1].update(seconds=None)), "samples[1].seconds must be"),
        (damaged(lambda raw: raw.update(samples={})), "samples must be"),
        (damaged(lambda raw: raw["key"].update(dtype=7)), "key.dtype must be a value of type str"),
        (damaged(lambda raw: raw["machine"].update(cores=2)), "machine.cores must be a value of type str"),
    ],
)
def test_error_of_a_malformed_profile_names_file_and_field(text: str, names: str, tmp_path: Path) -> None:
    path = tmp_path / "damaged.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_profile(path)
    assert names in str(refused.value)
    assert str(path) in str(refused.value)


def test_missing_and_binary_profiles_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_profile(tmp_path / "none.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not JSON"):
        read_profile(tmp_path / "bytes.json")


def test_unwritable_profile_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        write_profile(PROFILE, tmp_path / "file" / "profile.json")


def test_transfer_cost_scales_with_block_size() -> None:
    cost = PROFILE.cost_for(64)
    assert cost.transfer(3) == pytest.approx(PROFILE.cost.transfer_floor + 4 * 3 * PROFILE.cost.block)
    assert cost.step(StepShape(9, 9, 9, 9)) == PROFILE.cost.step(StepShape(9, 9, 9, 9))


def test_profile_cache_ignores_the_model_name_only() -> None:
    write_profile(PROFILE, cache_path(KEY))
    assert cached_profile(dataclasses.replace(KEY, model="renamed")) == PROFILE
    for field in dataclasses.fields(ProfileKey):
        if field.name != "model":
            value = getattr(KEY, field.name)
            other = value + 1 if isinstance(value, int) else value + "x"
            assert cached_profile(dataclasses.replace(KEY, **{field.name: other})) is None


def test_damaged_cache_file_is_ignored_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    path = cache_path(KEY)
    path.parent.mkdir()
    path.write_text(damaged(lambda raw: raw.pop("cost")))
    with caplog.at_level(logging.WARNING):
        assert cached_profile(KEY) is None
    assert len(caplog.records) == 1
    assert "cost is missing" in caplog.text


def test_profile_cache_is_in_the_users_cache_folder_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/cache")
    assert cache_path(KEY).parent == Path("/some/cache/skipjoin/profiles")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/some/home")
    assert cache_path(KEY).parent == Path("/some/home/.cache/skipjoin/profiles")


def start(**settings: Any) -> LinearCost:
    engine = assemble(EngineConfig(threads=1, kv_cache_gib=0.01, max_model_len=256, **settings))
    engine.executor.close()
    return engine.info.cost.current


def test_profile_includes_the_engines_overhead() -> None:
    config = EngineConfig(threads=1, kv_cache_gib=0.01, max_model_len=256)
    profile = profile_model(config, Effort(1.0, 0.25))
    assert 0 < profile.host_s < 100 * profile.cost.step(StepShape(decodes=1, context=1))
    assert profile.unrest >= 1


def test_next_start_uses_the_cached_profile(cache: Path) -> None:
    key = own_key()
    write_profile(dataclasses.replace(PROFILE, key=key), cache_path(key))
    assert start() == PROFILE.cost
    assert start(block_size=32).block == 2 * PROFILE.cost.block
    assert start(dtype="bfloat16") != PROFILE.cost


def test_first_start_follows_a_few_steps_instead_of_measuring_first(cache: Path) -> None:
    guess, first = start(profile="off"), start()
    assert first.block == guess.block
    assert first.step(StepShape(decodes=1)) != guess.step(StepShape(decodes=1))
    assert not cache.exists()


def test_profile_off_uses_default_costs() -> None:
    key = own_key()
    write_profile(dataclasses.replace(PROFILE, key=key), cache_path(key))
    cost = start(profile="off")
    assert cost.floor > 0
    assert cost != PROFILE.cost


def own_key() -> ProfileKey:
    found: list[ProfileKey] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(startup, "cached_profile", lambda key: found.append(key) or PROFILE)
        start()
    return found[0]


@pytest.mark.parametrize(
    ("field", "value", "names"),
    [
        ("shape", "another", "is of model a/model, but the engine runs tally, which has another shape"),
        ("dtype", "bfloat16", "is of dtype bfloat16, but the engine runs float32"),
        ("device_kind", "cuda", "is of device cuda, but the engine runs cpu"),
    ],
)
def test_profile_of_another_engine_is_refused(field: str, value: str, names: str, tmp_path: Path) -> None:
    key = dataclasses.replace(own_key(), model="a/model", **{field: value})
    path = tmp_path / "profile.json"
    write_profile(dataclasses.replace(PROFILE, key=key), path)
    with pytest.raises(ConfigError, match=names):
        start(profile=str(path))


def test_profile_of_another_machine_logs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "profile.json"
    write_profile(dataclasses.replace(PROFILE, key=dataclasses.replace(own_key(), device="Other CPU")), path)
    assert start(profile=str(path)) == PROFILE.cost
    assert "was measured with device Other CPU" in caplog.text


def test_empty_profile_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="profile must be"):
        EngineConfig(profile="")


def test_engine_learns_costs_from_its_steps(tmp_path: Path) -> None:
    """The engine starts with costs that are a thousand times too high."""
    path = tmp_path / "profile.json"
    slow = LinearCost(*(1000 * value for value in (1e-3, 2e-5, 3e-8, 4e-5, 5e-7, 6e-6, 7e-5)))
    write_profile(dataclasses.replace(PROFILE, key=own_key(), cost=slow), path)
    with LLM(progress=False, threads=1, kv_cache_gib=0.01, max_model_len=256, profile=str(path)) as llm:
        cost = llm.engine.info.cost
        before = cost.step(StepShape(decodes=1, context=1))
        llm.generate(["one"], SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
        assert cost.revision > 5
        assert cost.step(StepShape(decodes=1, context=1)) < before / 2


def test_profile_command_writes_a_file_that_an_engine_accepts(tmp_path: Path) -> None:
    path = tmp_path / "tally.json"
    small = ["--threads", "1", "--max-model-len", "256", "--kv-cache-gib", "0.01"]
    run = CliRunner().invoke(app, ["profile", "tally", "--seconds", "1", "--out", str(path), *small])
    assert run.exit_code == 0, run.output
    for text in ("every step", "us per token", "GB/s", "P95", str(path)):
        assert text in run.output
    profile = read_profile(path)
    assert profile.key.model == "tally"
    assert str(tmp_path) not in path.read_text()
    assert profile.errors.fitted > 0  # Slow machines may have no sample to hold out.
    # `LearningCost` replaces coefficients of 0 so that they can grow.
    assert start(profile=str(path)) == LearningCost(profile.cost).current


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_unreadable_profile_is_one_line_and_exit_code_2(command: str, tmp_path: Path) -> None:
    prompt = ["--prompt", "x"] if command == "generate" else []
    run = CliRunner().invoke(app, [command, "tally", "--profile", str(tmp_path / "none.json"), *prompt])
    assert run.exit_code == 2
    assert "cannot be read" in run.stderr
    assert "Traceback" not in run.output


def test_unusable_cache_does_not_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    with measures_alone(KEY):
        assert cached_profile(KEY) is None


@pytest.mark.parametrize("seconds", ["0", "nan", "-5"])
def test_measurement_time_out_of_bounds_is_refused(seconds: str) -> None:
    run = CliRunner().invoke(app, ["profile", "--seconds", seconds])
    assert run.exit_code == 2
    assert "seconds must be in [1, 100000]" in run.stderr
