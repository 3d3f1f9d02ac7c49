"""Generation independent of HTTP.

job = await endpoint.prepare(body, Origin())
async with endpoint.run(job) as run:
    async for deltas in run:
        ...
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from msgspec import UNSET

from skipjoin.adapters import AdapterUse
from skipjoin.core.request import DEFAULT_OPTIONS, FinishReason, RequestOptions, ServiceClass
from skipjoin.engine.text import Choice, TextRules
from skipjoin.formats.message import MessageReader
from skipjoin.pooling import Task
from skipjoin.routes import Route
from skipjoin.sampling import SamplingParams
from skipjoin.server.api.arrivals import Arrival
from skipjoin.server.api.auth import ANONYMOUS
from skipjoin.server.api.errors import (
    ApiError,
    canceled,
    deadline_exceeded,
    grammar_too_expensive,
    request_failed,
    too_slow,
    unavailable,
)
from skipjoin.server.api.forecasting import Expectation
from skipjoin.server.api.limits import Admission, AdmissionSlot
from skipjoin.server.api.protocol import RequestBody
from skipjoin.server.api.request_index import IndexedRequest
from skipjoin.server.api.responses import CompletionDetails, PromptDetails, Usage
from skipjoin.server.api.service import Service
from skipjoin.server.engines.sequences import EngineSequence, OutputQueue

# More tokens with log-probabilities than this are formatted in a thread, so that streams do not stall.
_MANY_SCORED = 64
# Choices that are created without a return to the event loop, for the same reason.
_AT_ONCE = 64

BodyT = TypeVar("BodyT", bound=RequestBody)


class Format(Protocol):
    """Formatter of one response. Its events are framed (`routes.Frames`), and may be empty or several."""

    id: str
    has_usage: bool

    def begin(self, usage: Usage) -> bytes: ...

    def item(self, choice: Choice, text: str, usage: Usage | None) -> bytes: ...

    def end(self, usage: Usage) -> bytes: ...

    def error(self, error: ApiError) -> bytes: ...

    def whole(self, texts: Mapping[Choice, str], usage: Usage) -> bytes: ...


class Prompt(NamedTuple):
    ids: list[int]
    text: str | None
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a body comes from.

    Attributes:
        options: Those of its sequences, without what `Endpoint.prepare` adds.
        arrived: Seconds on the monotonic clock from which the deadline in `options` counts.
        queue: Where its sequences wait; None for that of HTTP requests.
        owner: Hashed API key.
    """

    options: RequestOptions = DEFAULT_OPTIONS
    arrived: float = field(default_factory=time.monotonic)
    queue: Admission | None = None
    owner: str = ANONYMOUS
    request_id: str = ""

    @property
    def is_best_effort(self) -> bool:
        # Only the queue of HTTP requests reserves a part for real-time requests.
        return self.queue is None and self.options.service is ServiceClass.BEST_EFFORT


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Validated and tokenized request that holds admission slots. It must be run or closed.

    Attributes:
        choices: Grouped by prompt. `params`, `slots` and `expectations` have one entry for each.
        options, arrived, owner, request_id: As in `Origin`.
        keep: Stores the formatted response before the client gets the end of it.
    """

    choices: list[Choice]
    params: list[SamplingParams]
    slots: list[AdmissionSlot]
    expectations: list[Expectation]
    copies: int
    prompt_tokens: int
    options: RequestOptions
    arrived: float
    format: Format
    owner: str = ANONYMOUS
    request_id: str = ""
    adapter: AdapterUse | None = None
    keep: Callable[[], Awaitable[None]] | None = None

    def close(self) -> None:
        _free(self.slots, self.adapter)


class JobRun:
    """Running job: a context manager, and an iterator over new text.

    Exit aborts the job and releases its slots. Entry and iteration raise `ApiError` and `EngineError`.
    """

    def __init__(self, job: Job, service: Service) -> None:
        self.job = job
        self._service = service
        self._client = service.client
        self._mailbox = OutputQueue(self._fail_slow_reader, len(job.choices))
        self._sequences: list[EngineSequence] = []
        self._unfinished = len(job.choices)
        self._indexed: IndexedRequest | None = None
        self._is_closed = False
        self.first_token_at: float | None = None
        self._submitted_at = job.arrived

    async def __aenter__(self) -> JobRun:
        try:
            options = _remaining(self.job.options, self.job.arrived)
            for number in range(len(self.job.choices)):
                self._submit(number, options)
                if number % _AT_ONCE == _AT_ONCE - 1:
                    await asyncio.sleep(0)
            self._submitted_at = time.monotonic()
            job, numbers = self.job, [sequence.id for sequence in self._sequences]
            program = job.options.program.name if job.options.program is not None else ""
            self._indexed = self._service.index.add(job.format.id, job.request_id, job.owner, numbers, program)
            self._indexed.cancel = partial(self.fail, canceled())
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def _submit(self, number: int, options: RequestOptions) -> None:
        job, client = self.job, self._client
        choice, expected = job.choices[number], job.expectations[number]
        sequence = client.submit(
            self._mailbox,
            choice.index,
            choice.prompt,
            job.params[number],
            options=options,
            forecast=expected.forecast,
            label=job.format.id,
            owner=job.owner,
            adapter="" if job.adapter is None else job.adapter.adapter.name,
            like=self._sequences[-1] if number % job.copies else None,
            on_start=job.slots[number].started,
            on_end=expected.ended,
        )
        self._sequences.append(sequence)
        expected.follow(partial(client.reforecast, sequence))

    async def ready(self) -> None:
        """Wait for output or a failure."""
        await self._mailbox.ready()

    def __aiter__(self) -> JobRun:
        return self

    async def __anext__(self) -> dict[Choice, str]:
        if not self._unfinished:
            raise StopAsyncIteration
        deltas: dict[Choice, str] = {}
        choices = self.job.choices
        for output in await self._mailbox.get():
            choice = choices[output.choice]
            if choice.finish_reason is not None:  # tokens that were in transit when a stop string matched
                continue
            if output.reason is not None:
                if output.is_refused:
                    raise grammar_too_expensive(output.error)
                _check_reason(output.reason, output.error)
            text = choice.take(output)
            deltas[choice] = deltas[choice] + text if choice in deltas else text
            if choice.finish_reason is not None:
                self._unfinished -= 1
                if output.reason is None:
                    self._client.complete(self._sequences[output.choice])
        if self.first_token_at is None:
            self.first_token_at = time.monotonic()
        return deltas

    @property
    def is_finished(self) -> bool:
        return not self._unfinished

    async def whole(self) -> bytes:
        texts = dict.fromkeys(self.job.choices, "")
        async for deltas in self:
            for choice, text in deltas.items():
                texts[choice] += text
        form = self.job.format
        if sum(choice.values_to_format for choice in texts) > _MANY_SCORED:
            body = await self._service.in_thread(form.whole, texts, self.usage())
        else:
            body = form.whole(texts, self.usage())
        if self.job.keep is not None:
            await self.job.keep()
        return body

    async def end(self) -> bytes:
        last = self.job.format.end(self.usage())
        if self.job.keep is not None:
            await self.job.keep()
        return last

    async def item(self, choice: Choice, text: str) -> bytes:
        form = self.job.format
        usage = self.usage() if form.has_usage else None
        if len(choice.scored) > _MANY_SCORED:
            return await self._service.in_thread(form.item, choice, text, usage)
        return form.item(choice, text, usage)

    @property
    def prompt_tokens(self) -> int:
        return self.job.prompt_tokens

    @property
    def output_tokens(self) -> int:
        return sum(choice.tokens for choice in self.job.choices)

    @property
    def finish_reason(self) -> str:
        return ",".join(sorted({choice.finish_reason for choice in self.job.choices if choice.finish_reason}))

    def usage(self) -> Usage:
        prompt, output = self.prompt_tokens, self.output_tokens
        cached = sum(sequence.cached_tokens for sequence in self._sequences[:: self.job.copies])
        reasoning = [count for choice in self.job.choices if (count := choice.reasoning_tokens) is not None]
        details = CompletionDetails(sum(reasoning)) if reasoning else UNSET
        waits = [slot.waited_s for slot in self.job.slots if slot.waited_s is not None]
        queue_time = round(max(waits), 6) if waits else UNSET
        return Usage(prompt, output, prompt + output, PromptDetails(cached), details, queue_time)

    @property
    def queue_place(self) -> tuple[int, float | None] | None:
        """Return the position in the queue and the seconds that are still expected, or None once a choice runs."""
        slots = self.job.slots
        return None if any(slot.waited_s is not None for slot in slots) else slots[0].place

    def fail(self, error: Exception) -> None:
        self._mailbox.fail(error)

    def stop(self) -> None:
        """Abort unfinished choices. The admission slots stay reserved."""
        self._client.abort(self._sequences)

    def close(self) -> None:
        """Abort unfinished choices, release the slots and count the outputs. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self.stop()
        self.job.close()
        if self._indexed is not None and self._indexed.ended is None:
            self._service.index.ended(self._indexed)
            self._note_arrivals()

    def _note_arrivals(self) -> None:
        job, age_s = self.job, time.monotonic() - self.job.arrived
        first_s = None if self.first_token_at is None else self.first_token_at - job.arrived
        for choice, sequence in zip(job.choices, self._sequences, strict=True):
            if choice.tokens:
                self._service.arrivals.add(
                    Arrival(
                        time.time() - age_s,
                        len(choice.prompt),
                        choice.tokens,
                        job.options.service,
                        first_s,
                        age_s,
                        job.owner,
                        sequence.id,
                        self._submitted_at - job.arrived,
                        self.first_token_at,
                    )
                )
        choices, n = self.job.choices, self.job.copies
        for at in range(0, len(choices), n):
            longest = max(choice.tokens for choice in choices[at : at + n])
            self._service.metrics.observe("request_max_num_generation_tokens", longest)

    def _fail_slow_reader(self) -> None:
        self.fail(too_slow())
        self.stop()


