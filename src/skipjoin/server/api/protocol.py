"""Request bodies. Unknown fields are refused, so that nothing is ignored silently.

Fields of features that this server lacks are accepted with values without effect (`Only`, `Ignored`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Tag, ValidationInfo, create_model, field_validator, model_validator

from skipjoin.config import MAX_DEADLINE_MS
from skipjoin.engine.text import TextRules
from skipjoin.sampling import INT32, MAX_SALT, MAX_STOP_LENGTH, SamplingParams, parameters_of
from skipjoin.server.api.fields import (
    INT64,
    Body,
    Ignored,
    Integer,
    Label,
    Null,
    Off,
    Only,
    Text,
    TextOrObject,
    TokenId,
    one_of,
    sampling_fields,
)

MAX_N = 16
MAX_PROMPTS = 256
MAX_BAD_WORDS = 128
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
MAX_LOGPROBS = parameters_of(SamplingParams)["logprobs"].parameter.high

TokenIds = Annotated[list[TokenId], Field(min_length=1), Field(fail_fast=True)]


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


Deadline = Annotated[int, Integer(1, MAX_DEADLINE_MS)]
Objective = Annotated[float, Field(gt=0, le=MAX_DEADLINE_MS)]


# OpenAI's tiers that this server supports.
ServiceTier = Literal["auto", "default", "flex", "priority"]


class Slo(Body):
    """Latency objectives in milliseconds. Missed ones do not abort a request, unlike `deadline_ms`."""

    ttft_ms: Objective | None = None
    tpot_ms: Objective | None = None
    jct_ms: Objective | None = None
    deadline_ms: Deadline | None = None


def prompt_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "~text"
    if not isinstance(value, list):
        return None
    first = value[0] if value else ""
    if isinstance(first, list):
        return "~id_lists"
    return "~texts" if isinstance(first, str) else "~ids"


Prompt = Annotated[
    Annotated[Text, Tag("~text")]
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS), Field(fail_fast=True), Tag("~texts")]
    | Annotated[TokenIds, Tag("~ids")]
    | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS), Field(fail_fast=True), Tag("~id_lists")],
    one_of(prompt_kind, "must be a string, a list of strings, a list of token ids, or a list of such lists"),
]


class JsonSchema(Body):
    """OpenAI's named schema, enforced whether `strict` or not. Without one, any JSON is valid."""

    name: Label = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's format of a response. `schema` beside json_object is llama.cpp's."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None

    @field_validator("json_schema")
    @classmethod
    def _is_named_by_type(cls, value: JsonSchema | None, info: ValidationInfo) -> JsonSchema | None:
        if info.data.get("type") not in (None, "json_schema") and value is not None:
            raise ValueError("it must be null unless the type is json_schema")
        return value

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if self.type != "json_object" and self.schema_ is not None:
            raise ValueError("schema must be null unless the type is json_object")
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("json_schema must not be null with the type json_schema")
        return self


class RequestBody(Body):
    model: Label = None
    priority: Annotated[int, Integer(-INT64 - 1, INT64)] | None = None
    deadline_ms: Deadline | None = None
    slo: Slo | None = None
    service_tier: ServiceTier | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT)] | None = None
    user: Label = None
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:@/+=-]{1,128}$")] | None = None

    @field_validator("slo")
    @classmethod
    def _has_the_only_deadline(cls, value: Slo | None, info: ValidationInfo) -> Slo | None:
        if value is not None and value.deadline_ms is not None and info.data.get("deadline_ms") is not None:
            raise ValueError("its deadline_ms and the field deadline_ms are the same: give one of them")
        return value

    @property
    def any_deadline_ms(self) -> int | None:
        return self.deadline_ms if self.slo is None or self.deadline_ms is not None else self.slo.deadline_ms

    @property
    def copies(self) -> int:
        return 1

    @property
    def session(self) -> str | None:
        return None

    @property
    def is_streamed(self) -> bool:
        return False

    @property
    def text_rules(self) -> TextRules:
        return TextRules()


SamplingFields: Any = create_model("SamplingFields", __base__=Body, **sampling_fields(SamplingParams))


class GenerationBody(SamplingFields, RequestBody):  # type: ignore[misc]
    n: Annotated[int, Integer(1, MAX_N)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    safety_identifier: Label = None
    prompt_cache_key: Label = None
    prompt_cache_retention: Label = None
    prompt_cache_options: Ignored = None
    cache_control: Ignored = None
    verbosity: Literal["low", "medium", "high"] | None = None
    store: bool | None = None
    prediction: dict[str, Any] | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = None
    add_special_tokens: Annotated[Any, Only(None, True)] = None
    best_of: Annotated[int, Integer(1, MAX_N)] | None = None
    use_beam_search: Off = None
    length_penalty: Annotated[Any, Only(None, 1)] = None
    early_stopping: Off = None
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS), Field(fail_fast=True)] | None = None
    logits_processors: Annotated[Any, Only(None, [])] = None
    kv_transfer_params: Annotated[Any, Only(None, {})] = None
    vllm_xargs: Annotated[Any, Only(None, {})] = None
    mm_processor_kwargs: Annotated[Any, Only(None, {})] = None
    prompt_embeds: Null = None
    moderation: Null = None
    thinking_token_budget: Annotated[int, Integer(0, INT32)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: TextOrObject | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: Label = None
    spaces_between_special_tokens: Annotated[Any, Only(None, True)] = None
    prompt_logprobs: Annotated[int, Integer(0, MAX_LOGPROBS)] | None = None
    truncate_prompt_tokens: Null = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: Off = None

    @field_validator("best_of")
    @classmethod
    def _leaves_no_choice_out(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value != (info.data.get("n") or 1):
            raise ValueError("this server returns all choices: it must be null, or as many as n")
        return value

    @field_validator("stream_options")
    @classmethod
    def _needs_stream(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise ValueError("it needs stream to be true")
        return value

    @field_validator("prompt_logprobs")
    @classmethod
    def _is_whole(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("stream"):
            raise ValueError("it needs stream to be false")
        return value

    @property
    def copies(self) -> int:
        return self.n or 1

    @property
    def is_streamed(self) -> bool:
        return bool(self.stream)

    @property
    def text_rules(self) -> TextRules:
        return TextRules(
            stop=self.stop_strings,
            include_stop=bool(self.include_stop_str_in_output),
            skip_special=self.skip_special_tokens is not False,
            min_tokens=self.min_tokens or 0,
            keeps_ids=bool(self.return_token_ids),
        )

    @property
    def session(self) -> str | None:
        return self.prompt_cache_key or (self.metadata or {}).get("session_id")

    @property
    def usage_at_end(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def usage_always(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class CompletionRequest(GenerationBody):
    """Body of POST /v1/completions. With `echo`, `max_tokens` may be 0, which only scores the prompt."""

    prompt: Prompt
    echo: bool | None = None
    max_tokens: Annotated[int, Integer(0, INT32)] | None = None
    logprobs: Annotated[int, Integer(0, MAX_LOGPROBS)] | None = None
    suffix: Annotated[Any, Only(None, "")] = None
    thinking_token_budget: Null = None

    @field_validator("max_tokens")
    @classmethod
    def _generates_or_echoes(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value == 0 and not info.data.get("echo"):
            raise ValueError("it must be at least 1 without echo, got 0")
        return value

    @property
    def prompts(self) -> list[str | list[int]]:
        prompt = self.prompt
        return list(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
