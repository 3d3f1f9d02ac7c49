"""Step costs that an engine measures while it has nothing to do."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from skipjoin.config import EngineConfig
from skipjoin.config.profile import CACHE_VARIABLE, FitErrors, Profile, cache_path, cached_profile, write_profile
from skipjoin.core.events import Token
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.engine.build import assemble
from skipjoin.engine.loop import EngineLoop
from skipjoin.engine.profiling import calibration
from skipjoin.engine.profiling.profiler import Effort
from skipjoin.exec.local import LocalExecutor
from skipjoin.sampling import SamplingParams
from support.profiles import PROFILE

PROMPT = list(range(5, 70))
# Holds the lock of a profile until its input ends.
HOLDER = """
import sys
from pathlib import Path
from skipjoin.system.durable import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(calibration, "FIRST_START", Effort(0.5, 0.3))
    return tmp_path / "cache"


@pytest.fixture
def loop() -> Iterator[EngineLoop]:
    loop = started()
    yield loop
    loop.close()


def started() -> EngineLoop:
    return EngineLoop(assemble(EngineConfig(threads=1, kv_cache_gib=0.01, max_model_len=256, swap_space_gib=0.01)))


def output_of(loop: EngineLoop, number: int) -> list[int]:
    loop.add(number, PROMPT, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    tokens = []
    while not loop.idle:
        tokens += [event.token for event in loop.step() if isinstance(event, Token)]
    return tokens


def key_of(loop: EngineLoop):
    assert loop.engine.calibration is not None
    return loop.engine.calibration._loaded.key


def measure(loop: EngineLoop) -> int:
    steps = 0
    while loop.calibrate():
        steps += 1
    return steps


def test_idle_engine_measures_in_empty_blocks_and_keeps_the_profile(loop: EngineLoop) -> None:
    kv, executor = loop.core.scheduler.kv, loop.engine.executor
    assert isinstance(kv, KVLedger)
    assert isinstance(executor, LocalExecutor)
    first, key = output_of(loop, 1), key_of(loop)
    cached = [block for block, _ in kv.device.next_cached(1000)]
    assert len(cached) >= 4
    before, revision = executor.store.device.tensor[cached].clone(), loop.engine.info.cost.revision
    assert measure(loop) > 5
    kv.check()
    assert torch.equal(executor.store.device.tensor[cached], before)
    assert [block for block, _ in kv.device.next_cached(1000)] == cached
    profile = cached_profile(key)
    assert profile is not None
    assert (loop.engine.info.cost.revision > revision) == (not profile.is_poor)
    assert not loop.calibrate()
    assert output_of(loop, 2) == first


def test_requests_are_served_between_measured_steps(loop: EngineLoop) -> None:
    first = output_of(loop, 1)
    for number in range(2, 7):
        assert loop.calibrate()
        loop.add(number, PROMPT, SamplingParams(temperature=0, max_tokens=1))
        assert not loop.calibrate(), "a request waits"
        loop.abort(number)
        loop.step()
        assert output_of(loop, 10 + number) == first
    measure(loop)
    assert output_of(loop, 20) == first


def test_nothing_is_measured_without_empty_blocks(loop: EngineLoop) -> None:
    kv = loop.core.scheduler.kv
    assert isinstance(kv, KVLedger)
    held = kv.device.take(kv.device.empty - 10)
    assert not loop.calibrate()
    kv.device.put(held)
    assert loop.calibrate()


def test_one_of_several_engines_measures_and_the_others_use_its_profile(loop: EngineLoop) -> None:
    key = key_of(loop)
    path = cache_path(key)
    path.parent.mkdir(exist_ok=True)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    assert not loop.calibrate()
    write_profile(dataclasses.replace(PROFILE, key=key), path)
    holder.communicate(timeout=60)
    assert loop.calibrate()
    assert loop.engine.info.cost.current == PROFILE.cost
    assert not loop.calibrate()


def test_poor_profile_is_used_and_replaced_by_a_better_one(
    loop: EngineLoop, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = key_of(loop)
    loop.close()

    def poor(median: float) -> Profile:
        return dataclasses.replace(PROFILE, key=key, errors=FitErrors(median, 0.9, 8, 4))

    for found, kept in ((0.4, 0.3), (0.2, 0.2), (0.05, 0.05)):
        write_profile(poor(0.3), cache_path(key))
        monkeypatch.setattr(calibration.Measurement, "profile", lambda *_, found=found: poor(found))
        again = started()
        assert again.engine.info.cost.current == PROFILE.cost
        with caplog.at_level(logging.INFO):
            measure(again)
        again.close()
        assert f"median error {found:.0%}" in caplog.text
        profile = cached_profile(key)
        assert profile is not None
        assert profile.errors.median == kept


def test_unwritable_cache_only_logs_a_warning(loop: EngineLoop, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.touch()
    measure(loop)
    assert "the next start measures steps again" in caplog.text


def test_engine_that_cannot_measure_serves_on(
    loop: EngineLoop, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(seconds: float) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(loop.engine.executor, "transfers", fail)
    first = output_of(loop, 1)
    assert not loop.calibrate()
    assert "step costs are not measured, and follow the steps that run: out of memory" in caplog.text
    assert not loop.calibrate()
    assert output_of(loop, 2) == first
