from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar

from fastapi import Request, Response
from pydantic_core import from_json

from skipjoin.chat import ToolUse
from skipjoin.core.request import RequestOptions
from skipjoin.engine.text import Choice
from skipjoin.formats.calls import PartKind
from skipjoin.formats.message import MessageReader
from skipjoin.pooling import values_of
from skipjoin.routes import NDJSON, OLLAMA_CHAT, OLLAMA_EMBED, OLLAMA_EMBEDDINGS, OLLAMA_GENERATE
from skipjoin.server.api.browsers import json_body
from skipjoin.server.api.dialects.endpoint import ConvertedEndpoint, ConvertedFormat, Segment, renamed
from skipjoin.server.api.dialects.ollama_body import (
    OllamaChatRequest,
    OllamaEmbeddingRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    ShowRequest,
)
from skipjoin.server.api.errors import ApiError
from skipjoin.server.api.generation import Endpoint, Prompt
from skipjoin.server.api.pooled import EmbeddingEndpoint, PooledFormat
from skipjoin.server.api.pooled_bodies import EmbeddedBody
from skipjoin.server.api.protocol import RequestBody
from skipjoin.server.api.replies import json_response, service_of
from skipjoin.server.api.responses import Usage, encode
from skipjoin.server.api.service import Service

_NAMES = {
    r"messages\..*": "messages",
    "response_format": "format",
    "reasoning_effort": "think",
    "repetition_penalty": "options.repeat_penalty",
}


# Ollama's Python client splits a stream also at these, which JSON allows in a text: two separators and NEL.
_BREAKS = {char.encode(): rf"\u{ord(char):04x}".encode() for char in "\u2028\u2029\x85"}


def _framed(line: bytes) -> bytes:
    for raw, escaped in _BREAKS.items():
        line = line.replace(raw, escaped)
    return NDJSON.frame(line)


def error_body(error: ApiError) -> bytes:
    return encode({"error": error.message.encode("utf-8", "replace").decode()})


