from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from msgspec import UNSET

from skipjoin.chat import delta_of, finish_reason_of, message_of
from skipjoin.core.request import RequestOptions
from skipjoin.engine.text import Choice, TextRules
from skipjoin.formats.message import MessageReader
from skipjoin.model.tokenizer import Tokenizer
from skipjoin.routes import CHAT, OPENAI_EVENTS
from skipjoin.sampling import ParameterError, TokenLogprob
from skipjoin.server.api import responses
from skipjoin.server.api.chat_body import ChatRequest
from skipjoin.server.api.chat_prompt import chat_constraint, estimate_chat, render_chat
from skipjoin.server.api.errors import from_parameter
from skipjoin.server.api.generation import Endpoint, Prompt
from skipjoin.server.api.openai_format import OpenAiFormat, prompt_scores
from skipjoin.server.api.options import served_tier
from skipjoin.server.api.service import Service


class ChatFormat(OpenAiFormat):
    def __init__(self, service: Service, body: ChatRequest, options: RequestOptions) -> None:
        super().__init__(service, body, "chatcmpl", served_tier(options))
        self._top = (body.top_logprobs or 0) if body.logprobs else None
        self._shows_reasoning = body.include_reasoning is not False
        self._has_ids, self._prompt_top = bool(body.return_token_ids), body.prompt_logprobs

    def item(self, choice: Choice, text: str, usage: responses.Usage | None) -> bytes:
        found, shown_usage = b"", self.no_usage if usage is None else usage
        if choice not in self.begun:
            self.begun.add(choice)
            role = responses.Delta(content="", role="assistant")
            first = responses.ChunkChoice(index=choice.index, delta=role, logprobs=None, finish_reason=None)
            found = self.event([first], shown_usage, choice.prompt if self._has_ids else UNSET)
        delta = delta_of(choice.take_parts(text), shows_reasoning=self._shows_reasoning)
        if delta or choice.scored or choice.finish_reason is not None:
            reason = finish_reason_of(choice.finish_reason, has_calls=choice.has_calls)
            ids = choice.take_ids() if self._has_ids else UNSET
            chunk = responses.ChunkChoice(
                choice.index, responses.Delta(**_named(delta)), self._logprobs(choice), reason, ids
            )
            found += self.event([chunk], shown_usage)
        return found

    def event(self, choices: list[responses.ChunkChoice], usage: Any, prompt: Any = UNSET) -> bytes:
        # Arguments without names, because each token makes such an object.
        kind = "chat.completion.chunk"
        chunk = responses.ChatChunk(self.id, self.created, self.model, choices, self.service_tier, usage, kind, prompt)
        return OPENAI_EVENTS.frame(responses.encode(chunk))

    def whole(self, texts: Mapping[Choice, str], usage: responses.Usage) -> bytes:
        found = [
            responses.ChatChoice(
                index=choice.index,
                message=self._message(choice, text),
                logprobs=self._logprobs(choice),
                finish_reason=finish_reason_of(choice.finish_reason, has_calls=choice.has_calls),
                token_ids=choice.take_ids() if self._has_ids else UNSET,
            )
            for choice, text in texts.items()
        ]
        first = next(iter(texts))
        return responses.encode(
            responses.ChatCompletion(
                self.id,
                self.created,
                self.model,
                found,
                usage,
                self.service_tier,
                prompt_token_ids=first.prompt if self._has_ids else UNSET,
                prompt_logprobs=prompt_scores(self.tokenizer, first, self._prompt_top),
            )
        )

    def _message(self, choice: Choice, text: str) -> responses.ChatMessage:
        return responses.ChatMessage(
            **_named(message_of(choice.take_parts(text), shows_reasoning=self._shows_reasoning))
        )

    def _logprobs(self, choice: Choice) -> responses.ChatLogprobs | None:
        if self._top is None:
            return None
        return responses.ChatLogprobs(
            [chat_logprob(self.tokenizer, scored, self._top) for scored in choice.take_scored()]
        )


class ChatEndpoint(Endpoint[ChatRequest]):
    """Generate the assistant's next message."""

    route = CHAT
    body_type = ChatRequest
    format_type = ChatFormat

    def __init__(self, service: Service, *, ends_with_context: bool = False) -> None:
        super().__init__(service)
        self.ends_with_context = ends_with_context

    def estimates(self, body: ChatRequest) -> list[int]:
        return [estimate_chat(body)]

    async def tokenize(self, body: ChatRequest, client: str) -> list[Prompt]:
        service = self.service
        text = await render_chat(service, body)
        budget = body.thinking_token_budget
        try:
            service.conversations.check_calls(body.use)
            thinking = None if budget is None else service.conversations.thinking_budget(budget, text)
        except ParameterError as error:
            raise from_parameter(error) from None
        if service.conversations.is_read(body.use):
            await service.load_parser()
        ids = await service.encode(text, "messages", add_special_tokens=False)
        room = service.room_after(ids, "messages")
        limits = {"max_tokens": body.max_tokens, "max_completion_tokens": body.max_completion_tokens}
        if not self.ends_with_context:
            for name, value in limits.items():
                service.check_fits(name, value, ids, "messages")
        if (alternatives := body.prompt_logprobs) is not None:
            service.check_prompt_scores(
                len(ids), alternatives, body.n or 1, names="prompt_logprobs", param="prompt_logprobs"
            )
        params = service.sampling(
            body,
            # The minimum of both fields, or else the rest of the context.
            max_tokens=min(value for value in (room, *limits.values()) if value is not None),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=alternatives,
            structured=await chat_constraint(service, body, text, client),
            thinking=thinking,
        )
        return [Prompt(ids, None, params)]

    def text_rules(self, body: ChatRequest) -> TextRules:
        kept = self.service.conversations.kept(body.use)
        return replace(super().text_rules(body), scores=bool(body.logprobs), kept=kept)

    def reader(self, body: ChatRequest, prompt: Prompt) -> MessageReader | None:
        return self.service.conversations.reader(prompt.ids, body.use)


def _named(message: dict[str, Any]) -> dict[str, Any]:
    if "reasoning_content" in message:
        message["reasoning"] = message["reasoning_content"]
    return message


def chat_logprob(tokenizer: Tokenizer, scored: TokenLogprob, top: int) -> responses.ChatTokenLogprob:
    likeliest = [responses.TopLogprob(*_spelled(tokenizer, token, logprob)) for token, logprob in scored.top[:top]]
    return responses.ChatTokenLogprob(*_spelled(tokenizer, scored.token, scored.logprob or 0.0), likeliest)


def _spelled(tokenizer: Tokenizer, token: int, logprob: float) -> tuple[str, float, list[int]]:
    data = tokenizer.token_bytes(token)
    return data.decode("utf-8", "replace"), max(logprob, responses.LOWEST_LOGPROB), list(data)
