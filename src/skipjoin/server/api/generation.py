"""One HTTP request at work: its sequences at the engine, their outputs as they come, and the answer on the wire."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from skipjoin.core.request import FinishReason
from skipjoin.engine.text import Choice
from skipjoin.sampling import SamplingParams
from skipjoin.server.api.errors import ApiError, deadline_exceeded, from_engine, given_up, unavailable
from skipjoin.server.api.limits import AdmissionSlot
from skipjoin.server.api.responses import Usage
from skipjoin.server.api.service import Service, remaining, seed_of
from skipjoin.server.engines.engine_client import EngineClient
from skipjoin.server.engines.errors import EngineError
from skipjoin.server.engines.sequences import EngineSequence, Mailbox

logger = logging.getLogger(__name__)


class DisconnectedError(Exception):
    """The client is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be generated: one sequence for each choice, with the choice's own prompt.

    params: one for each choice, without its seed. deadline_s: from `arrived`, on the monotonic clock.
    """

    choices: list[Choice]
    params: list[SamplingParams]
    places: list[AdmissionSlot]
    n: int
    priority: int
    deadline_s: float | None
    arrived: float


class Format(Protocol):
    """How one kind of answer looks. Events and bodies are JSON."""

    def event(self, choice: Choice, text: str, usage: Usage | None) -> list[bytes]:
        """The events for what a choice has new; none if that is nothing to show."""
        ...

    def usage_event(self, usage: Usage) -> bytes:
        """The event that holds only the usage."""
        ...

    def whole(self, choices: Sequence[Choice], texts: Sequence[str], usage: Usage) -> bytes:
        """The answer of a request that does not stream."""
        ...


class JobRun:
    """A job at the engine. It must be closed, after which nothing of it is left there."""

    def __init__(self, job: Job, client: EngineClient) -> None:
        self._client = client
        self._mailbox = Mailbox()
        self._sequences: list[EngineSequence] = []
        self.choices = job.choices
        self.open = len(job.choices)  # choices that go on
        # A prompt with n choices is counted once.
        self._prompt_tokens = sum(len(choice.prompt) for choice in job.choices[:: job.n])
        left = remaining(job.deadline_s, job.arrived)
        try:
            for choice, params, place in zip(job.choices, job.params, job.places, strict=True):
                seed = seed_of(params.seed, choice.index % job.n)
                self._sequences.append(
                    client.submit(
                        self._mailbox,
                        choice.index,
                        choice.prompt,
                        params if seed == params.seed else replace(params, seed=seed),
                        priority=job.priority,
                        deadline_s=left,
                        on_start=place.started,
                        on_end=place.ended,
                    )
                )
        except BaseException:
            self.close()
            raise

    async def next(self) -> dict[int, str]:
        """Text that is new, by choice; a choice is in it if there is any news of it. Raises the error that ends the
        request, or `DisconnectedError`."""
        news: dict[int, str] = {}
        for output in await self._mailbox.get():
            index = output.choice
            choice = self.choices[index]
            if choice.finish_reason is not None:  # a stop string ended it while more tokens were on their way
                continue
            if output.reason is not None:
                _check_reason(output.reason, output.error)
            text = choice.take(output)
            news[index] = news[index] + text if index in news else text
            if choice.finish_reason is not None:
                self.open -= 1
                if output.reason is None:
                    self._client.complete(self._sequences[index])
        return news

    def usage(self) -> Usage:
        """Tokens so far."""
        generated = sum(choice.tokens for choice in self.choices)
        return Usage(self._prompt_tokens, generated, self._prompt_tokens + generated)

    def disconnected(self) -> None:
        """The client is gone: let `next` raise."""
        self._mailbox.fail(DisconnectedError())

    def close(self) -> None:
        """Give up what is not over."""
        self._client.abort(self._sequences)


def _check_reason(reason: FinishReason, error: str) -> None:
    """Raise for an end that is not the output's own. error: what happened, if it was one."""
    if reason is FinishReason.ERROR:
        raise given_up(error)
    if reason is FinishReason.DEADLINE:
        raise deadline_exceeded()
    if reason is FinishReason.ABORT:
        raise unavailable("the request was aborted", "aborted")


@asynccontextmanager
async def _at_work(job: Job, service: Service, receive: Receive) -> AsyncIterator[JobRun]:
    """The job's run, while the client's connection is watched; closed whatever happens."""
    service.busy += 1
    watcher: asyncio.Task[None] | None = None
    run: JobRun | None = None
    try:
        run = JobRun(job, service.client)
        watcher = asyncio.create_task(_watch(receive, run))
        yield run
    finally:
        service.busy -= 1
        if watcher is not None:
            watcher.cancel()
        if run is not None:
            run.close()
        for place in job.places:
            place.ended()


async def _watch(receive: Receive, run: JobRun) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    run.disconnected()


class WholeReply(Response):
    """Generates, then answers with one JSON body."""

    def __init__(self, job: Job, service: Service, form: Format) -> None:
        super().__init__()
        self._job, self._service, self._form = job, service, form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with _at_work(self._job, self._service, receive) as run:
                texts = [""] * len(run.choices)
                while run.open:
                    for index, text in (await run.next()).items():
                        texts[index] += text
                body = self._form.whole(run.choices, texts, run.usage())
        except DisconnectedError:
            await Response(status_code=499)(scope, receive, send)  # goes nowhere, but ends the exchange
            return
        await Response(body, media_type="application/json")(scope, receive, send)


class StreamReply(Response):
    """Generates, and answers with server-sent events as tokens come. An error is the last event then.

    usage_at_end: one more event with the usage. usage_always: it stands in every event.
    """

    def __init__(self, job: Job, service: Service, form: Format, *, usage_at_end: bool, usage_always: bool) -> None:
        super().__init__()
        self._job, self._service, self._form = job, service, form
        self._usage_at_end, self._usage_always = usage_at_end, usage_always

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with _at_work(self._job, self._service, receive) as run:
                await send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM})
                try:
                    last = await self._send_all(run, send)
                except ApiError as error:
                    last = _event(error.body())
                except EngineError as error:
                    last = _event(from_engine(error).body())
                except DisconnectedError:
                    last = b""
                except Exception:
                    logger.exception("a stream failed")
                    last = _event(ApiError(500, "internal error", code="internal_error").body())
        except DisconnectedError:
            return
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_all(self, run: JobRun, send: Send) -> bytes:
        """Send events until all choices are over; the bytes that end the stream."""
        while True:
            news = await run.next()
            usage = run.usage() if self._usage_always else None
            events: list[bytes] = []
            for index, text in news.items():
                events.extend(self._form.event(run.choices[index], text, usage))
            body = b"".join([_event(event) for event in events])
            if not run.open:
                end = _event(self._form.usage_event(run.usage())) if self._usage_at_end else b""
                return body + end + b"data: [DONE]\n\n"
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})


_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies would hold events back
]


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
