"""POST /v1/completions: from the body to a job, and from a job's choices to OpenAI's text_completion objects."""

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
from skipjoin.server.api.errors import bad_request
from skipjoin.server.api.generation import Job, StreamReply, WholeReply
from skipjoin.server.api.limits import AdmissionSlot, estimate_tokens
from skipjoin.server.api.protocol import CompletionRequest
from skipjoin.server.api.responses import Completion, CompletionChoice, CompletionLogprobs, Usage, encode
from skipjoin.server.api.service import Service, stop_strings, wants_usage

DEFAULT_MAX_TOKENS = 16
# JSON has no infinity; this is as good as impossible.
LOWEST_LOGPROB = -9999.0


async def create(request: Request, service: Service) -> Response:
    """Answer a completion request."""
    arrived = time.monotonic()
    service.check_open()
    body = await service.parse(request, CompletionRequest)
    service.check_model(body.model)
    if body.max_tokens == 0 and not body.echo:
        raise bad_request("max_tokens must be at least 1 without echo, got 0", "max_tokens")
    at_end, always = wants_usage(body)
    deadline_s = service.deadline_s(request, body)
    prompts = _prompts(body)
    n = body.n or 1
    places = service.admission.reserve([estimate_tokens(prompt) for prompt in prompts for _ in range(n)])
    try:
        job = await _job(body, service, prompts, places, deadline_s=deadline_s, arrived=arrived)
    except BaseException:
        for place in places:
            place.ended()
        raise
    form = CompletionFormat(service, body, include_usage=at_end)
    if body.stream:
        return StreamReply(job, service, form, usage_at_end=at_end, usage_always=always)
    return WholeReply(job, service, form)


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    """The prompts, one or many."""
    prompt = body.prompt
    return list(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]


async def _job(
    body: CompletionRequest,
    service: Service,
    prompts: Sequence[str | list[int]],
    places: list[AdmissionSlot],
    *,
    deadline_s: float | None,
    arrived: float,
) -> Job:
    n = body.n or 1
    rules = TextRules(
        stop=stop_strings(body),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special=body.skip_special_tokens is not False,
        min_tokens=body.min_tokens or 0,
        echo=bool(body.echo),
        score_only=body.max_tokens == 0,
        scores=body.logprobs is not None,
    )
    choices, params = [], []
    for number, prompt in enumerate(prompts):
        text = prompt if isinstance(prompt, str) else None
        ids = await service.encode(prompt) if isinstance(prompt, str) else prompt
        service.check_ids("prompt", ids)
        room = service.room_after(ids, "prompt")
        if (body.max_tokens or 0) > room:
            raise bad_request(_too_long(body.max_tokens or 0, room, len(ids)), "max_tokens", "context_length_exceeded")
        # Without a wish the default, or what fits. To score a prompt takes a step, which brings a token.
        most = min(DEFAULT_MAX_TOKENS, room) if body.max_tokens is None else max(1, body.max_tokens)
        sampling = service.sampling(
            body,
            max_tokens=most,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
        )
        for copy in range(n):
            index = number * n + copy
            places[index].resize(len(ids))
            choices.append(Choice(index, ids, text, service.tokenizer, rules))
            params.append(sampling)
    return Job(
        choices=choices,
        params=params,
        places=places,
        n=n,
        priority=body.priority or 0,
        deadline_s=deadline_s,
        arrived=arrived,
    )


def _too_long(wanted: int, room: int, prompt: int) -> str:
    return f"max_tokens must be at most {room}, what the context leaves after {prompt} prompt tokens, got {wanted}"


class CompletionFormat:
    """See `generation.Format`."""

    def __init__(self, service: Service, body: CompletionRequest, *, include_usage: bool) -> None:
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = service.name
        self._tokenizer = service.tokenizer
        self._scores = body.logprobs is not None
        self._no_usage = None if include_usage else UNSET

    def event(self, choice: Choice, text: str, usage: Usage | None) -> list[bytes]:
        if not text and choice.finish_reason is None and not choice.scored:
            return []
        return [self._completion([self._choice(choice, text)], self._no_usage if usage is None else usage)]

    def usage_event(self, usage: Usage) -> bytes:
        return self._completion([], usage)

    def whole(self, choices: Sequence[Choice], texts: Sequence[str], usage: Usage) -> bytes:
        found = [self._choice(choice, text) for choice, text in zip(choices, texts, strict=True)]
        return self._completion(found, usage)

    def _completion(self, choices: list[CompletionChoice], usage: object) -> bytes:
        return encode(Completion(self._id, self._created, self._model, choices, usage))  # type: ignore[arg-type]

    def _choice(self, choice: Choice, text: str) -> CompletionChoice:
        logprobs = completion_logprobs(self._tokenizer, choice) if self._scores else None
        return CompletionChoice(choice.index, text, logprobs, choice.finish_reason)


def completion_logprobs(tokenizer: Tokenizer, choice: Choice) -> CompletionLogprobs:
    """The log-probabilities that were not sent yet, in the form of completions."""
    found = CompletionLogprobs()
    for scored in choice.take_scored():
        text = token_name(tokenizer, scored.token)
        found.tokens.append(text)
        found.token_logprobs.append(None if scored.logprob is None else max(scored.logprob, LOWEST_LOGPROB))
        found.top_logprobs.append(None if scored.logprob is None else _alternatives(tokenizer, scored, text))
        found.text_offset.append(choice.text_length)
        choice.text_length += len(text)
    return found


def _alternatives(tokenizer: Tokenizer, scored: Scored, text: str) -> dict[str, float]:
    """The likeliest tokens and the one chosen. Where two are spelled alike, the likelier stands."""
    found: dict[str, float] = {}
    for token, logprob in scored.top:
        found.setdefault(token_name(tokenizer, token), max(logprob, LOWEST_LOGPROB))
    found.setdefault(text, max(scored.logprob or 0.0, LOWEST_LOGPROB))
    return found


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """A token as text; one that is no whole character by its bytes, as OpenAI spells it."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