def _loaded(endpoint: Endpoint[Any], body: RequestBody, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Answer a client that loads the model ahead of its first request."""
    service = endpoint.service
    service.check_open()
    service.check_model(body.model)
    service.check_task(endpoint.tasks)
    shown = {"model": service.shown_model(body.model), "created_at": _now()}
    return {**shown, **answer, "done": True, "done_reason": "load"}


class OllamaFormat(ConvertedFormat):
    prefix = "ollama-"

    def __init__(
        self, service: Service, body: OllamaChatRequest | OllamaGenerateRequest, options: RequestOptions
    ) -> None:
        super().__init__(service, body)
        self._is_chat = isinstance(body, OllamaChatRequest)
        self._began = self._first = time.monotonic_ns()

    def item(self, choice: Choice, text: str, usage: Usage | None) -> bytes:
        if self.started is None:
            self.started, self._first = choice, time.monotonic_ns()
        found = b""
        for change in self.segments.add(choice.take_parts(text)):
            if change.ends and change.segment.kind is PartKind.CALL:
                found += self._line([change.segment])
            elif change.text and change.segment.kind is not PartKind.CALL:
                found += self._line([Segment(change.segment.kind, 0, pieces=[change.text])])
        return found

    def end(self, usage: Usage) -> bytes:
        last = [change.segment for change in self.segments.close() if change.segment.kind is PartKind.CALL]
        found = self._line(last) if last else b""
        return found + _framed(encode(self._shown([]) | self._end(usage)))

    def error(self, error: ApiError) -> bytes:
        return _framed(error_body(error))

    def complete(self, usage: Usage) -> dict[str, Any]:
        return self._shown(self.segments.found) | self._end(usage)

    def _line(self, segments: list[Segment]) -> bytes:
        return _framed(encode(self._shown(segments) | {"done": False}))

    def _shown(self, segments: list[Segment]) -> dict[str, Any]:
        texts = {
            kind: "".join(segment.text for segment in segments if segment.kind is kind)
            for kind in (PartKind.TEXT, PartKind.REASONING)
        }
        calls = [
            {"function": {"name": segment.name, "arguments": _arguments(segment.text)}}
            for segment in segments
            if segment.kind is PartKind.CALL
        ]
        more: dict[str, Any] = {"thinking": texts[PartKind.REASONING]} if texts[PartKind.REASONING] else {}
        if calls:
            more["tool_calls"] = calls
        shown: dict[str, Any] = {"response": texts[PartKind.TEXT], **more}
        if self._is_chat:
            shown = {"message": {"role": "assistant", "content": texts[PartKind.TEXT], **more}}
        if self.top is not None and self.started is not None:
            shown["logprobs"] = self.take_logprobs()
        return {"model": self.model, "created_at": _now(), **shown}

    def _end(self, usage: Usage) -> dict[str, Any]:
        now = time.monotonic_ns()
        return {
            "done": True,
            "done_reason": self.choice.finish_reason,
            "total_duration": now - self._began,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": self._first - self._began,
            "eval_count": usage.completion_tokens,
            "eval_duration": now - self._first,
        }


class OllamaChatEndpoint(ConvertedEndpoint[OllamaChatRequest]):
    """Generate the next message of a conversation in Ollama's format."""

    route = OLLAMA_CHAT
    body_type = OllamaChatRequest
    format_type = OllamaFormat
    names: ClassVar[Mapping[str, str]] = _NAMES
    ends_with_context = True

    def ready(self, body: OllamaChatRequest) -> dict[str, Any] | None:
        return _loaded(self, body, {"message": {"role": "assistant", "content": ""}}) if body.only_loads else None


class OllamaGenerateEndpoint(ConvertedEndpoint[OllamaGenerateRequest]):
    """Generate the answer to a prompt in Ollama's format."""

    route = OLLAMA_GENERATE
    body_type = OllamaGenerateRequest
    format_type = OllamaFormat
    names: ClassVar[Mapping[str, str]] = {r"messages(\..*)?": "prompt", **_NAMES}
    ends_with_context = True

    def ready(self, body: OllamaGenerateRequest) -> dict[str, Any] | None:
        return _loaded(self, body, {"response": ""}) if body.only_loads else None

    async def tokenize(self, body: OllamaGenerateRequest, client: str) -> list[Prompt]:
        if not body.raw:
            return await super().tokenize(body, client)
        service, chat = self.service, body.chat
        try:
            ids = await service.encode(body.prompt or "", "prompt")
            room = service.room_after(ids, "prompt")
            params = service.sampling(
                chat,
                max_tokens=room if chat.max_tokens is None else min(room, chat.max_tokens),
                logprobs=(chat.top_logprobs or 0) if chat.logprobs else None,
                prompt_logprobs=None,
                structured=await service.structured_output(chat, client),
            )
        except ApiError as error:
            raise renamed(error, self.names) from None
        return [Prompt(ids, None, params)]

    def reader(self, body: OllamaGenerateRequest, prompt: Prompt) -> MessageReader | None:
        return None if body.raw else super().reader(body, prompt)


class OllamaEmbedFormat(PooledFormat):
    prefix = "ollama"

    def __init__(self, service: Service, body: EmbeddedBody, options: RequestOptions) -> None:
        super().__init__(service, body, options)
        self._began = time.monotonic_ns()

    def made(self, vectors: Sequence[bytes], usage: dict[str, int]) -> dict[str, Any]:
        return {
            "model": self.model,
            "embeddings": [values_of(vector).tolist() for vector in vectors],
            "total_duration": time.monotonic_ns() - self._began,
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
        }


class OllamaEmbedEndpoint(EmbeddingEndpoint):
    """Embed texts in Ollama's format."""

    route = OLLAMA_EMBED
    body_type = OllamaEmbedRequest
    format_type = OllamaEmbedFormat


class OllamaEmbeddingFormat(PooledFormat):
    prefix = "ollama"

    def made(self, vectors: Sequence[bytes], usage: dict[str, int]) -> dict[str, Any]:
        return {"embedding": values_of(vectors[0]).tolist()}


class OllamaEmbeddingsEndpoint(EmbeddingEndpoint):
    """Embed a text in the older of Ollama's formats."""

    route = OLLAMA_EMBEDDINGS
    body_type = OllamaEmbeddingRequest
    format_type = OllamaEmbeddingFormat


def _arguments(text: str) -> Any:
    return from_json(text, allow_partial=True) if text.strip() else {}


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


async def list_models(request: Request) -> Response:
    """Return the served model and its adapters in Ollama's format."""
    service = service_of(request)
    _ = service.info  # until the model is loaded, it has no name
    same = {"modified_at": _time(service), "size": 0, "digest": ""}
    names = [service.name, *(adapter.name for adapter in service.adapters.all)]
    return json_response({"models": [{"name": name, "model": name, **same, "details": _details()} for name in names]})


async def list_running(request: Request) -> Response:
    """Return the served model as the one that is loaded, in Ollama's format."""
    service = service_of(request)
    never = "9999-12-31T23:59:59Z"
    facts = {"expires_at": never, "context_length": service.info.max_model_len, "details": _details()}
    same = {"name": service.name, "model": service.name, "size": 0, "size_vram": 0, "digest": ""}
    return json_response({"models": [{**same, **facts}]})


async def show_model(request: Request) -> Response:
    """Return the served model's template and capabilities in Ollama's format."""
    service = service_of(request)
    body = await service.parse(await json_body(request, has_any_type=True), ShowRequest)
    service.check_model(body.model or body.name)
    template, conversations = service.tokenizer.chat_template, service.conversations
    output_format = conversations.format
    has_tools = output_format is not None and output_format.calls is not None
    has_thinking = conversations.is_read(ToolUse())
    found = {"completion": True, "tools": has_tools, "thinking": has_thinking}
    return json_response(
        {
            "modified_at": _time(service),
            "template": "" if template is None else template.source,
            "details": _details(),
            "model_info": {
                "general.architecture": "skipjoin",
                "general.basename": service.name,
                "skipjoin.context_length": service.info.max_model_len,
            },
            "capabilities": [name for name, has in found.items() if has],
        }
    )


def _details() -> dict[str, Any]:
    unknown = dict.fromkeys(("parent_model", "format", "family", "parameter_size", "quantization_level"), "")
    return {**unknown, "families": []}


def _time(service: Service) -> str:
    return datetime.fromtimestamp(service.created, UTC).isoformat().replace("+00:00", "Z")
