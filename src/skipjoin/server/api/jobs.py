from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from msgspec import UNSET

from skipjoin.adapters import AdapterUse
from skipjoin.core.request import DEFAULT_OPTIONS, FinishReason, RequestOptions, ServiceClass
from skipjoin.engine.text import Choice
from skipjoin.sampling import SamplingParams
from skipjoin.server.api.arrivals import Arrival
from skipjoin.server.api.auth import ANONYMOUS
from skipjoin.server.api.errors import ApiError, deadline_exceeded, final, unavailable
from skipjoin.server.api.forecasting import Expectation
from skipjoin.server.api.limits import Admission, AdmissionSlot
from skipjoin.server.api.request_index import IndexedRequest
from skipjoin.server.api.responses import CompletionDetails, PromptDetails, Usage
from skipjoin.server.api.service import Service
from skipjoin.server.engines.sequences import EngineSequence, OutputQueue

# More tokens with log-probabilities than this are formatted in a thread, so that streams do not stall.
_MANY_SCORED = 64
# Choices that are created or sent without a return to the event loop, for the same reason.
AT_ONCE = 64


def _start(slot: AdmissionSlot, expected: Expectation) -> None:
    slot.started()
    expected.started()


class Format(ABC):
    """Format of one response. Its events are framed (`routes.Frames`), and may be empty or several."""

    id: str
    has_usage = False

    def begin(self, usage: Usage) -> bytes:
        return b""

    def item(self, choice: Choice, text: str, usage: Usage | None) -> bytes:
        return b""

    def end(self, usage: Usage) -> bytes:
        return b""

    def error(self, error: ApiError) -> bytes:
        return error.body()

    @abstractmethod
    def whole(self, texts: Mapping[Choice, str], usage: Usage) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The deadline in `options` counts from `arrived`, on the monotonic clock. `queue` None is that of HTTP."""

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

    `choices` are grouped by prompt. `keep` stores the response before the client gets its end.
    """

    choices: list[Choice]
    params: list[SamplingParams]
    slots: list[AdmissionSlot]
    expectations: list[Expectation]
    copies: int
    prompt_tokens: int
    origin: Origin
    format: Format
    adapter: AdapterUse | None = None
    keep: Callable[[], Awaitable[None]] | None = None

    def close(self) -> None:
        free(self.slots, self.adapter)


class JobRun:
    """Context manager, and iterator over new text. Exit aborts the job and releases its slots.

    Entry and iteration raise `ApiError` and `EngineError`.
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
        self._submitted_at = job.origin.arrived

    async def __aenter__(self) -> JobRun:
        job, origin = self.job, self.job.origin
        try:
            options = _remaining(origin.options, origin.arrived)
            for number in range(len(job.choices)):
                self._submit(number, options)
                if number % AT_ONCE == AT_ONCE - 1:
                    await asyncio.sleep(0)
            self._submitted_at = time.monotonic()
            numbers = [sequence.id for sequence in self._sequences]
            program = options.program.name if options.program is not None else ""
            self._indexed = self._service.index.add(job.format.id, origin.request_id, origin.owner, numbers, program)
            self._indexed.cancel = partial(self.fail, final(409, "the request was canceled", "canceled"))
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
            owner=job.origin.owner,
            adapter="" if job.adapter is None else job.adapter.adapter.name,
            like=self._sequences[-1] if number % job.copies else None,
            on_start=partial(_start, job.slots[number], expected),
            on_end=expected.ended,
        )
        self._sequences.append(sequence)
        expected.follow(partial(client.reforecast, sequence))

    async def ready(self) -> None:
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
                    raise final(400, output.error, "grammar_too_expensive")
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
        """Position in the queue and expected seconds, or None once a choice runs."""
        slots = self.job.slots
        return None if any(slot.waited_s is not None for slot in slots) else slots[0].place

    def fail(self, error: Exception) -> None:
        self._mailbox.fail(error)

    def stop(self) -> None:
        """Abort unfinished choices. The admission slots stay reserved."""
        self._client.abort(self._sequences)

    def close(self) -> None:
        """Abort unfinished choices and count the outputs. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self.stop()
        self.job.close()
        if self._indexed is not None and self._indexed.ended is None:
            self._service.index.ended(self._indexed)
            self._note_arrivals()

    def _note_arrivals(self) -> None:
        job, origin = self.job, self.job.origin
        age_s = time.monotonic() - origin.arrived
        first_s = None if self.first_token_at is None else self.first_token_at - origin.arrived
        for choice, sequence in zip(job.choices, self._sequences, strict=True):
            if choice.tokens:
                self._service.arrivals.add(
                    Arrival(
                        time.time() - age_s,
                        len(choice.prompt),
                        choice.tokens,
                        origin.options.service,
                        first_s,
                        age_s,
                        origin.owner,
                        sequence.id,
                        self._submitted_at - origin.arrived,
                        self.first_token_at,
                    )
                )
        choices, n = job.choices, job.copies
        for at in range(0, len(choices), n):
            longest = max(choice.tokens for choice in choices[at : at + n])
            self._service.metrics.observe("request_max_num_generation_tokens", longest)

    def _fail_slow_reader(self) -> None:
        self.fail(unavailable("the client reads too slowly: too much of the output waits to be sent", "slow_reader"))
        self.stop()


def free(slots: Iterable[AdmissionSlot], adapter: AdapterUse | None) -> None:
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
        raise final(500, error, "request_failed")
    if reason is FinishReason.DEADLINE:
        raise deadline_exceeded()
    if reason is FinishReason.ABORT:
        raise unavailable("the request was aborted", "aborted")
