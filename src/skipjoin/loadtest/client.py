from __future__ import annotations

import asyncio
import errno
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self

import aiohttp
import msgspec

from skipjoin.config import ConfigError
from skipjoin.loadtest.http_answer import Answer, Failure, failure
from skipjoin.loadtest.http_request import Bodies
from skipjoin.loadtest.targets import Target
from skipjoin.observe.requests import RequestFacts
from skipjoin.routes import PROGRAM_HEADER
from skipjoin.system.unreachable import why_unreachable
from skipjoin.workload.request import WorkloadRequest, chains_of
from skipjoin.workload.streams import Closed, ClosedMode

# A run is aborted after this time and number of failures without any data from the server.
MAX_FAILING_S, MIN_FAILURES = 3.0, 3
CONNECTION_FAILURES = ("refused", "reset", "unreachable")
REJECTED = "http_429"
# Below the idle timeout of servers, which is 5 s or more: a request that is sent while the server closes its connection
# would fail.
_KEEP_ALIVE_S = 2.0
_CHECK_TIMEOUT_S = 10.0
_TICK_S = 0.5
# Event loop timers have a resolution of 1 ms. The last millisecond of a wait is spent polling, because requests that
# are due within the same millisecond would be sent together otherwise.
_TIMER_S = 0.001
# Pause after a failed job of a closed-loop stream, so that a server that refuses all jobs is not flooded.
_PAUSE_S = 1.0
# More than the number of local ports.
_CONNECTIONS = 1 << 16


@dataclass(slots=True)
class Exchange:
    """Job and its outcome. Times are in seconds from the start of the run.

    The arrival of `facts` is the job's due time, so that client lag counts as latency.
    """

    job: WorkloadRequest
    facts: RequestFacts
    sent: float | None = None
    output: str = ""
    failure: Failure | None = None

    @property
    def lag(self) -> float | None:
        return None if self.sent is None else self.sent - self.job.at

    def as_json(self) -> dict[str, Any]:
        facts = self.facts
        texts = {} if self.job.prompt is None else {"row": self.job.row, "output": self.output}
        return {
            "stream": self.job.stream,
            "service": self.job.service.value,
            "priority": self.job.priority,
            "due_s": self.job.at,
            "sent_s": self.sent,
            "first_token_s": facts.first_token,
            "last_token_s": facts.last_token,
            "ended_s": facts.ended,
            "prompt_tokens": facts.prompt_tokens,
            "output_tokens": facts.output_tokens,
            "output_limit": facts.output_limit,
            "error": self.failure.kind if self.failure else None,
            **texts,
        }


@dataclass(slots=True)
class ClientProgress:
    total: int
    sent: int = 0
    done: int = 0
    failed: int = 0
    lag: float = 0.0


def exchange_of(number: int, job: WorkloadRequest) -> Exchange:
    facts = RequestFacts(
        number, job.at, job.prompt_tokens, job.output_tokens, job.stream, service=job.service, target=job.target
    )
    return Exchange(job, facts)


class ServerGoneError(Exception):
    pass


