"""Generation without HTTP: an endpoint makes a job from a body, and the job runs at the engine.

    job = await endpoint.prepare(body)
    async with endpoint.run(job) as run:
        async for deltas in run:
            ...

`replies` does this for HTTP. Whatever else has bodies of requests uses the same endpoints.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import ClassVar, Generic, NamedTuple, Protocol, TypeVar

from skipjoin.core.request import DEFAULT_OPTIONS, FinishReason, RequestOptions, ServiceClass
from skipjoin.engine.text import Choice, TextRules
from skipjoin.sampling import SEED_MIN, SamplingParams
from skipjoin.server.api.auth import ANONYMOUS
from skipjoin.server.api.errors import deadline_exceeded, given_up, too_slow, unavailable
from skipjoin.server.api.forecasting import Expectation
from skipjoin.server.api.limits import Admission, AdmissionSlot
from skipjoin.server.api.protocol import GenerationBody
from skipjoin.server.api.responses import PromptDetails, Usage
from skipjoin.server.api.service import Service
from skipjoin.server.engines.sequences import EngineSequence, Mailbox

# Tokens with log-probabilities that are formatted in a thread, so that streams do not stall.
_MANY_SCORED = 64
# Choices that are made at once, for the same reason.
_AT_ONCE = 64

BodyT = TypeVar("BodyT", bound=GenerationBody)


class Format(Protocol):
    """How the answers of an endpoint look. Events and bodies are JSON.

    id: of the answer, as clients see it.
    """

    id: str

    def events(self, choice: Choice, text: str, usage: Usage | None) -> list[bytes]:
        """The events of a stream that show what is new in a choice; none if nothing is to be shown."""
        ...

    def usage_event(self, usage: Usage) -> bytes:
        """The event that holds the usage alone."""
        ...

    def whole(self, texts: Mapping[Choice, str], usage: Usage) -> bytes:
        """The body of an answer that is not streamed. texts: of every choice, in their order."""
        ...


class Prompt(NamedTuple):
    """A tokenized prompt. text: as the client spelled it; None if it came otherwise. params: how it is continued."""

    ids: list[int]
    text: str | None
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request that is checked, tokenized and counted in the queue. It is either run, or given up with `close`.

    choices: the sequences to generate, prompt by prompt. params, slots, expectations: one for each choice; the choices
    of a prompt have the same expectation. copies: choices of each prompt. prompt_tokens: of all prompts, each counted
    once. arrived: seconds on the monotonic clock; the deadline in `options` counts from then.
    owner: a hash of the client's key.
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

    def close(self) -> None:
        """Give the places in the queue back. It may be called again."""
        _free(self.slots)


class JobRun:
    """A job at the engine: a context manager, after which nothing of the job is left at the engine or in the queue, and
    an iterator over what is new.

    first_token_at: when the first token came, in seconds on the monotonic clock; None: it has not.
    Entering raises `ApiError` or `EngineError` if the job cannot begin: its deadline has passed, or there is no engine.
    """

    def __init__(self, job: Job, service: Service) -> None:
        self.job = job
        self._service = service
        self._client = service.client
        self._mailbox = Mailbox(self._give_up, len(job.choices))
        self._sequences: list[EngineSequence] = []
        self._unfinished = len(job.choices)
        self.first_token_at: float | None = None

    async def __aenter__(self) -> JobRun:
        """Hand the choices to the engine, some at a time: other clients are served between them."""
        try:
            options = _remaining(self.job.options, self.job.arrived)
            for number in range(len(self.job.choices)):
                self._submit(number, options)
                if number % _AT_ONCE == _AT_ONCE - 1:
                    await asyncio.sleep(0)
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
            like=self._sequences[-1] if number % job.copies else None,
            on_start=job.slots[number].started,
            on_end=expected.ended,
        )
        self._sequences.append(sequence)
        expected.follow(partial(client.reforecast, sequence))

    def __aiter__(self) -> JobRun:
        return self

    async def __anext__(self) -> dict[Choice, str]:
        """The choices with new tokens or an end, each with its new text, which may be empty.

        Raises the `ApiError` or `EngineError` that ends the job, or what `fail` was given.
        """
        if not self._unfinished:
            raise StopAsyncIteration
        deltas: dict[Choice, str] = {}
        choices = self.job.choices
        for output in await self._mailbox.get():
            choice = choices[output.choice]
            if choice.finish_reason is not None:  # a stop string ended it while more tokens were on their way
                continue
            if output.reason is not None:
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
    def is_over(self) -> bool:
        """Whether all choices are complete."""
        return not self._unfinished

    async def whole(self) -> bytes:
        """Generate everything; the body of the answer. Raises as the iterator does."""
        texts = dict.fromkeys(self.job.choices, "")
        async for deltas in self:
            for choice, text in deltas.items():
                texts[choice] += text
        form = self.job.format
        if sum(len(choice.scored) for choice in texts) > _MANY_SCORED:
            return await self._service.in_thread(form.whole, texts, self.usage())
        return form.whole(texts, self.usage())

    async def events(self, choice: Choice, text: str, usage: Usage | None) -> list[bytes]:
        """`Format.events`, in a thread where there are many log-probabilities."""
        form = self.job.format
        if len(choice.scored) > _MANY_SCORED:
            return await self._service.in_thread(form.events, choice, text, usage)
        return form.events(choice, text, usage)

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts."""
        return self.job.prompt_tokens

    @property
    def output_tokens(self) -> int:
        """So far, of all choices."""
        return sum(choice.tokens for choice in self.job.choices)

    @property
    def finish_reason(self) -> str:
        """Those of the choices; empty before the end of the first one."""
        return ",".join(sorted({choice.finish_reason for choice in self.job.choices if choice.finish_reason}))

    def usage(self) -> Usage:
        """Tokens so far. Cached ones are those of each prompt's first choice, so that each prompt counts once."""
        prompt, output = self.prompt_tokens, self.output_tokens
        cached = sum(sequence.cached_tokens for sequence in self._sequences[:: self.job.copies])
        return Usage(prompt, output, prompt + output, PromptDetails(cached))

    def fail(self, error: Exception) -> None:
        """End the iteration with this error."""
        self._mailbox.fail(error)

    def stop(self) -> None:
        """Abort what is not complete. The places in the queue stay taken."""
        self._client.abort(self._sequences)

    def close(self) -> None:
        """Abort what is not complete, and give the places in the queue back. It may be called again."""
        self.stop()
        self.job.close()

    def _give_up(self) -> None:
        """The outputs that nothing takes are too many."""
        self.fail(too_slow())
        self.stop()


