from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from numbers import Integral
from typing import Any

from skipjoin.chat import Message, ToolUse
from skipjoin.core.request import RequestOptions, ServiceClass, Target
from skipjoin.formats.conversation import TOOL_NAME
from skipjoin.sampling import MAX_SALT, ParameterError, SamplingParams

Salts = str | Sequence[str | None] | None
Adapted = str | Sequence[str | None] | None
ToolChoice = str | Mapping[str, Any] | None
_MODES = ("auto", "none", "required")


def options_of(service: str, priority: int, target: Target) -> RequestOptions:
    if service not in tuple(ServiceClass):
        raise ParameterError("service", f"service must be one of {', '.join(ServiceClass)}, got {service!r}")
    for name, seconds in target._asdict().items():
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
            raise ParameterError(f"target.{name}", f"target.{name} must be a number above 0, got {seconds!r}")
        if service == ServiceClass.BEST_EFFORT and name != "jct_s" and seconds < inf:
            raise ParameterError(f"target.{name}", f"target.{name} must not be set with service {service}")
    return RequestOptions(service=ServiceClass(service), priority=priority, target=target)


def salts_of(given: Salts, count: int) -> list[str]:
    return [salt_of(salt) for salt in _per_prompt("cache_salt", given, count, "a text, or one of them or None")]


def adapters_of(given: Adapted, known: Mapping[str, int], count: int) -> list[int]:
    return [adapter_of(name, known) for name in _per_prompt("adapter", given, count, "a name, or one or None")]


def _per_prompt(field: str, given: str | Sequence[str | None] | None, count: int, wanted: str) -> Sequence[Any]:
    values = [given] * count if given is None or isinstance(given, str) else given
    if not isinstance(values, list | tuple):
        raise ParameterError(field, f"{field} must be {wanted} per prompt, got {shown(given)}")
    if len(values) != count:
        raise ParameterError(field, f"{field} must be one, or one per prompt ({count}), got {len(values)}")
    return values


def adapter_of(name: Any, known: Mapping[str, int]) -> int:
    if name is None:
        return 0
    if not isinstance(name, str) or name not in known:
        has = f"lora_modules has {', '.join(known)}" if known else "lora_modules names none"
        raise ParameterError("adapter", f"adapter must be the name of one, and {has}; got {shown(name)}")
    return known[name]


def salt_of(given: Any) -> str:
    if given is None:
        return ""
    if not isinstance(given, str):
        raise ParameterError("cache_salt", f"cache_salt must be a text or None, got {shown(given)}")
    if not 1 <= len(given) <= MAX_SALT:
        raise ParameterError("cache_salt", f"cache_salt must have 1 to {MAX_SALT} characters, got {len(given)}")
    if any("\ud800" <= character <= "\udfff" for character in given):
        raise ParameterError("cache_salt", "cache_salt must be Unicode text, and half a surrogate pair is none")
    return given


def prompts_of(prompts: Any) -> list[str | list[int]]:
    if isinstance(prompts, str):
        return [prompts]
    items = _items(prompts)
    if items and isinstance(items[0], Integral):
        return [_token_ids(items)]
    return [item if isinstance(item, str) else _token_ids(_items(item)) for item in items]


def _items(given: Any) -> list[Any]:
    # A mapping is iterable, but its keys are not prompts.
    if isinstance(given, Mapping | bytes) or not isinstance(given, Iterable):
        raise ParameterError(
            "prompts", f"prompts must be a text, token ids, or a list of such prompts, got {shown(given)}"
        )
    return list(given)


def _token_ids(items: list[Any]) -> list[int]:
    for item in items:
        if isinstance(item, bool) or not isinstance(item, Integral):
            raise ParameterError("prompts", f"prompts: token ids must be integers, got {item!r}")
    return [int(item) for item in items]


