from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skipjoin.formats.choice import choose_format
from skipjoin.formats.conversation import template_tool
from skipjoin.formats.prompted import prompted_messages
from skipjoin.formats.table import OutputFormat
from skipjoin.model.tokenizer import Tokenizer


def format_of(tokenizer: Tokenizer, tool_format: str) -> OutputFormat | None:
    template = tokenizer.chat_template
    if template is None:
        return None
    return choose_format(
        template.source,
        knows_tools="tools" in template.variables,
        declared=tokenizer.response_template,
        tool_format=tool_format,
    )


def chat_text(
    tokenizer: Tokenizer,
    output_format: OutputFormat | None,
    messages: Sequence[Mapping[str, Any]],
    functions: Sequence[Mapping[str, Any]],
    **variables: Any,
) -> str:
    """Return a conversation as text; the prompt shows `functions`."""
    tools = [template_tool(function) for function in functions]
    template = tokenizer.chat_template
    if template is not None and output_format is not None and output_format.is_prompted:
        assert output_format.calls is not None
        shown = [tool["function"] for tool in tools]
        has_system = template.input.has_system
        messages = prompted_messages(messages, shown, output_format.calls, has_system=has_system)
    elif tools:
        variables["tools"] = tools
    return tokenizer.chat_text(messages, **variables)
