from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, Tag, ValidationInfo, create_model, field_validator
from pydantic_core import PydanticCustomError

from skipjoin.sampling import INT32
from skipjoin.server.api.chat_body import ChatRequest
from skipjoin.server.api.conversation import MAX_MESSAGES, MAX_TOOLS, UniqueTools
from skipjoin.server.api.dialects.bodies import ConvertedBody, Turns, call_of, format_of
from skipjoin.server.api.fields import (
    MAX_LABEL,
    Body,
    Ignored,
    Integer,
    Label,
    Null,
    Only,
    Text,
    one_of,
    tagged,
    text_or_object,
)
from skipjoin.server.api.pooled_bodies import EmbeddedBody, EmbeddingRequest
from skipjoin.server.api.protocol import SamplingFields

# Names of other servers' models may have a tag.
_TAG = ":latest"
_NO_IMAGES = Annotated[Any, Only(None, [], why="only text is supported")]
Model = Annotated[Label, AfterValidator(lambda name: name and name.removesuffix(_TAG))]
# Penalties of earlier tokens, and the values at which they have no effect.
_PENALTIES = {"repeat_penalty": 1, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
Penalty = Annotated[float, Field(ge=0.01, le=10)]


_OF_RUNNER = (
    *("mirostat_tau", "mirostat_eta", "penalize_newline", "num_ctx", "num_batch", "num_gpu", "num_keep", "num_thread"),
    *("main_gpu", "low_vram", "numa", "f16_kv", "vocab_only", "use_mmap", "use_mlock"),
)
_IGNORED: dict[str, Any] = dict.fromkeys(_OF_RUNNER, (Ignored, None))
_RunnerFields: Any = create_model("_RunnerFields", __base__=Body, **_IGNORED)


class OllamaOptions(SamplingFields, _RunnerFields):  # type: ignore[misc]
    """Sampling parameters, also under Ollama's names."""

    num_predict: Annotated[int, Integer(-2, INT32)] | None = None
    repeat_penalty: Penalty | None = None
    repeat_last_n: Annotated[int, Integer(-1, INT32)] | None = None
    tfs_z: Annotated[Any, Only(None, 1)] = None
    typical_p: Annotated[Any, Only(None, 1)] = None
    mirostat: Annotated[Any, Only(None, 0)] = None

    @field_validator("repeat_last_n")
    @classmethod
    def _changes_nothing(cls, value: int | None, info: ValidationInfo) -> int | None:
        """Accept a penalty of all tokens or of none."""
        has_penalty = any(info.data.get(name) not in {None, neutral} for name, neutral in _PENALTIES.items())
        if has_penalty and value not in {None, -1, 0}:
            raise PydanticCustomError(
                "unsupported", "this server does not support it: only null, -1 or 0: a penalty counts all tokens"
            )
        return value

    def fields(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in self.model_fields_set & SamplingFields.model_fields.keys()}
        if self.repeat_penalty is not None:
            found["repetition_penalty"] = self.repeat_penalty
        if self.repeat_last_n == 0:
            found |= {name: neutral for name, neutral in _PENALTIES.items() if name in SamplingFields.model_fields}
        if self.num_predict is not None and self.num_predict > 0:  # otherwise the rest of the context
            found["max_tokens"] = self.num_predict
        return found


class OllamaFunction(Body):
    name: Annotated[str, Field(max_length=MAX_LABEL)]
    arguments: dict[str, Any] | None = None
    index: Ignored = None


class OllamaCall(Body):
    function: OllamaFunction
    id: Label = None
    type: Literal["function"] = "function"


class OllamaMessage(Body):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: Annotated[list[OllamaCall], Field(max_length=MAX_TOOLS), Field(fail_fast=True)] | None = None
    tool_name: Label = None
    tool_call_id: Label = None
    images: _NO_IMAGES = None


class OllamaEmbedRequest(EmbeddingRequest):
    """Body of POST /api/embed. Texts are never cut, also with `truncate`."""

    model: Model = None
    truncate: Ignored = None
    options: dict[str, Any] | None = None
    keep_alive: Ignored = None
    encoding_format: Null = None


class OllamaEmbeddingRequest(EmbeddedBody):
    """Body of POST /api/embeddings: one text."""

    model: Model = None
    prompt: Text
    options: dict[str, Any] | None = None
    keep_alive: Ignored = None

    @property
    def inputs(self) -> list[str | list[int]]:
        return [self.prompt]


def _streams(value: Any) -> Any:
    return True if value is None else value


class _Body(ConvertedBody):
    model: Model = None
    stream: Annotated[bool, BeforeValidator(_streams)] = True
    format: (
        Annotated[
            Annotated[Literal["", "json"], Tag("~text")] | Annotated[dict[str, Any], Tag("~object")],
            one_of(text_or_object, 'must be "json" or a JSON schema'),
        ]
        | None
    ) = None
    options: OllamaOptions | None = None
    think: (
        Annotated[
            Annotated[bool, Tag("~switch")] | Annotated[Literal["low", "medium", "high"], Tag("~text")],
            one_of(tagged({bool: "~switch", str: "~text"}), 'must be true, false, "low", "medium" or "high"'),
        ]
        | None
    ) = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Integer(0, 20)] | None = None
    keep_alive: Ignored = None
    # Conversations that exceed the context are an error, whatever these say.
    truncate: Ignored = None
    shift: Ignored = None
    template: Annotated[Any, Only(None, "", why="--chat-template sets it")] = None

    def chat_fields(self, messages: Any) -> dict[str, Any]:
        form = None
        if self.format:
            form = format_of("json_object" if self.format == "json" else "json_schema", "format", self.format)
        effort = self.think if isinstance(self.think, str) else None
        switch = None if self.think is None else {"enable_thinking": bool(self.think), "thinking": bool(self.think)}
        return self.shared() | {
            "messages": messages,
            "response_format": form,
            "reasoning_effort": effort,
            "chat_template_kwargs": switch if effort is None else None,
            "logprobs": self.logprobs,
            "top_logprobs": self.top_logprobs if self.logprobs else None,
            **(self.options or OllamaOptions()).fields(),
        }


