"""POST /v1/chat/completions: from the body to a job, and from a job's choices to OpenAI's chat.completion objects."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from skipjoin.engine.text import Choice, TextRules
from skipjoin.model.tokenizer import Tokenizer
from skipjoin.sampling import Scored
from skipjoin.server.api.completions import LOWEST_LOGPROB
from skipjoin.server.api.errors import bad_request
from skipjoin.server.api.generation import Job, StreamReply, WholeReply
from skipjoin.server.api.limits import AdmissionSlot, estimate_tokens
from skipjoin.server.api.protocol import ChatRequest, TemplateOptions
from skipjoin.server.api.responses import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    ChunkChoice,
    Delta,
    TokenLogprob,
    TopLogprob,
    Usage,
    encode,
)
from skipjoin.server.api.service import Service, stop_strings, wants_usage


async def create(request: Request, service: Service) -> Response:
    """Answer a chat request."""
    arrived = time.monotonic()
    service.check_open()
    body = await service.parse(request, ChatRequest)
    service.check_model(body.model)
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    at_end, always = wants_usage(body)
    deadline_s = service.deadline_s(request, body)
    messages = [message.as_template_input() for message in body.messages]
    estimate = sum(estimate_tokens(message["content"]) for message in messages)
    places = service.admission.reserve([estimate] * (body.n or 1))
    try:
        job = await _job(body, service, messages, places, deadline_s=deadline_s, arrived=arrived)
    except BaseException:
        for place in places:
            place.ended()
        raise
    form = ChatFormat(service, body, include_usage=at_end)
    if body.stream:
        return StreamReply(job, service, form, usage_at_end=at_end, usage_always=always)
    return WholeReply(job, service, form)


async def _job(
    body: ChatRequest,
    service: Service,
    messages: list[dict[str, str]],
    places: list[AdmissionSlot],
    *,
    deadline_s: float | None,
    arrived: float,
) -> Job:
    variables = template_variables(body.chat_template_kwargs)
    prompt = await service.encode_chat(
        messages, add_generation_prompt=body.add_generation_prompt is not False, **variables
    )
    room = service.room_after(prompt, "messages")
    sampling = service.sampling(
        body,
        max_tokens=_max_tokens(body, room, len(prompt)),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=None,
    )
    rules = TextRules(
        stop=stop_strings(body),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special=body.skip_special_tokens is not False,
        min_tokens=body.min_tokens or 0,
        scores=bool(body.logprobs),
    )
    for place in places:
        place.resize(len(prompt))
    return Job(
        choices=[Choice(index, prompt, None, service.tokenizer, rules) for index in range(len(places))],
        params=[sampling] * len(places),
        places=places,
        n=len(places),
        priority=body.priority or 0,
        deadline_s=deadline_s,
        arrived=arrived,
    )


def template_variables(options: TemplateOptions | None) -> dict[str, bool]:
    """What the request sets for the chat template."""
    return {} if options is None else options.model_dump(exclude_none=True)


def _max_tokens(body: ChatRequest, room: int, prompt: int) -> int:
    """The smaller of the two fields that bound the output; without them the rest of the context."""
    wanted = {"max_tokens": body.max_tokens, "max_completion_tokens": body.max_completion_tokens}
    given = {name: value for name, value in wanted.items() if value is not None}
    for name, value in given.items():
        if value > room:
            raise bad_request(
                f"{name} must be at most {room}, what the context leaves after {prompt} prompt tokens, got {value}",
                name,
                "context_length_exceeded",
            )
    return min(given.values(), default=room)


class ChatFormat:
    """See `generation.Format`."""

    def __init__(self, service: Service, body: ChatRequest, *, include_usage: bool) -> None:
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = service.name
        self._tokenizer = service.tokenizer
        self._top = (body.top_logprobs or 0) if body.logprobs else None
        self._no_usage = None if include_usage else UNSET
        self._begun: set[int] = set()  # choices whose role was sent

    def event(self, choice: Choice, text: str, usage: Usage | None) -> list[bytes]:
        events = []
        shown_usage = self._no_usage if usage is None else usage
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            first = ChunkChoice(choice.index, Delta(content="", role="assistant"), None, None)
            events.append(self._chunk([first], shown_usage))
        if text or choice.scored or choice.finish_reason is not None:
            delta = Delta(content=text) if text else Delta()
            chunk = ChunkChoice(choice.index, delta, self._logprobs(choice), choice.finish_reason)
            events.append(self._chunk([chunk], shown_usage))
        return events

    def usage_event(self, usage: Usage) -> bytes:
        return self._chunk([], usage)

    def whole(self, choices: Sequence[Choice], texts: Sequence[str], usage: Usage) -> bytes:
        found = [
            ChatChoice(choice.index, ChatMessage(text), self._logprobs(choice), choice.finish_reason)
            for choice, text in zip(choices, texts, strict=True)
        ]
        return encode(ChatCompletion(self._id, self._created, self._model, found, usage))

    def _chunk(self, choices: list[ChunkChoice], usage: object) -> bytes:
        return encode(ChatChunk(self._id, self._created, self._model, choices, usage))  # type: ignore[arg-type]

    def _logprobs(self, choice: Choice) -> ChatLogprobs | None:
        if self._top is None:
            return None
        return ChatLogprobs([chat_logprob(self._tokenizer, scored, self._top) for scored in choice.take_scored()])


def chat_logprob(tokenizer: Tokenizer, scored: Scored, top: int) -> TokenLogprob:
    """A token's log-probability in the form of chats, with `top` alternatives."""
    likeliest = [TopLogprob(*_spelled(tokenizer, token, logprob)) for token, logprob in scored.top[:top]]
    return TokenLogprob(*_spelled(tokenizer, scored.token, scored.logprob or 0.0), likeliest)


def _spelled(tokenizer: Tokenizer, token: int, logprob: float) -> tuple[str, float, list[int]]:
    data = tokenizer.token_bytes(token)
    return data.decode("utf-8", "replace"), max(logprob, LOWEST_LOGPROB), list(data)