class Endpoint(ABC, Generic[BodyT]):
    """One kind of generation. A subclass says how a body becomes prompts, and how its answers look.

    path: where it is served. body_type: what clients send there.
    """

    path: ClassVar[str]
    body_type: type[BodyT]

    def __init__(self, service: Service) -> None:
        self.service = service

    async def prepare(
        self,
        body: BodyT,
        options: RequestOptions = DEFAULT_OPTIONS,
        arrived: float | None = None,
        *,
        queue: Admission | None = None,
        owner: str = ANONYMOUS,
    ) -> Job:
        """Check a body, count it in the queue, and tokenize it.

        arrived: seconds on the monotonic clock, from which the deadline counts; None: now. queue: whose limits hold;
        None: that of requests over HTTP. owner: a hash of the client's key.
        Raises `ApiError`: 400, 404 for another model, 429 where the queue is full, 503 where no work is taken. The job
        then holds nothing.
        """
        service, n = self.service, body.n or 1
        arrived = time.monotonic() if arrived is None else arrived
        service.check_open()
        service.check_model(body.model)
        admission = queue or service.admission
        # A queue of their own has no part that is kept for others.
        is_best_effort = queue is None and options.service is ServiceClass.BEST_EFFORT
        estimates = [tokens for tokens in self.estimates(body) for _ in range(n)]
        slots = admission.reserve(estimates, client=options.client, is_best_effort=is_best_effort)
        try:
            prompts = await self.tokenize(body)
            rules = self.text_rules(body)
            copies = [(prompt, copy) for prompt in prompts for copy in range(n)]
            admission.resize(slots, [len(prompt.ids) for prompt, _ in copies], is_best_effort=is_best_effort)
            expectations = await service.expect([(prompt.ids, prompt.params) for prompt in prompts], owner)
            choices = []
            for index, (prompt, _) in enumerate(copies):
                choices.append(Choice(index, prompt.ids, prompt.text, service.tokenizer, rules))
                if index % _AT_ONCE == _AT_ONCE - 1:
                    await asyncio.sleep(0)
            return Job(
                choices=choices,
                params=[_with_seed(prompt.params, copy) for prompt, copy in copies],
                slots=slots,
                expectations=[expected for expected in expectations for _ in range(n)],
                copies=n,
                prompt_tokens=sum(len(prompt.ids) for prompt in prompts),
                options=options,
                arrived=arrived,
                format=self.format(body, options),
                owner=owner,
            )
        except BaseException:
            _free(slots)
            raise

    def run(self, job: Job) -> JobRun:
        """What generates, once it is entered."""
        return JobRun(job, self.service)

    @abstractmethod
    def estimates(self, body: BodyT) -> list[int]:
        """About how many tokens each prompt has, at next to no cost."""

    @abstractmethod
    async def tokenize(self, body: BodyT) -> list[Prompt]:
        """The prompts, as many as there are estimates. Raises `ApiError` for what the model cannot take."""

    @abstractmethod
    def format(self, body: BodyT, options: RequestOptions) -> Format:
        """How the answer to this body looks, which is served by these options."""

    def text_rules(self, body: BodyT) -> TextRules:
        """How tokens become text."""
        return TextRules(
            stop=body.stop_strings,
            include_stop=bool(body.include_stop_str_in_output),
            skip_special=body.skip_special_tokens is not False,
            min_tokens=body.min_tokens or 0,
        )


def _free(slots: Iterable[AdmissionSlot]) -> None:
    for slot in slots:
        slot.ended()


def _with_seed(params: SamplingParams, copy: int) -> SamplingParams:
    """The parameters of the copy-th of n choices: with a seed they differ, and the same request gets the same ones."""
    if params.seed is None or copy == 0:
        return params
    return replace(params, seed=SEED_MIN + (params.seed - SEED_MIN + copy) % 2**64)


def _remaining(options: RequestOptions, arrived: float) -> RequestOptions:
    """The options of a request that arrives at the engine now, with the time that is left. Raises 408 if none is."""
    if options.deadline_s is None:
        return options
    left = options.deadline_s - (time.monotonic() - arrived)
    if left <= 0:
        raise deadline_exceeded()
    return replace(options, deadline_s=left)


def _check_reason(reason: FinishReason, error: str) -> None:
    """Raise for an end that is not the output's own. error: what happened, if it was one."""
    if reason is FinishReason.ERROR:
        raise given_up(error)
    if reason is FinishReason.DEADLINE:
        raise deadline_exceeded()
    if reason is FinishReason.ABORT:
        raise unavailable("the request was aborted", "aborted")
