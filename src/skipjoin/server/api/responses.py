"""Response bodies, as msgspec structs for speed: each streamed token encodes one."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

encode = msgspec.json.Encoder().encode


# Replaces minus infinity, which JSON does not have.
LOWEST_LOGPROB = -9999.0


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class CompletionDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails = PromptDetails()
    completion_tokens_details: CompletionDetails | UnsetType = UNSET
    queue_time: float | UnsetType = UNSET  # seconds from arrival to the first step

    @property
    def cached_tokens(self) -> int:
        return self.prompt_tokens_details.cached_tokens

    @property
    def reasoning_tokens(self) -> int:
        details = self.completion_tokens_details
        return 0 if isinstance(details, UnsetType) else details.reasoning_tokens


# -- completions ----------------------------------------------------------------------------------------------


class _Answer(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists, one entry per token. The first token of a prompt has no log-probability."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class CompletionChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET


class Completion(_Answer, frozen=True):
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    service_tier: str | UnsetType = UNSET
    object: str = "text_completion"


# -- chat -----------------------------------------------------------------------------------------------------


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob, frozen=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatTokenLogprob]
    refusal: None = None


class ChatMessage(msgspec.Struct, frozen=True):
    """Message of the assistant. Clients know the reasoning by one of two names."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(_Answer, frozen=True):
    choices: list[ChatChoice]
    usage: Usage
    service_tier: str
    object: str = "chat.completion"
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET


class Delta(msgspec.Struct, frozen=True):
    content: str | UnsetType = UNSET
    role: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(_Answer, frozen=True):
    choices: list[ChunkChoice]
    service_tier: str
    usage: Usage | UnsetType | None = UNSET
    object: str = "chat.completion.chunk"
    prompt_token_ids: list[int] | UnsetType = UNSET
