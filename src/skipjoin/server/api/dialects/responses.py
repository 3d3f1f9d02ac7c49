from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import msgspec
from fastapi import Request, Response

from skipjoin.core.request import RequestOptions
from skipjoin.engine.text import Choice
from skipjoin.formats.calls import PartKind
from skipjoin.routes import RESPONSES, SERVER_SENT
from skipjoin.server.api.chat_prompt import estimate_chat
from skipjoin.server.api.dialects.bodies import HostedTool
from skipjoin.server.api.dialects.endpoint import Change, ConvertedEndpoint, ConvertedFormat, Segment, prompt_tokens
from skipjoin.server.api.dialects.responses_body import ResponsesRequest
from skipjoin.server.api.dialects.responses_items import new_id
from skipjoin.server.api.dialects.responses_tools import custom_input
from skipjoin.server.api.errors import CONTEXT_LENGTH, ApiError, bad_request
from skipjoin.server.api.fields import Body
from skipjoin.server.api.generation import Prompt
from skipjoin.server.api.jobs import Job, Origin
from skipjoin.server.api.options import served_tier
from skipjoin.server.api.replies import open_body
from skipjoin.server.api.responses import ChatTokenLogprob, Usage, encode
from skipjoin.server.api.service import Service
from skipjoin.server.api.stored import StoredResponse
from skipjoin.server.api.tokens import counted

_TYPES = {PartKind.TEXT: "message", PartKind.REASONING: "reasoning", PartKind.CALL: "function_call"}
_PARTS = {PartKind.TEXT: "output_text", PartKind.REASONING: "reasoning_text"}


