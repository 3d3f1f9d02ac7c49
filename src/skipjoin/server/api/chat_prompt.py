from __future__ import annotations

from typing import Any

from skipjoin.chat import ToolUse
from skipjoin.model.errors import ModelError
from skipjoin.model.tokenizer import Tokenizer
from skipjoin.sampling import ParameterError
from skipjoin.server.api.chat_body import ChatRequest, TokenizeRequest
from skipjoin.server.api.conversation import Message
from skipjoin.server.api.errors import ApiError, bad_request, from_parameter
from skipjoin.server.api.limits import estimate_tokens
from skipjoin.server.api.service import Service
from skipjoin.server.api.structured import structured_output
from skipjoin.structured_output import StructuredOutput

# Variables that clients send to every model, like an effort. They change nothing where a template does not read them.
_THINKING = ("enable_thinking", "thinking")
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


async def render_chat(service: Service, body: ChatRequest | TokenizeRequest) -> str:
    tokenizer, conversations = service.tokenizer, service.conversations
    asks = body.chat_template_kwargs or (isinstance(body, ChatRequest) and body.reasoning_effort)
    variables = await service.in_thread(_variables, tokenizer, body) if asks else {}
    is_continued = isinstance(body, ChatRequest) and bool(body.continue_final_message)
    variables["add_generation_prompt"] = body.add_generation_prompt is not False and not is_continued
    messages = [_openai_message(message) for message in body.messages or ()]
    try:
        text = await service.in_renderer(conversations.text, messages, body.use, **variables)
        return _up_to(text, body.messages[-1].text) if is_continued and body.messages else text
    except ParameterError as error:
        raise from_parameter(error) from error
    except ModelError as error:
        raise bad_request(str(error), "messages") from error


def estimate_chat(body: ChatRequest | TokenizeRequest) -> int:
    texts = [text for message in body.messages or () for text in message.texts]
    for function in body.use.functions:
        texts += [function["name"], function["description"] or "", repr(function["parameters"])]
    return sum(map(estimate_tokens, texts))


async def chat_constraint(service: Service, body: ChatRequest, prompt: str, client: str) -> StructuredOutput | None:
    asked, field = structured_output(body)
    use, conversations = body.use, service.conversations
    try:
        found = conversations.constraint(asked, prompt, use, field)
        if found is not None:
            is_of_calls = conversations.format is not None and bool(use.offered)
            await service.check_grammar(found, "tools" if is_of_calls else field, client)
    except (ParameterError, ApiError) as error:
        await _check_each(service, use, client)
        raise error if isinstance(error, ApiError) else from_parameter(error) from None
    return found


async def _check_each(service: Service, use: ToolUse, client: str) -> None:
    schemas = use.schemas
    for number, function in enumerate(use.functions):
        if function["name"] in schemas and function["strict"]:
            param = f"tools.{number}.function.parameters"
            await service.check_grammar(StructuredOutput.json(schemas[function["name"]]), param, client)


def _up_to(text: str, last: str) -> str:
    """Cut a prompt after its last message, which the template may have stripped."""
    words = last.strip()
    at = text.rfind(words)
    if not words or at < 0:
        raise bad_request(
            "messages: this model's chat template changes the last message, so it cannot be continued", "messages"
        )
    whole = last.lstrip()
    return text[: at + len(whole if text.startswith(whole, at) else words)]


def _openai_message(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": message.plain_content}
    if message.name is not None:
        found["name"] = message.name
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.thoughts:
        found["reasoning_content"] = message.thoughts
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call.id, "function": {"name": call.function.name, "arguments": call.function.arguments}}
            for call in message.tool_calls
        ]
    return found


def _variables(tokenizer: Tokenizer, body: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    known = frozenset() if tokenizer.chat_template is None else tokenizer.chat_template.variables
    given = {name: value for name, value in (body.chat_template_kwargs or {}).items() if value is not None}
    for name in given:
        if name in _RESERVED or not (name in known or name in _THINKING):
            raise _unknown_option(name, known)
    effort = body.reasoning_effort if isinstance(body, ChatRequest) else None
    return given if effort is None else {**_effort(effort, known), **given}


def _unknown_option(name: str, known: frozenset[str]) -> ApiError:
    names = sorted({*(known - _RESERVED), *_THINKING})
    param = f"chat_template_kwargs.{name}"
    return bad_request(f"{param}: the model's chat template has no such variable: it has {', '.join(names)}", param)


def _effort(effort: str, known: frozenset[str]) -> dict[str, Any]:
    if "reasoning_effort" in known:
        return {"reasoning_effort": effort}
    return dict.fromkeys((name for name in _THINKING if name in known), effort != "none")
