"""Another server's model as a forecaster: it is asked how long an output will get, while the request is served.

EconoServe (section 3.3.2) has the predictor of response lengths on another server, which many servers may share. Its
answer comes while a request waits or its prompt is computed; until then, and without an answer, the prior serves.
"""

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

TextOf = Callable[[Sequence[int]], str]

_log = logging.getLogger(__name__)

# The environment variable with the key that the other server asks for.
KEY_VARIABLE = "SKIPJOIN_FORECAST_API_KEY"
# Questions that may wait for an answer. A request beyond that keeps the prior's forecast.
MOST_QUESTIONS = 64
# Characters of a prompt that are sent, the first half of them from its start and the others from its end, and the
# tokens that they are taken from: the text of an endless prompt would hold the event loop up.
MOST_CHARACTERS, MOST_TOKENS = 4096, 1024
_LONGEST = LENGTH_EDGES[-1]
_INSTRUCTION = (
    "How many tokens does a language model need to answer the text below? Do not answer it. "
    "Reply with one whole number and nothing else.\n\n"
)
_TRIAL = "Count from 1 to 20."
# Tokens of an answer: the longest number has 7 digits, and some models have a token for each of them.
_ANSWER_TOKENS = 16
# Words may follow the number, such as "tokens".
_NUMBER = re.compile(r"\s*(\d{1,3}(?:,\d{3})+|\d{1,9})(?:\.\d*)?(?:\s.*)?", re.ASCII | re.DOTALL)
# Servers close connections that are idle for 5 s or more; a question that is sent at that moment would be lost.
_KEEP_ALIVE_S = 2.0
# More bytes are no answer to such a question.
_MOST_BYTES = 1 << 16
# Most characters of another server's text that are told.
_LONGEST_QUOTE = 100


class NoLengthError(Exception):
    """The server told no length. outcome: the `FORECAST_OUTCOMES` that it is. The text says what happened."""

    def __init__(self, outcome: str, text: str) -> None:
        super().__init__(text)
        self.outcome = outcome


class LengthServer:
    """The server of `--forecast-url`. Made on the event loop, and closed there. key: None: none is sent.

    Raises `ConfigError` for a key that cannot be sent.
    """

    def __init__(self, config: ServerConfig, key: str | None = None) -> None:
        assert config.forecast_url is not None
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ConfigError(f"{KEY_VARIABLE} must be printable ASCII characters")
        self._given = config.forecast_url
        self._url = base_url("forecast_url", config.forecast_url) + "/v1/chat/completions"
        self._model = {} if config.forecast_model is None else {"model": config.forecast_model}
        self._timeout_s = config.forecast_timeout_s
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=MOST_QUESTIONS, keepalive_timeout=_KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def tokens(self, text: str) -> float:
        """How many tokens the answer to a text has, in [1, 2^20]. Raises `NoLengthError`."""
        body = {
            **self._model,
            "messages": [{"role": "user", "content": _INSTRUCTION + text}],
            "temperature": 0,
            "max_tokens": _ANSWER_TOKENS,
        }
        try:
            # A redirect would take the key elsewhere.
            async with self._session.post(self._url, json=body, allow_redirects=False) as response:
                status, answer = response.status, await _read(response)
        except TimeoutError as error:
            raise NoLengthError("timeout", f"it did not answer within {self._timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: of parts of the URL
            raise NoLengthError("error", str(error) or type(error).__name__) from error
        if status != 200:
            raise NoLengthError("error", f"it answered with HTTP status {status}: {_quote(answer)}")
        return _length(answer)

    async def check(self) -> None:
        """Ask once. Raises `ConfigError` without a length."""
        try:
            await self.tokens(_TRIAL)
        except NoLengthError as error:
            raise ConfigError(f"forecast_url {self._given} cannot be used: {error}") from error

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()


class Questions:
    """Asks a server, which it owns, about prompts, at most `MOST_QUESTIONS` at once. It lives on the event loop."""

    def __init__(self, server: LengthServer, metrics: Metrics) -> None:
        self._server = server
        self._metrics = metrics
        self._open: set[asyncio.Task[None]] = set()
        self._is_failing = False

    def ask(
        self, text_of: TextOf, prompt: Sequence[int], max_tokens: int, tell: Callable[[Forecast], None]
    ) -> asyncio.Task[None] | None:
        """Begin to ask how long the output of a prompt gets, which has at most max_tokens tokens. text_of: the text of
        its tokens. tell: gets the answer, if there is one; cancelling the task drops the question. None: too many are
        open."""
        if len(self._open) >= MOST_QUESTIONS:
            self._metrics.asked("skipped")
            return None
        question = asyncio.create_task(self._ask(text_of, prompt, max_tokens, tell))
        self._open.add(question)
        question.add_done_callback(self._close)
        return question

    async def close(self) -> None:
        """Drop the open questions, and close the connections."""
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
        self._metrics.answered(forecast, time.perf_counter() - begin)
        tell(forecast)

    def _fail(self, error: NoLengthError) -> None:
        self._metrics.asked(error.outcome)
        if not self._is_failing:
            _log.warning("the server of forecast_url tells no length, and the prior serves: %s", error)
        self._is_failing = True

    def _close(self, question: asyncio.Task[None]) -> None:
        self._open.discard(question)
        if question.cancelled():
            self._metrics.asked("unneeded")


def excerpt(prompt: Sequence[int], text_of: TextOf) -> str:
    """The text of a prompt; of a long one its start and its end, see `MOST_CHARACTERS`."""
    half, tokens = MOST_CHARACTERS // 2, MOST_TOKENS // 2
    if len(prompt) > MOST_TOKENS:
        return f"{text_of(prompt[:tokens])[:half]} ... {text_of(prompt[-tokens:])[-half:]}"
    text = text_of(prompt)
    return text if len(text) <= MOST_CHARACTERS else f"{text[:half]} ... {text[-half:]}"


async def _read(response: aiohttp.ClientResponse) -> bytes:
    answer = b""
    async for piece in response.content.iter_any():
        answer += piece
        if len(answer) > _MOST_BYTES:
            raise NoLengthError("nonsense", f"its answer has more than {_MOST_BYTES} bytes")
    return answer


def _length(answer: bytes) -> float:
    """The number that a chat completion tells. Raises `NoLengthError`."""
    try:
        text: Any = json.loads(answer)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise NoLengthError("nonsense", f"its answer is no chat completion: {_quote(answer)}") from error
    found = _NUMBER.fullmatch(text) if isinstance(text, str) else None
    tokens = 0 if found is None else int(found[1].replace(",", ""))
    if not 1 <= tokens <= _LONGEST:
        raise NoLengthError("nonsense", f"it must tell a number in [1, {_LONGEST}], and told {_quote(text)}")
    return float(tokens)


def _quote(text: object) -> str:
    """What another server said, on one line and cut."""
    shown = text.decode(errors="replace") if isinstance(text, bytes) else str(text)
    return repr(shown if len(shown) <= _LONGEST_QUOTE else shown[:_LONGEST_QUOTE] + "...")