class OllamaChatRequest(_Body):
    """Body of POST /api/chat. Without messages, it loads the model."""

    large_fields: ClassVar[Mapping[str, str]] = {"messages": "plain_messages"}

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES), Field(fail_fast=True)] | None = None
    tools: UniqueTools | None = None

    @property
    def only_loads(self) -> bool:
        return not self.messages

    def to_chat(self) -> ChatRequest:
        turns, asked = Turns(), 0
        open_calls: list[tuple[str, str]] = []  # ids and names, in the order of their results
        for message in self.messages or ():
            if message.role == "assistant":
                turns.begin()
                if message.thinking:
                    turns.think(message.thinking)
                if message.content or not message.tool_calls:
                    turns.say(message.content or "")
                for call in message.tool_calls or ():
                    name, arguments = call.function.name, call.function.arguments or {}
                    open_calls.append((call.id or f"call_{asked}", name))
                    turns.call(call_of(open_calls[-1][0], name, json.dumps(arguments, ensure_ascii=False)))
                    asked += 1
            elif message.role == "tool":
                turns.add(
                    "tool", message.content or "", tool_call_id=message.tool_call_id or _answered(open_calls, message)
                )
            else:
                turns.add(message.role, message.content or "")
        return ChatRequest.model_construct(**self.chat_fields(turns.messages), tools=self.tools)


def _answered(open_calls: list[tuple[str, str]], result: OllamaMessage) -> str:
    """Close the call that a result without an id answers, and return its id."""
    at = next((at for at, (_, name) in enumerate(open_calls) if result.tool_name in (None, name)), None)
    return "call" if at is None else open_calls.pop(at)[0]


class OllamaGenerateRequest(_Body):
    """Body of POST /api/generate: a user's message, or a `raw` text. Without a prompt, it loads the model."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: Annotated[Any, Only(None, "", why="write the marks of such completions into the prompt, with raw")] = None
    context: Annotated[Any, Only(None, [], why="use /api/chat")] = None
    images: _NO_IMAGES = None

    @property
    def only_loads(self) -> bool:
        return not self.prompt

    def to_chat(self) -> ChatRequest:
        turns = Turns()
        if self.system:
            turns.add("system", self.system)
        turns.add("user", self.prompt or "")
        return ChatRequest.model_construct(**self.chat_fields(turns.messages))


class ShowRequest(Body):
    """Body of POST /api/show."""

    model: Model = None
    name: Model = None  # its older name
    verbose: Ignored = None
