from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from msgspec import UNSET

from skipjoin.core.request import RequestOptions
from skipjoin.engine.text import Choice, TextRules
from skipjoin.model.tokenizer import Detokenizer, Tokenizer
from skipjoin.routes import COMPLETIONS, OPENAI_EVENTS
from skipjoin.sampling import TokenLogprob
from skipjoin.server.api import responses
from skipjoin.server.api.generation import Endpoint, Prompt
from skipjoin.server.api.limits import estimate_tokens
from skipjoin.server.api.openai_format import OpenAiFormat, prompt_scores
from skipjoin.server.api.options import served_tier
from skipjoin.server.api.protocol import CompletionRequest
from skipjoin.server.api.service import Service
from skipjoin.structured_output import StructuredOutput

DEFAULT_MAX_TOKENS = 16


class CompletionFormat(OpenAiFormat):
    def __init__(self, service: Service, body: CompletionRequest, options: RequestOptions) -> None:
        # OpenAI's completions have no such field, so only clients that ask for a tier get it.
        tier = UNSET if body.service_tier is None else served_tier(options)
        super().__init__(service, body, "cmpl", tier)
        self._scores = body.logprobs is not None
        self._body = body

    def item(self, choice: Choice, text: str, usage: responses.Usage | None) -> bytes:
        # The first token has an event even if it has no text.
        is_first = choice not in self.begun
        if not (text or is_first or choice.scored) and choice.finish_reason is None:
            return b""
        self.begun.add(choice)
        return self.event([self._choice(choice, text, is_first=is_first)], self.no_usage if usage is None else usage)

    def event(self, choices: list[responses.CompletionChoice], usage: Any) -> bytes:
        return OPENAI_EVENTS.frame(self._encoded(choices, usage))

    def whole(self, texts: Mapping[Choice, str], usage: responses.Usage) -> bytes:
        found = [self._choice(choice, text) for choice, text in texts.items()]
        return self._encoded(found, usage)

    def _encoded(self, choices: list[responses.CompletionChoice], usage: Any) -> bytes:
        # Arguments without names, because each token makes such an object.
        return responses.encode(
            responses.Completion(self.id, self.created, self.model, choices, usage, self.service_tier)
        )

    def _choice(self, choice: Choice, text: str, *, is_first: bool = True) -> responses.CompletionChoice:
        logprobs = completion_logprobs(self.tokenizer, choice) if self._scores else None
        if self._body.return_token_ids is None and self._body.prompt_logprobs is None:
            return responses.CompletionChoice(choice.index, text, logprobs, choice.finish_reason)
        ids = bool(self._body.return_token_ids)
        return responses.CompletionChoice(
            choice.index,
            text,
            logprobs,
            choice.finish_reason,
            choice.take_ids() if ids else UNSET,
            choice.prompt if ids and is_first else UNSET,
            prompt_scores(self.tokenizer, choice, self._body.prompt_logprobs),
        )