class ResponsesFormat(ConvertedFormat):
    prefix = "resp_"

    def __init__(self, service: Service, body: ResponsesRequest, options: RequestOptions) -> None:
        super().__init__(service, body)
        self._body, self._created, self._tier = body, int(time.time()), served_tier(options)
        self._items: list[str] = []  # ids by index of the segment
        self._logprobs: list[ChatTokenLogprob] = []  # of all text
        self._number = 0
        self._status = "in_progress"
        self._last: dict[str, Any] = {}

    def stored(self) -> StoredResponse:
        return StoredResponse(msgspec.to_builtins(self._last), self._body.items())

    def begin(self, usage: Usage) -> bytes:
        response = self._response("in_progress", [])
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def item(self, choice: Choice, text: str, usage: Usage | None) -> bytes:
        self.started = choice
        return self._events(self.segments.add(choice.take_parts(text)))

    def end(self, usage: Usage) -> bytes:
        self._status = self._end_status()
        events, status = self._events(self.segments.finish()), self._status
        output = [self._item(segment) for segment in self.segments.found]
        self._last = self._response(status, output, usage)
        return events + self._event(f"response.{status}", response=self._last)

    def error(self, error: ApiError) -> bytes:
        self._status = "failed"
        failed = self._response("failed", [self._item(segment) for segment in self.segments.found])
        failed["error"] = {"code": error.code or "server_error", "message": error.message}
        return self._event("response.failed", response=failed)

    def complete(self, usage: Usage) -> dict[str, Any]:
        self._status = self._end_status()
        self._take_logprobs()
        self._last = self._response(self._status, [self._item(segment) for segment in self.segments.found], usage)
        return self._last

    def _end_status(self) -> str:
        return "incomplete" if self.choice.finish_reason == "length" else "completed"

    # -- events -------------------------------------------------------------------------------------------------

    def _event(self, event: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return SERVER_SENT.frame(encode({"type": event, "sequence_number": number, **fields}), event)

    def _events(self, changes: Iterable[Change]) -> bytes:
        found = b""
        for change in changes:
            if change.begins:
                found += self._begun(change.segment)
            elif change.ends:
                found += self._ended(change.segment)
            else:
                found += self._grown(change.segment, change.text)
        return found

    def _begun(self, segment: Segment) -> bytes:
        found = self._event(
            "response.output_item.added", output_index=segment.index, item=self._item(segment, is_new=True)
        )
        if segment.kind is not PartKind.CALL:
            found += self._event("response.content_part.added", **self._place(segment), part=self._part(segment))
        return found

    def _grown(self, segment: Segment, text: str) -> bytes:
        place = self._place(segment)
        if self._is_custom(segment):
            return b""  # until the call ends, because its text is in JSON
        if segment.kind is PartKind.CALL:
            return self._event("response.function_call_arguments.delta", **place, delta=text)
        if segment.kind is PartKind.REASONING:
            return self._event("response.reasoning_text.delta", **place, delta=text)
        return self._event("response.output_text.delta", **place, delta=text, logprobs=self._take_logprobs())

    def _ended(self, segment: Segment) -> bytes:
        place, text = self._place(segment), segment.text
        if self._is_custom(segment):
            text = custom_input(text)
            found = self._event("response.custom_tool_call_input.delta", **place, delta=text)
            found += self._event("response.custom_tool_call_input.done", **place, input=text)
        elif segment.kind is PartKind.CALL:
            name = self._body.called(segment.name)["name"]
            found = self._event("response.function_call_arguments.done", **place, name=name, arguments=text)
        else:
            if segment.kind is PartKind.REASONING:
                found = self._event("response.reasoning_text.done", **place, text=text)
            else:
                self._take_logprobs()
                found = self._event("response.output_text.done", **place, text=text, logprobs=self._logprobs)
            found += self._event("response.content_part.done", **place, part=self._part(segment))
        return found + self._event("response.output_item.done", output_index=segment.index, item=self._item(segment))

    def _is_custom(self, segment: Segment) -> bool:
        return segment.kind is PartKind.CALL and self._body.is_custom(segment.name)

    def _place(self, segment: Segment) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": self._id(segment), "output_index": segment.index}
        return place if segment.kind is PartKind.CALL else {**place, "content_index": 0}

    # -- objects ------------------------------------------------------------------------------------------------

    def _type(self, segment: Segment) -> str:
        return "custom_tool_call" if self._is_custom(segment) else _TYPES[segment.kind]

    def _id(self, segment: Segment) -> str:
        while len(self._items) <= segment.index:
            self._items.append("")
        if not self._items[segment.index]:
            self._items[segment.index] = new_id(self._type(segment))
        return self._items[segment.index]

    def _item(self, segment: Segment, *, is_new: bool = False) -> dict[str, Any]:
        is_cut = self._status in ("incomplete", "failed") and segment is self.segments.found[-1]
        status = "in_progress" if is_new else "incomplete" if is_cut else "completed"
        item: dict[str, Any] = {"id": self._id(segment), "status": status, "type": self._type(segment)}
        if segment.kind is PartKind.CALL:
            called = self._body.called(segment.name)
            if self._is_custom(segment):
                text = "" if is_new else custom_input(segment.text)
                return item | {"call_id": segment.id, **called, "input": text}
            return item | {"call_id": segment.id, **called, "arguments": segment.text}
        content = [] if is_new else [self._part(segment)]
        if segment.kind is PartKind.REASONING:
            return item | {"summary": [], "content": content}
        return item | {"role": "assistant", "content": content}

    def _part(self, segment: Segment) -> dict[str, Any]:
        part: dict[str, Any] = {"type": _PARTS[segment.kind], "text": segment.text}
        if segment.kind is PartKind.REASONING:
            return part
        return part | {"annotations": [], "logprobs": self._logprobs}

    def _take_logprobs(self) -> list[ChatTokenLogprob]:
        found = self.take_logprobs()
        self._logprobs += found
        return found

    def _response(self, status: str, output: list[dict[str, Any]], usage: Usage | None = None) -> dict[str, Any]:
        body = self._body
        text, reasoning = body.text, body.reasoning
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": self.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": reasoning and reasoning.effort, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": self._tier,
            "store": body.store is True,
            "temperature": body.temperature,
            "text": {
                "format": {"type": "text"} if text is None or text.format is None else _given(text.format),
                "verbosity": text and text.verbosity,
            },
            "tool_choice": _given(body.tool_choice)
            if isinstance(body.tool_choice, Body)
            else body.tool_choice or "auto",
            "tools": [_given(tool) for tool in body.tools or () if not isinstance(tool, HostedTool)],
            "top_logprobs": self.top or 0,
            "top_p": body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None if usage is None else _usage(usage),
            "user": body.user,
        }


