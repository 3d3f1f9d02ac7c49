from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import tiny_model as tiny
from prometheus_client.parser import text_string_to_metric_families
from server_worlds import Api, MakeApi

from skipjoin.config import ForecastConfig
from skipjoin.config.key_files import owner_of_key
from skipjoin.core.forecast import Forecast
from skipjoin.core.request import FinishReason
from skipjoin.engine import forecasting as keeping
from skipjoin.engine.forecasting import ForecastKeeper, open_keeper
from skipjoin.forecast import make_forecaster
from skipjoin.forecast.config import FORECASTERS
from skipjoin.observe.metric_table import FORECAST_SOURCES
from skipjoin.server.api import forecasting
from support.waiting import until

pytestmark = pytest.mark.anyio

PRIOR = Forecast(30.0, "prior")


class Guess(NamedTuple):
    forecast: Forecast
    prompt: tuple[int, ...] = ()
    most: int = 99

    @property
    def interval(self) -> tuple[float, float]:
        return self.forecast.tokens - 1, self.forecast.tokens + 1


class Lesson(NamedTuple):
    prompt: tuple[int, ...]
    tokens: int
    exact: bool


class StubForecaster:
    """Forecaster that predicts the prompt's length as output length, and blocks while its gate is closed."""

    def __init__(self, batch: int = 1) -> None:
        self.batch, self.batches = batch, []
        self.gate = threading.Event()
        self.gate.set()
        self.lessons: list[Lesson] = []
        self.asked = 0
        self.fails = False

    def encode(self, prompts: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        self.batches.append(len(prompts))
        return prompts

    def predict(self, prompt: Sequence[int], max_tokens: int) -> Guess:
        self.asked += 1
        assert self.gate.wait(60)
        if self.fails:
            raise RuntimeError("no idea")
        return Guess(forecast_of(prompt), tuple(prompt), max_tokens)

    def prior(self, max_tokens: int) -> Forecast:
        return PRIOR

    def learn(self, predicted: Any, tokens: int, *, exact: bool) -> None:
        self.lessons.append(Lesson(predicted.prompt, tokens, exact))

    def __len__(self) -> int:
        return len(self.lessons)


def forecast_of(prompt: Sequence[int]) -> Forecast:
    return Forecast(float(len(prompt)), "learned", (0.0, 0.5, 0.5))


async def metrics_of(api: Api) -> dict[str, float]:
    text = (await api.http.get("/metrics")).text
    return {
        " ".join([sample.name.removeprefix("skipjoin:"), *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "forecast" in sample.name
    }


async def test_timely_forecast_is_sent_with_the_request(make_api: MakeApi, monkeypatch: Any) -> None:
    monkeypatch.setattr(forecasting, "PATIENCE_S", 10.0)
    forecaster = StubForecaster()
    async with make_api(ForecastKeeper(forecaster)) as api:
        await api.complete(prompt=["abc", "abcdefgh"], n=2, max_tokens=4)
        await until(lambda: len(forecaster.lessons) == 4)
        expected = [forecast_of("abc")] * 2 + [forecast_of("abcdefgh")] * 2
        assert [add.forecast for add in api.engine.added] == expected
        assert not api.engine.reforecasts
        assert forecaster.asked == 2
        # max_tokens was reached, so the lengths are censored.
        assert {lesson[1:] for lesson in forecaster.lessons} == {(4, False)}
        await until(lambda: api.metrics._rows["forecast_index_entries"] == [4])
        found = await metrics_of(api)
    assert (found["forecasts_total learned"], found["forecasts_total prior"], found["forecasts_late_total"]) == (
        2,
        0,
        0,
    )
    assert (found["forecast_seconds_count"], found["forecast_index_entries"]) == (2, 4)
    assert (found["forecasts_learned_total censored"], found["forecasts_learned_total exact"]) == (4, 0)


@pytest.mark.parametrize("starts", [False, True])
async def test_late_forecast_follows_request_to_its_current_engine(make_api: MakeApi, starts: bool) -> None:
    forecaster = StubForecaster()
    async with make_api(ForecastKeeper(forecaster), replicas=2) as api:
        for engine in api.engines:
            engine.paused = True
        forecaster.gate.clear()
        task = asyncio.create_task(api.complete(max_tokens=40))
        await until(lambda: any(engine.live for engine in api.engines))
        first, second = sorted(api.engines, key=lambda engine: -len(engine.live))
        assert first.added[0].forecast == PRIOR
        assert not first.reforecasts
        if starts:
            first.step()
        forecaster.gate.set()
        await until(lambda: first.reforecasts)
        assert [(reforecast.id, reforecast.forecast) for reforecast in first.reforecasts] == [
            (first.added[0].id, forecast_of("abcdef"))
        ]
        first.step()
        first.die()
        assert second.added[0].forecast == forecast_of("abcdef")
        second.paused = False
        second.step()
        await task
        await until(lambda: forecaster.lessons)
        (lesson,) = forecaster.lessons
        assert lesson.tokens == 40  # those of both engines
        found = await metrics_of(api)
    late = (found["forecasts_total learned"], found["forecasts_total prior"], found["forecasts_late_total"])
    assert late == (1, 0, starts)


async def test_prompts_that_wait_are_encoded_together(make_api: MakeApi, monkeypatch: Any) -> None:
    monkeypatch.setattr(forecasting, "PATIENCE_S", 10.0)
    forecaster = StubForecaster(batch=4)
    async with make_api(ForecastKeeper(forecaster)) as api:
        forecaster.gate.clear()
        first = asyncio.create_task(api.complete(prompt="a", max_tokens=4))
        await until(lambda: forecaster.asked == 1)
        others = asyncio.create_task(api.complete(prompt=["ab", "abc", "abcd", "abcde", "abcdef"], max_tokens=4))
        await asyncio.sleep(0.05)
        forecaster.gate.set()
        await asyncio.gather(first, others)
        assert forecaster.batches == [1, 4, 1]
        assert [add.forecast.tokens for add in api.engine.added] == [1, 2, 3, 4, 5, 6]


async def test_forecaster_learns_every_output_length_once(make_api: MakeApi, monkeypatch: Any) -> None:
    monkeypatch.setattr(forecasting, "PATIENCE_S", 10.0)
    forecaster = StubForecaster()
    keeper = ForecastKeeper(forecaster)

    async with make_api(keeper) as api:

        async def lesson_of(**body: Any) -> tuple[int, bool]:
            forecaster.lessons.clear()
            await api.complete(**body)
            await until(lambda: forecaster.lessons)
            ((_, tokens, exact),) = forecaster.lessons
            return tokens, exact

        assert await lesson_of(prompt=[5, 6, 7, tiny.EOS], max_tokens=9) == (4, True)
        assert await lesson_of(prompt="abcdef", stop="d") == (4, True)
        assert await lesson_of(prompt="abcdef", max_tokens=5) == (5, False)
        assert await lesson_of(prompt=[5, tiny.EOS], ignore_eos=True, max_tokens=3) == (3, False)

        api.engine.paused = True
        for reason in (FinishReason.DEADLINE, FinishReason.ERROR):
            task = asyncio.create_task(lesson_of(prompt="abcdef", max_tokens=9))
            await until(lambda: api.engine.live)
            api.engine.step()
            api.engine.end_all(reason)
            assert await task == (1, False)
        forecaster.lessons.clear()
        task = asyncio.create_task(api.complete(prompt="abcdef"))
        await until(lambda: api.engine.live)
        api.engine.end_all(FinishReason.DEADLINE)  # without tokens there is nothing to learn
        await task
        found = await metrics_of(api)
        assert not forecaster.lessons
    assert (found["forecasts_learned_total exact"], found["forecasts_learned_total censored"]) == (2, 4)
    # Exact lengths of 4 with forecasts of 4 and 6; censored lengths of 5 and 3 with forecasts of 6 and 2.
    assert found["forecast_error_octaves_count"] == 4
    error = math.log2(6 / 4) + math.log2(6 / 5) + math.log2(3 / 2)
    assert found["forecast_error_octaves_sum"] == pytest.approx(error)
    assert found["forecast_error_tokens_sum"] == 0 + 2 + 1 + 1
    intervals = {side: found[f"forecast_interval_total {side}"] for side in ("below", "inside", "above")}
    assert intervals == {"below": 1, "inside": 3, "above": 0}


async def test_requests_beyond_queue_limit_keep_the_prior(make_api: MakeApi) -> None:
    """A request that finishes before its forecast is learned once the forecast exists."""
    forecaster = StubForecaster()
    max_waiting = forecasting.MAX_WAITING
    async with make_api(ForecastKeeper(forecaster)) as api:
        forecaster.gate.clear()
        begin = time.monotonic()
        answer = await api.complete(prompt=["abcdef"] * (max_waiting + 50), max_tokens=2)
        assert answer.status_code == 200
        assert time.monotonic() - begin < 30
        assert {add.forecast for add in api.engine.added} == {PRIOR}
        assert not forecaster.lessons
        forecaster.gate.set()
        await until(lambda: len(forecaster.lessons) >= max_waiting)
        found = await metrics_of(api)
        assert forecaster.asked in (max_waiting, max_waiting + 1)  # one may have left the queue early
    assert found["forecasts_total prior"] == max_waiting + 50 - forecaster.asked
    assert not api.engine.reforecasts  # all requests had finished


async def test_failing_forecaster_does_not_fail_requests(make_api: MakeApi, caplog: Any) -> None:
    forecaster = StubForecaster()
    forecaster.fails = True
    async with make_api(ForecastKeeper(forecaster)) as api:
        for _ in range(3):
            assert (await api.complete(max_tokens=2)).status_code == 200
        await until(lambda: forecaster.asked == 3)
        assert [add.forecast for add in api.engine.added] == [PRIOR] * 3
        forecaster.fails = False
        await api.complete(max_tokens=2)
        await until(lambda: forecaster.lessons)
    assert sum("cannot be forecast" in record.message for record in caplog.records) == 1


async def test_requests_have_no_forecast_without_forecaster(api: Api) -> None:
    await api.complete(max_tokens=2)
    assert api.engine.added[0].forecast is None
    assert not any((await metrics_of(api)).values())


def test_every_forecast_source_has_a_metric_label() -> None:
    seen = set()
    for name in FORECASTERS:
        forecaster = make_forecaster(ForecastConfig(forecaster=name))
        for _ in range(3):
            predicted = forecaster.forecast([5, 6, 7], 99)
            forecaster.learn(predicted, 9, exact=True)
            seen |= {predicted.forecast.source, forecaster.prior(99).source}
    assert seen | {"url"} == set(FORECAST_SOURCES)


class Disk:
    def __init__(self) -> None:
        self.now = 0.0
        self.saves = 0
        self.seconds = 0.0
        self.is_full = False
        self.warnings = 0

    def save(self, *, quiet: bool) -> bool:
        self.now += self.seconds
        self.saves += not self.is_full
        self.warnings += self.is_full and not quiet
        return not self.is_full


def keeper_on(disk: Disk) -> Callable[[float], None]:
    """Return a function that learns one length, advances the clock and saves if due."""
    keeper = ForecastKeeper(StubForecaster(), disk.save, clock=lambda: disk.now)

    def learn_for(seconds: float) -> None:
        keeper.learn(Guess(PRIOR), 5, exact=True)
        disk.now += seconds
        keeper.save_if_due()

    learn_for.close = keeper.close  # type: ignore[attr-defined]
    return learn_for


async def test_forecaster_is_saved_periodically_and_on_close() -> None:
    disk = Disk()
    learn_for = keeper_on(disk)
    learn_for(keeping.SAVE_EVERY_S / 2)
    assert disk.saves == 0
    learn_for(keeping.SAVE_EVERY_S / 2)
    assert disk.saves == 1
    learn_for.close()  # type: ignore[attr-defined]
    assert disk.saves == 1  # nothing new was learned
    learn_for(0.1)
    learn_for.close()  # type: ignore[attr-defined]
    assert disk.saves == 2


async def test_slow_saves_take_a_small_share_of_time() -> None:
    disk = Disk()
    disk.seconds = 2.0
    learn_for = keeper_on(disk)
    while disk.now < 5000:
        learn_for(1.0)
    assert 10 < disk.saves * disk.seconds / 5000 * 1000 < 30


async def test_full_disk_warns_once_until_a_save_succeeds() -> None:
    disk = Disk()
    learn_for = keeper_on(disk)
    for is_full, warnings in ((True, 1), (False, 1), (True, 2)):
        disk.is_full = is_full
        for _ in range(5):
            learn_for(keeping.SAVE_EVERY_S)
        assert disk.warnings == warnings
    assert disk.saves == 5


async def test_forecasts_are_isolated_between_keys(make_api: MakeApi) -> None:
    """A second key sends 60 requests with the first key's prompt and long outputs."""
    config = ForecastConfig(forecaster="learned", forecast_dir="none")
    keeper = open_keeper(config, model="m", folder=".", text_of=str, owners=2)
    async with make_api(keeper, api_keys=("victim", "attacker")) as api:
        prompt = [*range(3, 40)]

        async def send(key: str, tokens: int) -> float:
            stop = {"prompt": [*prompt, *[50] * tokens], "ignore_eos": True, "max_tokens": tokens}
            answer = await api.http.post(
                "/v1/completions", json=stop, headers={"Authorization": f"Bearer {key}"}, timeout=60
            )
            assert answer.status_code == 200
            return keeper.forecast(prompt, 4096, owner_of_key(key.encode())).forecast.tokens

        for _ in range(20):
            before = await send("victim", 5)
        done = len(keeper)
        for _ in range(60):
            await send("attacker", 120)
        async with asyncio.timeout(30):
            while len(keeper) < 80:
                await asyncio.sleep(0.01)
        assert done <= 20
        victim = owner_of_key(b"victim")
        after = keeper.forecast(prompt, 4096, victim).forecast.tokens
        assert after == pytest.approx(before, rel=0.2)
        assert keeper.forecast(prompt, 4096, owner_of_key(b"attacker")).forecast.tokens > 2 * after