def params_per_prompt(params: SamplingParams | Iterable[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    each = list(params)
    if isinstance(params, Mapping) or not all(isinstance(given, SamplingParams) for given in each):
        raise ParameterError(
            "params", f"params must be SamplingParams, or one of them per prompt, got {reprlib.repr(params)}"
        )
    if len(each) != count:
        raise ValueError(f"params must be one, or one per prompt ({count}), got {len(each)}")
    return each


def conversations_of(given: Any) -> list[list[Message]]:
    is_single = isinstance(given, Sequence) and bool(given) and isinstance(given[0], Mapping)
    conversations = [given] if is_single else given
    if not isinstance(conversations, list | tuple):
        raise _no_conversation(given)
    for conversation in conversations:
        if not isinstance(conversation, list | tuple) or not conversation:
            raise _no_conversation(conversation)
        for number, message in enumerate(conversation):
            _check_message(f"messages.{number}", message)
    return [list(conversation) for conversation in conversations]


def _check_message(path: str, message: Any) -> None:
    if not (isinstance(message, Mapping) and "role" in message and (message.get("tool_calls") or "content" in message)):
        raise _no_conversation(message)
    content, calls = message.get("content"), message.get("tool_calls") or ()
    parts = content if isinstance(content, list | tuple) else ()
    is_text = content is None or isinstance(content, str | list | tuple)
    if not (is_text and all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts)):
        raise ParameterError(
            f"{path}.content", f"{path}.content must be a text or a list of text parts, got {shown(content)}"
        )
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not (isinstance(function, Mapping) and isinstance(function.get("name"), str)):
            name = f"{path}.tool_calls.{number}"
            raise ParameterError(name, f"{name} must have a function with a name and arguments, got {shown(call)}")
        arguments = function.get("arguments")
        if not (arguments is None or isinstance(arguments, str | Mapping)):
            name = f"{path}.tool_calls.{number}.function.arguments"
            raise ParameterError(name, f"{name} must be JSON as text or an object, got {shown(arguments)}")


def _no_conversation(got: Any) -> ParameterError:
    return ParameterError(
        "messages",
        "messages must be a list of messages such as {'role': 'user', 'content': 'Hello'}, or a list of such lists, "
        f"got {shown(got)}",
    )


def tool_use_of(tools: Any, choice: ToolChoice = None, *, is_parallel: bool | None = None) -> ToolUse:
    """Return checked tools and a choice in OpenAI's form.

    `is_parallel` None allows several calls unless the choice is one function.
    """
    functions = [_function(number, tool) for number, tool in enumerate(tools or ())]
    names = [function["name"] for function in functions]
    if len(set(names)) < len(names):
        raise ParameterError("tools", "tools: each name must be unique")
    mode, chosen = _choice(choice, names)
    if mode == "none":
        return ToolUse()
    if mode == "required" and not names:
        raise ParameterError("tool_choice", "tool_choice required needs tools")
    if is_parallel is None:
        is_parallel = not (isinstance(choice, Mapping) and choice.get("type") == "function")
    return ToolUse(functions, frozenset(chosen), mode == "required", is_parallel)


def _function(number: int, tool: Any) -> Mapping[str, Any]:
    is_function = isinstance(tool, Mapping) and tool.get("type", "function") == "function"
    found: Any = tool.get("function") if is_function else None
    function: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
    if re.fullmatch(TOOL_NAME, str(function.get("name", ""))) is None:
        raise ParameterError(
            f"tools.{number}",
            f"tools.{number} must be a function such as {{'type': 'function', 'function': {{'name': 'count', "
            f"'parameters': {{...}}}}}} with a name of 1 to 128 letters, digits, _, - and ., got {shown(tool)}",
        )
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        name = f"tools.{number}.function.parameters"
        raise ParameterError(name, f"{name} must be a JSON schema, got {shown(parameters)}")
    return function


def _choice(choice: ToolChoice, names: Sequence[str]) -> tuple[str, Iterable[str]]:
    if choice is None or (isinstance(choice, str) and choice in _MODES):
        return choice or "auto", names
    mode: Any = "required"
    chosen: Any = [choice]
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools")
        mode, chosen = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, Mapping) else ("", [])
    try:
        found = [str(tool["function"]["name"]) for tool in chosen]
    except (TypeError, KeyError):
        found = []
    if not found or mode not in ("auto", "required") or not set(found) <= set(names):
        raise ParameterError(
            "tool_choice",
            f"tool_choice must be one of {', '.join(_MODES)}, or name functions of tools, such as {{'type': "
            f"'function', 'function': {{'name': 'count'}}}}, got {shown(choice)}",
        )
    return mode, found


def shown(given: Any) -> str:
    return f"{type(given).__name__} {reprlib.repr(given)}"
