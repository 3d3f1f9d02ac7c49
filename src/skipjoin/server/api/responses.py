"""The bodies of answers, as msgspec structs: one is encoded for every token that is streamed."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

encode = msgspec.json.Encoder().encode


# Stands for minus infinity, which JSON does not have.
LOWEST_LOGPROB = -9999.0


class PromptDetails(msgspec.Struct, frozen=True):
    """cached_tokens: those whose KV was there when the request first ran."""

    cached_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails = PromptDetails()


# -- completions ----------------------------------------------------------------------------------------------


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists, one entry per token. The first token of a prompt has no log-probability."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class CompletionChoice(msgspec.Struct, frozen=True):
    """One output, or in a stream the next part of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class Completion(msgspec.Struct, frozen=True):
    """The answer, or one event of it."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    service_tier: str | UnsetType = UNSET
    object: str = "text_completion"


# -- chat -----------------------------------------------------------------------------------------------------


class TopLogprob(msgspec.Struct, frozen=True):
    """A likely token."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """A generated token and the likeliest in its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """The log-probabilities of a message, or of a part of it."""

    content: list[TokenLogprob]
    refusal: None = None


class ChatMessage(msgspec.Struct, frozen=True):
    """The assistant's message."""

    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """One output."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatCompletion(msgspec.Struct, frozen=True):
    """The answer."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: str
    object: str = "chat.completion"


class Delta(msgspec.Struct, frozen=True):
    """The text that a chunk adds to a message."""

    content: str | UnsetType = UNSET
    role: str | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True):
    """The next part of one output."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatChunk(msgspec.Struct, frozen=True):
    """One event of a streamed answer."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    service_tier: str
    usage: Usage | UnsetType | None = UNSET
    object: str = "chat.completion.chunk"


# -- the rest -------------------------------------------------------------------------------------------------


class ModelCard(msgspec.Struct, frozen=True):
    """A served model."""

    id: str
    created: int
    max_model_len: int
    root: str
    object: str = "model"
    owned_by: str = "skipjoin"
    parent: None = None


class ModelList(msgspec.Struct, frozen=True):
    """GET /v1/models."""

    data: list[ModelCard]
    object: str = "list"


class Tokens(msgspec.Struct, frozen=True):
    """POST /tokenize. tokens, token_strs: JSON of lists of integers and of strings."""

    tokens: msgspec.Raw
    count: int
    max_model_len: int
    token_strs: msgspec.Raw | None = None


class Detokenized(msgspec.Struct, frozen=True):
    """POST /detokenize."""

    prompt: str


class LoadAnswer(msgspec.Struct, frozen=True):
    """GET /load. server_load: sequences in the server. queued_tokens: prompt tokens of those that have not run."""

    server_load: int
    running: int
    waiting: int
    queued_tokens: int
    kv_cache_usage: float