class ResponsesEndpoint(ConvertedEndpoint[ResponsesRequest]):
    """Generate the next items of a conversation, which the client or the server's store keeps."""

    route = RESPONSES
    body_type = ResponsesRequest
    format_type = ResponsesFormat
    names: ClassVar[Mapping[str, str]] = {
        r"messages(\..*)?": "input",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
    }

    async def prepare(self, body: ResponsesRequest, origin: Origin) -> Job:
        store, references = self.service.stored_responses, body.references.values()
        body = await _restored(self.service, body, origin.owner)
        if body.store is None:  # lines of batches would replace what agents go on with
            body.store = store is not None and origin.queue is None
        try:
            job = await super().prepare(body, origin)
        except ApiError as error:
            if error.code == CONTEXT_LENGTH and error.param == self.route.prompt and body.truncation != "auto":
                error.message += '; truncation: "auto" leaves out the oldest turns'
            raise
        form = job.format
        if store is None or not body.store:
            return job
        assert isinstance(form, ResponsesFormat)

        async def keep() -> None:
            stored = await self.service.in_thread(form.stored)
            output = [item["id"] for item in stored.response["output"]]
            await store.add(origin.owner, stored, [*references, *output])

        return replace(job, keep=keep)

    async def tokenize(self, body: ResponsesRequest, client: str) -> list[Prompt]:
        try:
            return await super().tokenize(body, client)
        except ApiError as error:
            if body.truncation != "auto" or error.code != CONTEXT_LENGTH:
                raise
            return await self._tokenize_shortened(body, client, error)

    async def _tokenize_shortened(self, body: ResponsesRequest, client: str, error: ApiError) -> list[Prompt]:
        """Drop the fewest oldest turns so that the rest fits."""
        found: list[Prompt] | None = None
        kept, few, many = body.chat, 0, len(body.chat.messages)
        while many - few > 1:
            count = (few + many) // 2
            if (chat := body.shortened(count)) is None:
                many = count
                continue
            try:
                found = await self.tokenize_chat(chat, body, client)
            except ApiError as other:
                if other.code != CONTEXT_LENGTH:
                    raise
                few = count
            else:
                kept, many = chat, count
        if found is None:
            raise error
        body.chat = kept
        return found


async def count_input_tokens(request: Request) -> Response:
    """Return the number of tokens of a prompt in the format of responses."""
    service, body = await open_body(request, ResponsesRequest)
    body = await _restored(service, body, request.state.owner)

    async def count() -> bytes:
        found = await prompt_tokens(service, body.chat, ResponsesEndpoint.names)
        return encode({"object": "response.input_tokens", "input_tokens": found})

    return await counted(service, request, estimate_chat(body.chat), "input", count)


async def _restored(service: Service, body: ResponsesRequest, owner: str) -> ResponsesRequest:
    """Add the items of earlier responses that a body refers to."""
    previous, references, store = body.previous_response_id, body.references, service.stored_responses
    if store is None:
        _refuse_state(body)
    if store is None or (previous is None and not references):
        return body
    items: list[dict[str, Any]] = []
    if previous is not None:
        if (earlier := await store.get(owner, previous)) is None:
            message = f"Previous response with id {previous[:64]!r} not found."
            raise bad_request(message, "previous_response_id", "previous_response_not_found")
        items = earlier.items
    found = await store.items(owner, set(references.values())) if references else {}
    for number, name in references.items():
        if name not in found:
            message = f"Item with id {name[:64]!r} not found: send the item itself"
            raise ApiError(404, message, param=f"input.{number}")
    given = body.items()
    items += [found[references[number]] if number in references else item for number, item in enumerate(given)]
    rest = body.model_dump(by_alias=True, exclude_unset=True, exclude={"input"}, warnings=False)
    whole = encode({**rest, "input": items})
    if len(whole) > (limit := service.config.max_body_bytes):
        raise ApiError(413, f"the conversation with earlier responses must have at most {limit} bytes")
    return await service.parse(whole, ResponsesRequest)


def _refuse_state(body: ResponsesRequest) -> None:
    fields = {"store": body.store, "previous_response_id": body.previous_response_id}
    fields |= {f"input.{number}": name for number, name in body.references.items()}
    for field, value in fields.items():
        if value:
            why = "responses are not stored, because it was started without --store-responses"
            remedy = "send the whole conversation as input, and no references to items: clients do so with store: false"
            raise bad_request(f"{field}: this server does not support it: {why}; {remedy}", field)


def _given(part: Body) -> dict[str, Any]:
    return part.model_dump(by_alias=True, exclude_unset=True)


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }
