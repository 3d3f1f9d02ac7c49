from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp

from skipjoin.config import ConfigError, ServerConfig, base_url
from skipjoin.core.forecast import LENGTH_EDGES, Forecast
from skipjoin.server.metrics import Metrics
from skipjoin.system.unreachable import why_unreachable

TextOf = Callable[[Sequence[int]], str]

_log = logging.getLogger(__name__)

# Environment variable with the API key of the other server.
KEY_VARIABLE = "SKIPJOIN_FORECAST_API_KEY"
# Maximum pending questions. Requests beyond that keep the prior's forecast.
MAX_QUESTIONS = 64
# Maximum characters of a prompt that are sent, half from its start and half from its end, and the tokens that are
# decoded for them, because decoding a very long prompt would block the event loop.
MAX_CHARACTERS, MAX_TOKENS = 4096, 1024
_LONGEST = LENGTH_EDGES[-1]
_INSTRUCTION = (
    "How many tokens does a language model need to answer the text below? Do not answer it. "
    "Reply with one whole number and nothing else.\n\n"
)
_TRIAL = "Count from 1 to 20."
# Maximum tokens of an answer. The largest number has 7 digits, and some models use a token for each.
_ANSWER_TOKENS = 16
# Words may follow the number, such as "tokens".
_NUMBER = re.compile(r"\s*(\d{1,3}(?:,\d{3})+|\d{1,9})(?:\.\d*)?(?:\s.*)?", re.ASCII | re.DOTALL)
# Less than the 5 s after which servers close idle connections, because a question sent at that moment would be lost.
_KEEP_ALIVE_S = 2.0
# Maximum size of a response.
_MAX_BYTES = 1 << 16
# Maximum characters of the other server's text that errors quote.
_LONGEST_QUOTE = 100


class NoLengthError(Exception):
    """The server returned no length. `outcome` is one of `FORECAST_OUTCOMES`."""

    def __init__(self, outcome: str, text: str) -> None:
        super().__init__(text)
        self.outcome = outcome


class LengthServer:
    def __init__(self, config: ServerConfig, key: str | None = None) -> None:
        assert config.forecast_url is not None
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ConfigError(f"{KEY_VARIABLE} must be printable ASCII characters")
        self._given = config.forecast_url
        self._url = base_url("forecast_url", config.forecast_url) + "/v1/chat/completions"
        self._model = {} if config.forecast_model is None else {"model": config.forecast_model}
        self._timeout_s = config.forecast_timeout_s
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=MAX_QUESTIONS, keepalive_timeout=_KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def tokens(self, text: str) -> float:
        body = {
            **self._model,
            "messages": [{"role": "user", "content": _INSTRUCTION + text}],
            "temperature": 0,
            "max_tokens": _ANSWER_TOKENS,
        }
        try:
            # Redirects are errors, because they would leak the API key.
            async with self._session.post(self._url, json=body, allow_redirects=False) as response:
                status, answer = response.status, await _read(response)
        except TimeoutError as error:
            raise NoLengthError("timeout", f"it did not answer within {self._timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: of parts of the URL
            raise NoLengthError("error", why_unreachable(error)) from error
        if status != 200:
            raise NoLengthError("error", f"it answered with HTTP status {status}: {_quote(answer)}")
        return _length(answer)

    async def check(self) -> None:
        try:
            await self.tokens(_TRIAL)
        except NoLengthError as error:
            raise ConfigError(f"forecast_url {self._given} cannot be used: {error}") from error

    async def close(self) -> None:
        await self._session.close()


class ForecastRequests:
    def __init__(self, server: LengthServer, metrics: Metrics) -> None:
        self._server = server
        self._metrics = metrics
        self._open: set[asyncio.Task[None]] = set()
        self._is_failing = False

    def ask(
        self, text_of: TextOf, prompt: Sequence[int], max_tokens: int, tell: Callable[[Forecast], None]
    ) -> asyncio.Task[None] | None:
        """Request a forecast for `tell`. Return None if too many are pending."""
        if len(self._open) >= MAX_QUESTIONS:
            self._metrics.count("forecast_url_total", "skipped")
            return None
        question = asyncio.create_task(self._ask(text_of, prompt, max_tokens, tell))
        self._open.add(question)
        question.add_done_callback(self._close)
        return question

    async def close(self) -> None:
        for question in self._open:
            question.cancel()
        if self._open:
            await asyncio.wait(self._open)
        await self._server.close()

    async def _ask(
        self, text_of: TextOf, prompt: Sequence[int], max_tokens: int, tell: Callable[[Forecast], None]
    ) -> None:
        begin = time.perf_counter()
        try:
            tokens = await self._server.tokens(excerpt(prompt, text_of))
        except NoLengthError as error:
            self._fail(error)
            return
        self._is_failing = False
        forecast = Forecast(min(tokens, float(max_tokens)), "url")
        self._metrics.count("forecasts_total", forecast.source)
        self._metrics.count("forecast_url_total", "answered")
        self._metrics.observe("forecast_url_seconds", time.perf_counter() - begin)
        tell(forecast)

    def _fail(self, error: NoLengthError) -> None:
        self._metrics.count("forecast_url_total", error.outcome)
        if not self._is_failing:
            _log.warning("the server of forecast_url returned no length, so the prior is used: %s", error)
        self._is_failing = True

    def _close(self, question: asyncio.Task[None]) -> None:
        self._open.discard(question)
        if question.cancelled():
            self._metrics.count("forecast_url_total", "unneeded")


def excerpt(prompt: Sequence[int], text_of: TextOf) -> str:
    half, tokens = MAX_CHARACTERS // 2, MAX_TOKENS // 2
    if len(prompt) > MAX_TOKENS:
        return f"{text_of(prompt[:tokens])[:half]} ... {text_of(prompt[-tokens:])[-half:]}"
    text = text_of(prompt)
    return text if len(text) <= MAX_CHARACTERS else f"{text[:half]} ... {text[-half:]}"


async def _read(response: aiohttp.ClientResponse) -> bytes:
    answer = b""
    async for chunk in response.content.iter_any():
        answer += chunk
        if len(answer) > _MAX_BYTES:
            raise NoLengthError("nonsense", f"its answer has more than {_MAX_BYTES} bytes")
    return answer


def _length(answer: bytes) -> float:
    try:
        text: Any = json.loads(answer)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise NoLengthError("nonsense", f"its answer is no chat completion: {_quote(answer)}") from error
    found = _NUMBER.fullmatch(text) if isinstance(text, str) else None
    tokens = 0 if found is None else int(found[1].replace(",", ""))
    if not 1 <= tokens <= _LONGEST:
        raise NoLengthError("nonsense", f"it must return a number in [1, {_LONGEST}], got {_quote(text)}")
    return float(tokens)


def _quote(text: object) -> str:
    shown = text.decode(errors="replace") if isinstance(text, bytes) else str(text)
    return repr(shown if len(shown) <= _LONGEST_QUOTE else shown[:_LONGEST_QUOTE] + "...")
