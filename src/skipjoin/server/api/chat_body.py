from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from skipjoin.chat import ToolUse
from skipjoin.sampling import INT32
from skipjoin.server.api.conversation import (
    AllowedChoice,
    Messages,
    NamedChoice,
    ToolChoice,
    Tools,
    UniqueTools,
    functions_of,
)
from skipjoin.server.api.fields import MAX_LABEL, Body, Ignored, Integer, Label, Null, Off, Only, TokenId
from skipjoin.server.api.protocol import MAX_LOGPROBS, GenerationBody

# Variables of chat templates that a request may set.
MAX_TEMPLATE_OPTIONS = 32

TemplateOptions = Annotated[
    dict[Annotated[str, Field(max_length=64)], bool | int | float | Annotated[str, Field(max_length=MAX_LABEL)] | None],
    Field(max_length=MAX_TEMPLATE_OPTIONS),
]


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ReasoningSettings(Body):
    """Settings of the reasoning as OpenRouter has them."""

    effort: Effort | None = None
    enabled: bool | None = None
    max_tokens: Annotated[int, Integer(0, INT32)] | None = None
    exclude: bool | None = None
    summary: Ignored = None


class ThinkingSettings(Body):
    """Settings of the reasoning as GLM, DeepSeek and Kimi have them."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Annotated[int, Integer(0, INT32)] | None = None
    clear_thinking: Ignored = None


class ChatRequest(GenerationBody):
    """Body of POST /v1/chat/completions."""

    messages: Messages
    max_tokens: Annotated[int, Integer(1, INT32)] | None = None
    max_completion_tokens: Annotated[int, Integer(1, INT32)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Integer(0, MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: Annotated[Any, Only(None, False, why="the chat template writes them")] = None
    chat_template_kwargs: TemplateOptions | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None
    # Other names of the two and of thinking_token_budget.
    reasoning: ReasoningSettings | None = None
    thinking: ThinkingSettings | None = None
    enable_thinking: bool | None = None
    thinking_budget: Annotated[int, Integer(0, INT32)] | None = None
    tools: UniqueTools | None = None
    tool_choice: Annotated[ToolChoice | None, Field(validate_default=True)] = None
    parallel_tool_calls: bool | None = None

    chat_template: Null = None
    documents: Annotated[Any, Only(None, [])] = None
    echo: Off = None
    functions: Annotated[Any, Only(None, [])] = None
    function_call: Annotated[Any, Only(None, "none")] = None
    modalities: Annotated[Any, Only(None, ["text"])] = None
    audio: Null = None
    web_search_options: Null = None

    @field_validator("tool_choice")
    @classmethod
    def _is_offered(cls, value: Any, info: ValidationInfo) -> Any:
        names = {tool.function.name for tool in info.data.get("tools") or ()}
        if value == "required" and not names:
            raise ValueError("required needs tools")
        chosen = value.allowed_tools.tools if isinstance(value, AllowedChoice) else [value]
        for named in chosen:
            if isinstance(named, NamedChoice) and named.function.name not in names:
                raise ValueError(f"must name one of the tools, got {named.function.name!r}")
        return value

    @field_validator("continue_final_message")
    @classmethod
    def _has_text_to_continue(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        if not value:
            return value
        if info.data.get("add_generation_prompt"):
            raise ValueError("it needs add_generation_prompt to be false or null")
        *_, last = info.data.get("messages") or (None,)
        if last is not None and (last.role != "assistant" or last.tool_calls or not last.text.strip()):
            raise ValueError("the last message must be text of the assistant")
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _needs_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError("it needs logprobs to be true")
        return value

    @model_validator(mode="after")
    def _take_other_names(self) -> ChatRequest:
        asked, thinking = self.reasoning or ReasoningSettings(), self.thinking
        is_on = thinking.type != "disabled" if thinking is not None else self.enable_thinking
        is_on = asked.enabled if is_on is None else is_on
        if self.reasoning_effort is None:
            self.reasoning_effort = asked.effort or (None if is_on is None else "medium" if is_on else "none")
        if self.include_reasoning is None and asked.exclude:
            self.include_reasoning = False
        if self.thinking_token_budget is None:
            budget = None if thinking is None else thinking.budget_tokens
            budgets = (asked.max_tokens, budget, self.thinking_budget)
            self.thinking_token_budget = next((budget for budget in budgets if budget is not None), None)
        return self

    @cached_property
    def use(self) -> ToolUse:
        choice = self.tool_choice
        if choice == "none":
            return ToolUse()
        functions = functions_of(self.tools)
        names = {function["name"] for function in functions}
        must_call, is_parallel = choice == "required", self.parallel_tool_calls is not False
        if isinstance(choice, AllowedChoice):
            names = {tool.function.name for tool in choice.allowed_tools.tools}
            must_call = choice.allowed_tools.mode == "required"
        elif isinstance(choice, NamedChoice):
            names, must_call, is_parallel = {choice.function.name}, True, bool(self.parallel_tool_calls)
        return ToolUse(functions, frozenset(names), must_call, is_parallel)


def _text_only(value: Any) -> Any:
    # What lm-evaluation-harness sends with a remote tokenizer and `--apply_chat_template`.
    if isinstance(value, list):
        raise ValueError("must be a text; send a conversation as messages")
    return value


class TokenizeRequest(Body):
    """Body of POST /tokenize with a text or a conversation."""

    model: Label = None
    prompt: Annotated[str | None, BeforeValidator(_text_only)] = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    tools: Tools | None = None
    return_token_strs: bool | None = None

    @cached_property
    def use(self) -> ToolUse:
        return ToolUse(functions_of(self.tools))


class DetokenizeRequest(Body):
    """Body of POST /detokenize, whose response includes special tokens."""

    model: Label = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
