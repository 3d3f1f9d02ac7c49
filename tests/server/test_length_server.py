from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from forked_servers import ForkedServer
from server_worlds import Api, MakeApi, StartServer, outcome_of
from test_forecasting import metrics_of, until

from skipjoin.config import ConfigError, EngineConfig, ForecastConfig, ServerConfig
from skipjoin.core.forecast import Forecast
from skipjoin.engine.forecasting import ForecastKeeper, chosen_forecasts
from skipjoin.forecast import make_forecaster
from skipjoin.observe.metric_table import FORECAST_OUTCOMES
from skipjoin.server.api import length_server
from skipjoin.server.api.length_server import KEY_VARIABLE, LengthServer, NoLengthError, excerpt
from support.openai_stub import OpenAiStub
from support.waiting import wait_until

pytestmark = pytest.mark.anyio

Reply = Callable[[], Awaitable[web.StreamResponse]]
NEVER_S = 60.0  # longer than any of these tests


def says(text: object) -> Reply:
    async def reply() -> web.StreamResponse:
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": text}}]})

    return reply


async def hangs() -> web.StreamResponse:
    await asyncio.sleep(NEVER_S)
    raise AssertionError


async def fails() -> web.StreamResponse:
    return web.Response(status=500, text="out of order")


async def moves() -> web.StreamResponse:
    return web.Response(status=307, headers={"Location": "http://127.0.0.1:1"})


async def nests() -> web.StreamResponse:
    return web.Response(body=b"[" * 60_000)


async def babbles() -> web.StreamResponse:
    return web.Response(body=b"[" * (1 << 20))