class CompletionEndpoint(Endpoint[CompletionRequest]):
    """Generate the text after a prompt."""

    route = COMPLETIONS
    operation = "text_completion"
    body_type = CompletionRequest
    format_type = CompletionFormat

    def estimates(self, body: CompletionRequest) -> list[int]:
        return [estimate_tokens(prompt) for prompt in body.prompts]

    async def tokenize(self, body: CompletionRequest, client: str) -> list[Prompt]:
        prompts = []
        structured = await self.service.structured_output(body, client)
        for prompt in body.prompts:
            prompts.append(await self._tokenize(body, prompt, structured))
            await asyncio.sleep(0)  # let other streams continue
        tokens, n, check = sum(len(prompt.ids) for prompt in prompts), body.n or 1, self.service.check_prompt_scores
        if body.echo and body.logprobs is not None:
            check(tokens, body.logprobs, n, names="echo with logprobs", param="logprobs")
        if body.prompt_logprobs is not None:
            check(tokens, body.prompt_logprobs, n, names="prompt_logprobs", param="prompt_logprobs")
        return prompts

    async def _tokenize(
        self, body: CompletionRequest, prompt: str | list[int], structured: StructuredOutput | None
    ) -> Prompt:
        service = self.service
        text = prompt if isinstance(prompt, str) else None
        ids = await service.encode(prompt, "prompt") if isinstance(prompt, str) else prompt
        room = service.room_after(ids, "prompt")
        service.check_fits("max_tokens", body.max_tokens, ids, "prompt")
        if body.echo and text is None:
            text = await service.decode(ids, body.skip_special_tokens is not False)
        echoed = body.logprobs if body.echo else None
        params = service.sampling(
            body,
            # A prompt is scored by a step that also generates a token.
            max_tokens=min(DEFAULT_MAX_TOKENS, room) if body.max_tokens is None else max(1, body.max_tokens),
            logprobs=body.logprobs,
            prompt_logprobs=max((count for count in (body.prompt_logprobs, echoed) if count is not None), default=None),
            structured=structured,
        )
        return Prompt(ids, text, params)

    def text_rules(self, body: CompletionRequest) -> TextRules:
        return replace(
            super().text_rules(body),
            echo=bool(body.echo),
            score_only=body.max_tokens == 0,
            scores=body.logprobs is not None,
        )


def completion_logprobs(tokenizer: Tokenizer, choice: Choice) -> responses.CompletionLogprobs:
    found = responses.CompletionLogprobs(text_offset=_text_offsets(tokenizer, choice))
    for scored in choice.take_scored():
        text = token_name(tokenizer, scored.token)
        found.tokens.append(text)
        found.token_logprobs.append(None if scored.logprob is None else max(scored.logprob, responses.LOWEST_LOGPROB))
        found.top_logprobs.append(None if scored.logprob is None else _alternatives(tokenizer, scored, text))
    return found


def _text_offsets(tokenizer: Tokenizer, choice: Choice) -> list[int]:
    offsets = list(choice.offsets)
    if len(offsets) < len(choice.scored):  # those of the prompt come first, once
        skips = choice.skips_special
        offsets = prompt_offsets(tokenizer, choice.prompt, choice.echoed, skip_special=skips) + offsets
    return offsets


def _alternatives(tokenizer: Tokenizer, scored: TokenLogprob, text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for token, logprob in scored.top:
        found.setdefault(token_name(tokenizer, token), max(logprob, responses.LOWEST_LOGPROB))
    found.setdefault(text, max(scored.logprob or 0.0, responses.LOWEST_LOGPROB))
    return found


def token_name(tokenizer: Tokenizer, token: int) -> str:
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def prompt_offsets(tokenizer: Tokenizer, ids: Sequence[int], text: str, *, skip_special: bool) -> list[int]:
    """Return where in `text` each token of a prompt begins; a hidden one where the next one does."""
    is_hidden = [skip_special and token in tokenizer.special_ids for token in ids]
    offsets, found = _decoded_offsets(tokenizer, ids, is_hidden)
    if found == text:
        return offsets
    # The client's text shows its own special tokens, but not those that the tokenizer added.
    encoding = tokenizer.backend.encode(text)
    if encoding.ids != list(ids):
        return offsets
    offsets, found = _decoded_offsets(tokenizer, ids, [bool(is_added) for is_added in encoding.special_tokens_mask])
    if found == text:
        return offsets
    # The tokenizer has changed the text, such as to lower case, but knows the origin of each token.
    last = 0
    for index, (begin, end) in enumerate(encoding.offsets):
        last = offsets[index] = last if encoding.special_tokens_mask[index] else max(last, begin) if end else last
    return offsets


def _decoded_offsets(tokenizer: Tokenizer, ids: Sequence[int], is_hidden: Sequence[bool]) -> tuple[list[int], str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    offsets, parts, length = [], [], 0
    for token, hidden in zip(ids, is_hidden, strict=True):
        offsets.append(length)
        if not hidden:
            parts.append(detokenizer.add(token))
            length += len(parts[-1])
    return offsets, "".join(parts) + detokenizer.finish()