class Client:
    def __init__(self, target: Target, *, timeout_s: float | None = None) -> None:
        self.target = target
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        _allow_connections()
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self.target.api_key:
            headers["Authorization"] = f"Bearer {self.target.api_key}"
        self._session = await self._stack.enter_async_context(
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
                timeout=self._timeout,
                headers=headers,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def get(self, path: str) -> tuple[int, str]:
        url = self.target.base_url + path
        try:
            async with self._session.get(url, timeout=aiohttp.ClientTimeout(total=_CHECK_TIMEOUT_S)) as response:
                return response.status, await response.text(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = explain(error)
            raise ConfigError(f"cannot reach {url}: {reason.detail}; is the server running?") from error

    async def models(self) -> list[dict[str, Any]]:
        status, text = await self.get("/v1/models")
        where = f"{self.target.base_url}/v1/models"
        if status == 401:
            raise ConfigError(f"{where} requires a key: give --api-key or set OPENAI_API_KEY")
        try:
            found = msgspec.json.decode(text)["data"] if status == 200 else []
            models = [model for model in found if isinstance(model["id"], str)]
        except (ValueError, KeyError, TypeError):
            models = []
        if not models:
            raise ConfigError(f"{where} lists no model (status {status}); is it an OpenAI-compatible server?")
        return models

    async def ask(
        self, exchange: Exchange, body: bytes, clock: Callable[[], float], on_sign: Callable[[], None] = lambda: None
    ) -> None:
        facts = exchange.facts
        answer = Answer(self.target.route)
        exchange.sent = clock()
        try:
            headers = {PROGRAM_HEADER: exchange.job.program} if exchange.job.program else None
            async with self._session.post(self.target.url, data=body, headers=headers) as response:
                on_sign()
                if response.status == 200:
                    while data := await response.content.readany():
                        on_sign()
                        answer.feed(data, clock())
                    answer.close(clock())
                else:
                    answer.error = failure(f"http_{response.status}", _message(await response.read()))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if answer.ended is None:
                answer.error = answer.error or explain(error)
        facts.ended = clock() if answer.ended is None else answer.ended
        facts.first_token, facts.last_token = answer.first_token, answer.last_token
        facts.output_tokens = answer.output_tokens or 0
        facts.prompt_tokens = answer.prompt_tokens or facts.prompt_tokens
        exchange.output = answer.text
        exchange.failure = answer.problem(self.target.max_tokens(exchange.job) or 0, may_stop=self.target.may_stop)
        whole = "stop" if answer.finish_reason == "stop" else "length"
        facts.reason = whole if exchange.failure is None else exchange.failure.kind


@dataclass(slots=True)
class ClosedLoad:
    """Closed-loop stream with its infinite jobs, none sent after `until` seconds."""

    stream: Closed
    jobs: Iterator[WorkloadRequest]
    bodies: Bodies
    until: float


class ClientRun:
    """One run over jobs and closed-loop streams, aborted (`gone`) if the server fails all connections."""

    def __init__(
        self,
        client: Client,
        jobs: Sequence[WorkloadRequest],
        bodies: Bodies,
        on_progress: Callable[[ClientProgress], None] | None = None,
        *,
        closed: Sequence[ClosedLoad] = (),
    ) -> None:
        self._client = client
        self._bodies = bodies
        self._closed = closed
        self._on_progress = on_progress
        self._progress = ClientProgress(len(jobs))
        self._failing_since: float | None = None
        self._failures = 0
        self._start = 0.0
        self.exchanges = [exchange_of(number, job) for number, job in enumerate(jobs)]
        self.gone = False  # the run was aborted

    async def go(self) -> float:
        self._start = time.monotonic()
        ticker = asyncio.create_task(self._report()) if self._on_progress is not None else None
        try:
            async with asyncio.TaskGroup() as group:
                for load in self._closed:
                    self._keep_going(group, load)
                await self._pace(group, list(self.exchanges))
        except* ServerGoneError:
            self.gone = True
            self._abandon()
        finally:
            if ticker is not None:
                ticker.cancel()
        return self._now()

    def _now(self) -> float:
        # The loop's clock does not advance during callbacks.
        return time.monotonic() - self._start

    async def _pace(self, group: asyncio.TaskGroup, exchanges: Sequence[Exchange]) -> None:
        for first, *others in chains_of(exchange.job for exchange in exchanges):
            exchange, calls = exchanges[first], [exchanges[index] for index in others]
            # Created ahead of time, because generating a long prompt takes longer than sending it.
            body = self._bodies.make(exchange.job)
            while (wait := exchange.job.at - self._now()) > 0:
                await asyncio.sleep(max(0.0, wait - _TIMER_S))
            group.create_task(self._ask_chain(exchange, body, calls))

    async def _ask_chain(self, exchange: Exchange, body: bytes, calls: Sequence[Exchange]) -> None:
        await self._ask(exchange, body)
        for call in calls:
            due = self._now() + (call.job.pause_s or 0.0)
            body = self._bodies.make(call.job)
            await asyncio.sleep(due - self._now())
            call.job = call.job._replace(at=due)
            call.facts.arrival = due
            await self._ask(call, body)

    def _keep_going(self, group: asyncio.TaskGroup, load: ClosedLoad) -> None:
        together = load.stream.mode is ClosedMode.BATCH
        lanes, width = (1, load.stream.size) if together else (load.stream.size, 1)
        for _ in range(lanes):
            group.create_task(self._follow(load, width))

    async def _follow(self, load: ClosedLoad, width: int) -> None:
        while self._now() < load.until:
            async with asyncio.TaskGroup() as batch:
                for job in islice(load.jobs, width):
                    batch.create_task(self._ask_closed(load, job))
                    await asyncio.sleep(0)  # lets other requests leave on time between bodies

    async def _ask_closed(self, load: ClosedLoad, job: WorkloadRequest) -> None:
        body = load.bodies.make(job)
        exchange = exchange_of(len(self.exchanges), job._replace(at=self._now()))
        self.exchanges.append(exchange)
        self._progress.total += 1
        await self._ask(exchange, body)
        if exchange.failure is not None:
            await asyncio.sleep(_PAUSE_S)

    async def _ask(self, exchange: Exchange, body: bytes) -> None:
        progress = self._progress
        progress.sent += 1
        progress.lag = max(progress.lag, self._now() - exchange.job.at)
        await self._client.ask(exchange, body, self._now, self._note_sign)
        progress.done += 1
        if exchange.failure is not None:
            progress.failed += 1
            if exchange.failure.kind in CONNECTION_FAILURES:
                self._note_failure()

    def _note_sign(self) -> None:
        self._failing_since = None

    def _note_failure(self) -> None:
        now = self._now()
        if self._failing_since is None:
            self._failing_since, self._failures = now, 0
        self._failures += 1
        if now - self._failing_since >= MAX_FAILING_S and self._failures >= MIN_FAILURES:
            raise ServerGoneError

    def _abandon(self) -> None:
        now = self._now()
        for exchange in self.exchanges:
            if exchange.facts.ended is None:
                sent = exchange.sent is not None
                exchange.failure = Failure("abandoned" if sent else "not_sent", "the server failed all connections")
                exchange.facts.ended, exchange.facts.reason = now, exchange.failure.kind

    async def _report(self) -> None:
        assert self._on_progress is not None
        while True:
            self._on_progress(self._progress)
            self._progress.lag = 0.0
            await asyncio.sleep(_TICK_S)


async def warm_up(client: Client, jobs: Sequence[WorkloadRequest], bodies: Bodies) -> None:
    failures: list[Failure] = []
    for number, job in enumerate(jobs):
        exchange = exchange_of(number, job._replace(at=0.0))
        await client.ask(exchange, bodies.make(job), time.monotonic)
        if exchange.failure is not None:
            failures.append(exchange.failure)
    if jobs and len(failures) == len(jobs):
        ((kind, detail), _), *_ = Counter(failures).most_common(1)
        raise ConfigError(f"{client.target.url}: all {len(jobs)} warm-up requests failed: {kind}: {detail}")


def explain(error: BaseException) -> Failure:
    if isinstance(error, TimeoutError):
        return Failure("timeout", "no answer in time")
    number = getattr(error, "errno", None)
    if number in (errno.EMFILE, errno.ENFILE):
        return Failure("client_files", "this process may not open more connections; see ulimit -n")
    if number == errno.ECONNREFUSED:
        return Failure("refused", "connection refused")
    if isinstance(error, aiohttp.ClientConnectorError):
        return failure("unreachable", why_unreachable(error))
    if isinstance(error, aiohttp.ClientConnectionError | aiohttp.ClientPayloadError | OSError):
        return failure("reset", f"connection lost: {getattr(error, 'strerror', None) or error}")
    return failure("malformed", f"not HTTP: {error}")


def _message(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode("utf-8", "replace")


def _allow_connections() -> None:
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _CONNECTIONS if most == resource.RLIM_INFINITY else min(most, _CONNECTIONS)
    if now != resource.RLIM_INFINITY and now < wanted:
        with suppress(ValueError, OSError):  # some systems enforce a lower limit than they report
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