class Predictor(OpenAiStub):
    """Server that gives each of its replies once, and then repeats the last one."""

    def __init__(self, *replies: Reply) -> None:
        super().__init__(self._answer)
        self.replies = list(replies)
        self.headers: list[Any] = []
        self.cancelled = 0

    async def _answer(self, stub: OpenAiStub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        self.headers.append(request.headers)
        reply = self.replies[0] if len(self.replies) == 1 else self.replies.pop(0)
        try:
            return await reply()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


def prior() -> ForecastKeeper:
    return ForecastKeeper(make_forecaster(ForecastConfig(forecaster="prior")))


async def outcomes(api: Api) -> dict[str, float]:
    found = await metrics_of(api)
    return {name: count for name in FORECAST_OUTCOMES if (count := found[f"forecast_url_total {name}"])}


def by_url(api: Api) -> dict[int, Forecast]:
    return {
        reforecast.id: reforecast.forecast
        for reforecast in api.engine.reforecasts
        if reforecast.forecast.source == "url"
    }


async def wait_for_outcomes(api: Api, number: int) -> dict[str, float]:
    end = time.monotonic() + 10
    while sum((found := await outcomes(api)).values()) < number:
        assert time.monotonic() < end
        await asyncio.sleep(0.05)
    return found


async def test_answer_updates_forecasts_of_all_choices(make_api: MakeApi) -> None:
    with Predictor(says("1,200 tokens.")) as predictor:
        settings = {"forecast_url": f"{predictor.url}/v1/", "forecast_model": "seer"}
        async with make_api(prior(), **settings) as api:
            api.engine.paused = True
            task = asyncio.create_task(api.complete(prompt="Tell me all", n=2, max_tokens=400))
            await until(lambda: len(by_url(api)) == 2)
            assert {add.forecast.source for add in api.engine.added} == {"prior"}
            assert by_url(api) == {add.id: Forecast(400.0, "url") for add in api.engine.added}
            api.engine.paused = False
            await task
            await until(lambda: api.metrics._rows["forecasts_learned_total"] == [0, 2])  # the prior learns them, too
            found = await metrics_of(api)
    (body,) = predictor.bodies
    assert (body["model"], body["temperature"]) == ("seer", 0)
    assert body["messages"][0]["content"].endswith("\n\nTell me all")
    assert found["forecast_error_tokens_sum"] == 0  # 400 tokens were forecast and generated
    assert (found["forecasts_total prior"], found["forecasts_total url"]) == (1, 1)
    assert (found["forecast_url_total answered"], found["forecast_url_seconds_count"]) == (1, 1)
    assert not any(found[f"forecast_interval_total {side}"] for side in ("below", "inside", "above"))


TROUBLES: dict[str, tuple[Reply, str]] = {
    "no number": (says("I cannot tell."), "nonsense"),
    "no text": (says(None), "nonsense"),
    "zero": (says("0"), "nonsense"),
    "too many": (says(str((1 << 20) + 1)), "nonsense"),
    "no completion": (nests, "nonsense"),
    "endless": (babbles, "nonsense"),
    "an error": (fails, "error"),
    "a redirect": (moves, "error"),
    "silence": (hangs, "timeout"),
}


@pytest.mark.parametrize(("reply", "outcome"), TROUBLES.values(), ids=TROUBLES.keys())
async def test_prior_is_used_when_length_server_fails(
    reply: Reply, outcome: str, make_api: MakeApi, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning is logged once until the server answers again."""
    with Predictor(reply, reply, says("7"), reply, says("7")) as predictor:
        async with make_api(prior(), forecast_url=predictor.url, forecast_timeout_s=1.0) as api:
            api.engine.paused = True
            tasks = []
            for number in range(5):
                tasks.append(asyncio.create_task(api.complete(max_tokens=4)))
                await wait_for_outcomes(api, number + 1)
            assert len(by_url(api)) == 2
            api.engine.paused = False
            assert {task.status_code for task in await asyncio.gather(*tasks)} == {200}
            assert await outcomes(api) == {outcome: 3, "answered": 2}
    assert sum("returned no length" in record.message for record in caplog.records) == 2


async def test_unreachable_length_server_counts_as_error(make_api: MakeApi) -> None:
    with Predictor(says("7")) as predictor:
        async with make_api(prior(), forecast_url=predictor.url) as api:
            predictor.die()
            api.engine.paused = True
            task = asyncio.create_task(api.complete())
            assert await wait_for_outcomes(api, 1) == {"error": 1}
            api.engine.paused = False
            assert (await task).status_code == 200


async def test_requests_do_not_wait_and_unneeded_questions_are_cancelled(make_api: MakeApi) -> None:
    max_questions = length_server.MAX_QUESTIONS
    with Predictor(hangs) as predictor:
        async with make_api(prior(), forecast_url=predictor.url, forecast_timeout_s=NEVER_S) as api:
            api.engine.paused = True
            task = asyncio.create_task(api.complete(prompt=["abcdef"] * (max_questions + 5), max_tokens=3))
            await until(lambda: len(predictor.bodies) == max_questions)
            assert await outcomes(api) == {"skipped": 5}
            api.engine.paused = False
            assert (await task).status_code == 200
            await until(lambda: predictor.cancelled == max_questions)
            assert await outcomes(api) == {"skipped": 5, "unneeded": max_questions}
            assert not by_url(api)
            api.engine.paused = True
            task = asyncio.create_task(api.complete())
            await until(lambda: len(predictor.bodies) == max_questions + 1)  # still open at shutdown
            begin = time.monotonic()
        assert time.monotonic() - begin < NEVER_S / 3
        task.cancel()


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("128", 128), (" 128\n", 128), ("250 tokens", 250), ("1,048,576", 1 << 20), ("12.7", 12), ("9. It is short", 9)]
    + [(text, None) for text in ("", "-5", "12th", "10-20", "1e3", "\u0661", "NaN", "1,2", "about 5", "9" * 5000)],
)
async def test_length_is_parsed_from_start_of_answer(text: str, tokens: int | None) -> None:
    with Predictor(says(text)) as predictor:
        server = LengthServer(ServerConfig(forecast_url=predictor.url), "sesame")
        if tokens is None:
            with pytest.raises(NoLengthError, match=r"^it must return a number in \[1, 1048576\], got .{2,150}$"):
                await server.tokens("x")
        else:
            assert await server.tokens("x") == tokens
        await server.close()
    assert predictor.headers[0]["Authorization"] == "Bearer sesame"


def test_long_prompts_are_shortened_to_beginning_and_end() -> None:
    def text_of(ids: Any) -> str:
        seen.append(len(ids))
        return "".join(f"<{number}>" for number in ids)

    for length in (1, 100, 1024, 1025, 100_000):
        seen: list[int] = []
        text = excerpt(range(length), text_of)
        assert len(text) <= length_server.MAX_CHARACTERS + len(" ... ")
        assert sum(seen) <= length_server.MAX_TOKENS
        assert text.startswith("<0>")
        assert text.endswith(f"<{length - 1}>")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"forecast_url": "localhost:9000"}, r"forecast_url must be like http://127.0.0.1:8000, got 'localhost:9000'"),
        ({"forecast_url": "http://a:99999"}, "forecast_url must be like"),
        ({"forecast_model": "seer"}, "forecast_model is for another server that forecasts: set forecast_url"),
        ({"forecast_timeout_s": 3.0}, "forecast_timeout_s is for another server that forecasts: set forecast_url"),
        ({"forecast_url": "http://a", "forecast_timeout_s": 0.0}, r"forecast_timeout_s must be in \(0, 600\], got 0"),
        ({"forecast_url": "http://a", "forecast_timeout_s": float("nan")}, "forecast_timeout_s must be in"),
    ],
)
def test_invalid_forecast_url_settings_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerConfig(**settings)


async def test_forecast_url_excludes_learned_forecaster() -> None:
    engine = EngineConfig(recipe="alise")
    chosen = chosen_forecasts(ForecastConfig(forecast_dir="none"), engine, url="http://a")
    assert chosen == ForecastConfig(forecaster="prior", forecast_dir="none")
    with pytest.raises(ConfigError, match="forecaster must be prior, or not be given, with forecast_url, got learned"):
        chosen_forecasts(ForecastConfig(forecaster="learned"), engine, url="http://a")
    with pytest.raises(ConfigError, match=f"{KEY_VARIABLE} must be printable ASCII characters"):
        LengthServer(ServerConfig(forecast_url="http://a"), "a\nb")
    server = LengthServer(ServerConfig(forecast_url="http://name:secret@127.0.0.1"), "sesame")  # two credentials
    with pytest.raises(NoLengthError, match="Cannot combine"):
        await server.tokens("x")
    await server.close()


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (None, "connection refused"),
        (says("soon"), "it must return a number in [1, 1048576], got 'soon'"),
        (fails, "it answered with HTTP status 500: 'out of order'"),
        (hangs, "it did not answer within 0.5 s"),
    ],
    ids=["down", "nonsense", "error", "slow"],
)
async def test_unusable_length_server_is_an_error(reply: Reply | None, message: str) -> None:
    with Predictor(reply or fails) as predictor:
        url = predictor.url if reply else "http://127.0.0.1:9"
        server = LengthServer(ServerConfig(forecast_url=url, forecast_timeout_s=0.5))
        with pytest.raises(ConfigError) as error:
            await server.check()
        await server.close()
    assert str(error.value).startswith(f"forecast_url {url} cannot be used: {message}")


def test_unusable_length_server_is_reported_before_model_loads(tokenizer_folder: Path) -> None:
    settings = ["forecast_url=http://127.0.0.1:9", "forecast_dir=none"]
    code, errors = outcome_of("simulated", str(tokenizer_folder), "0", "9", "9", *settings)
    assert code == 2
    assert "error: forecast_url http://127.0.0.1:9 cannot be used: connection refused" in errors
    assert "pretending to load" not in errors
    assert "Traceback" not in errors


def test_server_can_be_stopped_during_first_question(tokenizer_folder: Path) -> None:
    with Predictor(hangs) as predictor:
        settings = [f"forecast_url={predictor.url}", f"forecast_timeout_s={NEVER_S}", "forecast_dir=none"]
        server = ForkedServer(["simulated", str(tokenizer_folder), "0", "9", "9", *settings])
        with server.stdout, server.stderr:
            wait_until(lambda: predictor.bodies)
            server.terminate()
            assert (server.wait(NEVER_S / 3), server.stderr.read()) == (0, "")


def test_skipjoin_can_be_the_length_server(start_server: StartServer, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("128 tokens, {{ messages[0]['content'] }}")  # the engine repeats the prompt
    predictor = start_server(chat_template=template)
    server = start_server(step_s=0.02, forecast_url=predictor.url, forecast_dir="none")
    body = {"prompt": "abcdef", "max_tokens": 100}
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=30).raise_for_status()
    text = httpx.get(f"{server.url}/metrics").text
    assert 'skipjoin:forecast_url_total{outcome="answered"} 1.0' in text
    assert 'skipjoin:forecasts_total{source="url"} 1.0' in text
    server.stop()
    assert server.process.returncode == 0


def test_unanswered_question_does_not_delay_shutdown(start_server: StartServer) -> None:
    with Predictor(says("9"), hangs) as predictor:
        server = start_server(step_s=0.05, forecast_url=predictor.url, forecast_timeout_s=NEVER_S, forecast_dir="none")
        with httpx.stream("POST", f"{server.url}/v1/completions", json={"prompt": "a", "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            begin = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            list(lines)
        assert server.process.wait(30) == 0
        assert time.monotonic() - begin < NEVER_S / 3
        assert len(predictor.bodies) == 2