class Endpoint(ABC, Generic[BodyT]):
    """Endpoint that generates. `operation` is its name in traces, one of OpenTelemetry's.

    Attributes:
        tasks: Those of models that it is for.
    """

    route: ClassVar[Route]
    tasks: ClassVar[Collection[Task]] = (Task.GENERATE,)
    operation: ClassVar[str] = "chat"
    body_type: type[BodyT]

    def __init__(self, service: Service) -> None:
        self.service = service

    def ready(self, body: BodyT) -> dict[str, Any] | None:
        """Return the response to a body that asks for no tokens, or None."""
        return None

    async def prepare(self, body: BodyT, origin: Origin) -> Job:
        """Validate a body, reserve admission slots and tokenize its prompts. No slots are held after an `ApiError`."""
        service, options = self.service, origin.options
        service.check_open()
        found = service.check_model(body.model)
        service.check_task(self.tasks)
        if found is not None:
            options = replace(options, adapter=found.number)
        if service.config.fair_by == "adapter":
            options = replace(options, client=service.shown_model(body.model))
        slots = self._reserve(body, origin, options)
        adapter = None if found is None else service.adapters.use(found)
        try:
            return await self._job(body, origin, options, slots, adapter)
        except BaseException:
            _free(slots, adapter)
            raise

    def _reserve(self, body: BodyT, origin: Origin, options: RequestOptions) -> list[AdmissionSlot]:
        service, param = self.service, self.route.prompt
        estimates = [tokens for tokens in self.estimates(body) for _ in range(body.copies)]
        try:
            return (origin.queue or service.admission).reserve(
                estimates,
                client=options.client,
                weight=options.weight,
                is_best_effort=origin.is_best_effort,
                param=param,
            )
        except ApiError as error:
            if error.param == param and max(estimates) > service.info.max_model_len:
                raise service.too_long(param, f"about {max(estimates)}") from error
            raise

    async def _job(
        self,
        body: BodyT,
        origin: Origin,
        options: RequestOptions,
        slots: list[AdmissionSlot],
        adapter: AdapterUse | None,
    ) -> Job:
        n, admission = body.copies, origin.queue or self.service.admission
        prompts = await self.tokenize(body, options.client or origin.owner)
        rules = self.text_rules(body)
        copies = [(prompt, copy) for prompt in prompts for copy in range(n)]
        admission.resize(slots, [len(prompt.ids) for prompt, _ in copies], is_best_effort=origin.is_best_effort)
        expectations = await self.expect(prompts, origin.owner)
        choices = []
        for index, (prompt, _) in enumerate(copies):
            choices.append(self.choice(index, prompt, rules, body))
            if index % _AT_ONCE == _AT_ONCE - 1:
                await asyncio.sleep(0)
        form = self.format(body, options)
        if options.trace is not None:
            trace = options.trace._replace(response_id=form.id, operation=self.operation)
            options = replace(options, trace=trace)
        return Job(
            choices=choices,
            params=[prompt.params.with_seed_of(copy) for prompt, copy in copies],
            slots=slots,
            expectations=[expected for expected in expectations for _ in range(n)],
            copies=n,
            prompt_tokens=sum(len(prompt.ids) for prompt in prompts),
            options=options,
            arrived=origin.arrived,
            format=form,
            owner=origin.owner,
            request_id=origin.request_id,
            adapter=adapter,
        )

    def run(self, job: Job) -> JobRun:
        return JobRun(job, self.service)

    @abstractmethod
    def estimates(self, body: BodyT) -> list[int]: ...

    @abstractmethod
    async def tokenize(self, body: BodyT, client: str) -> list[Prompt]:
        """Return the tokenized prompts, one per estimate. `client` is whose constraints wait for each other."""

    @abstractmethod
    def format(self, body: BodyT, options: RequestOptions) -> Format: ...

    async def expect(self, prompts: Sequence[Prompt], owner: str) -> list[Expectation]:
        return await self.service.expect([(prompt.ids, prompt.params) for prompt in prompts], owner)

    def choice(self, index: int, prompt: Prompt, rules: TextRules, body: BodyT) -> Choice:
        reader = self.reader(body, prompt)
        return Choice(index, prompt.ids, prompt.text, self.service.tokenizer, rules, reader=reader)

    def reader(self, body: BodyT, prompt: Prompt) -> MessageReader | None:
        return None

    def text_rules(self, body: BodyT) -> TextRules:
        return body.text_rules


def _free(slots: Iterable[AdmissionSlot], adapter: AdapterUse | None) -> None:
    for slot in slots:
        slot.ended()
    if adapter is not None:
        adapter.ended()


def _remaining(options: RequestOptions, arrived: float) -> RequestOptions:
    if options.deadline_s is None:
        return options
    left = options.deadline_s - (time.monotonic() - arrived)
    if left <= 0:
        raise deadline_exceeded()
    return replace(options, deadline_s=left)


def _check_reason(reason: FinishReason, error: str) -> None:
    if reason is FinishReason.ERROR:
        raise request_failed(error)
    if reason is FinishReason.DEADLINE:
        raise deadline_exceeded()
    if reason is FinishReason.ABORT:
        raise unavailable("the request was aborted", "aborted")
