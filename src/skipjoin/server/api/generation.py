"""Generation independent of HTTP.

job = await endpoint.prepare(body, Origin())
async with endpoint.run(job) as run:
    async for deltas in run:
        ...
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from skipjoin.adapters import AdapterUse
from skipjoin.core.request import RequestOptions
from skipjoin.engine.text import Choice, TextRules
from skipjoin.formats.message import MessageReader
from skipjoin.pooling import Task
from skipjoin.routes import Route
from skipjoin.sampling import SamplingParams
from skipjoin.server.api.errors import ApiError
from skipjoin.server.api.forecasting import Expectation
from skipjoin.server.api.jobs import AT_ONCE, Format, Job, JobRun, Origin, free
from skipjoin.server.api.limits import AdmissionSlot
from skipjoin.server.api.protocol import RequestBody
from skipjoin.server.api.service import Service

BodyT = TypeVar("BodyT", bound=RequestBody)


class Prompt(NamedTuple):
    ids: list[int]
    text: str | None
    params: SamplingParams


class Endpoint(ABC, Generic[BodyT]):
    """Endpoint for models of `tasks`. `operation` is one of OpenTelemetry's names."""

    route: ClassVar[Route]
    tasks: ClassVar[Collection[Task]] = (Task.GENERATE,)
    operation: ClassVar[str] = "chat"
    body_type: type[BodyT]
    format_type: Callable[[Service, Any, RequestOptions], Format]

    def __init__(self, service: Service) -> None:
        self.service = service

    def ready(self, body: BodyT) -> dict[str, Any] | None:
        """Return the response to a body that asks for no tokens."""
        return None

    async def prepare(self, body: BodyT, origin: Origin) -> Job:
        """Validate a body, reserve slots and tokenize. No slots are held after an `ApiError`."""
        service, options = self.service, origin.options
        service.check_open()
        found = service.check_model(body.model)
        service.check_task(self.tasks)
        if found is not None:
            options = replace(options, adapter=found.number)
        if service.config.sharing == "adapter":
            options = replace(options, client=service.shown_model(body.model))
        origin = replace(origin, options=options)
        slots = self._reserve(body, origin)
        adapter = None if found is None else service.adapters.use(found)
        try:
            return await self._job(body, origin, slots, adapter)
        except BaseException:
            free(slots, adapter)
            raise

    def _reserve(self, body: BodyT, origin: Origin) -> list[AdmissionSlot]:
        service, param = self.service, self.route.prompt
        estimates = [tokens for tokens in self.estimates(body) for _ in range(body.copies)]
        try:
            return (origin.queue or service.admission).reserve(
                estimates,
                client=origin.options.client,
                weight=origin.options.weight,
                is_best_effort=origin.is_best_effort,
                param=param,
            )
        except ApiError as error:
            if error.param == param and max(estimates) > service.info.max_model_len:
                raise service.too_long(param, f"about {max(estimates)}") from error
            raise

    async def _job(self, body: BodyT, origin: Origin, slots: list[AdmissionSlot], adapter: AdapterUse | None) -> Job:
        options = origin.options
        n, admission = body.copies, origin.queue or self.service.admission
        prompts = await self.tokenize(body, options.client or origin.owner)
        rules = self.text_rules(body)
        copies = [(prompt, copy) for prompt in prompts for copy in range(n)]
        admission.resize(slots, [len(prompt.ids) for prompt, _ in copies], is_best_effort=origin.is_best_effort)
        expectations = await self.expect(prompts, origin.owner)
        choices = []
        for index, (prompt, _) in enumerate(copies):
            choices.append(self.choice(index, prompt, rules, body))
            if index % AT_ONCE == AT_ONCE - 1:
                await asyncio.sleep(0)
        form = self.format_type(self.service, body, options)
        if options.trace is not None:
            trace = options.trace._replace(response_id=form.id, operation=self.operation)
            origin = replace(origin, options=replace(options, trace=trace))
        return Job(
            choices=choices,
            params=[prompt.params.with_seed_of(copy) for prompt, copy in copies],
            slots=slots,
            expectations=[expected for expected in expectations for _ in range(n)],
            copies=n,
            prompt_tokens=sum(len(prompt.ids) for prompt in prompts),
            origin=origin,
            format=form,
            adapter=adapter,
        )

    def run(self, job: Job) -> JobRun:
        return JobRun(job, self.service)

    @abstractmethod
    def estimates(self, body: BodyT) -> list[int]: ...

    @abstractmethod
    async def tokenize(self, body: BodyT, client: str) -> list[Prompt]:
        """Return one prompt per estimate. Constraints of one `client` wait for each other."""

    async def expect(self, prompts: Sequence[Prompt], owner: str) -> list[Expectation]:
        return await self.service.expect([(prompt.ids, prompt.params) for prompt in prompts], owner)

    def choice(self, index: int, prompt: Prompt, rules: TextRules, body: BodyT) -> Choice:
        reader = self.reader(body, prompt)
        return Choice(index, prompt.ids, prompt.text, self.service.tokenizer, rules, reader=reader)

    def reader(self, body: BodyT, prompt: Prompt) -> MessageReader | None:
        return None

    def text_rules(self, body: BodyT) -> TextRules:
        return body.text_rules
