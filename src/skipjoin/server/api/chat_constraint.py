"""Constraints of chat requests: enforced tool calls, and structured output after the reasoning."""

from __future__ import annotations

from collections.abc import Sequence

from skipjoin.formats.constraint import Constraints
from skipjoin.formats.grammar import CallSchema
from skipjoin.server.api.conversation import Tool
from skipjoin.server.api.errors import ApiError, bad_request
from skipjoin.server.api.protocol import ChatRequest
from skipjoin.server.api.service import Service
from skipjoin.server.api.structured import structured_output
from skipjoin.structured_output import GrammarError, StructuredOutput


async def chat_constraint(service: Service, body: ChatRequest, prompt: str, client: str) -> StructuredOutput | None:
    """Return the constraint of a chat request, if any. Raise as `Service.check_grammar`."""
    structured, field = structured_output(body)
    output_format, tools = service.output_format, body.offered
    if output_format is None or not (tools or structured):
        return await service.structured_output(body, client)
    constraints = Constraints(output_format, service.tokenizer, prompt)
    if not tools:
        assert structured is not None
        try:
            structured = constraints.after_reasoning(structured)
        except GrammarError as error:
            raise bad_request(f"{field} {error}", field) from None
        return await _checked(service, structured, field, client)
    if not (structured or output_format.is_prompted or _must_enforce(body, tools)):
        return None
    try:
        found = _calls(constraints, body, tools, structured)
    except GrammarError as error:
        await _check_each(service, tools, client)
        param = field or "tools"
        what = param if field else "tools: the grammar of their calls"
        raise bad_request(f"{what} {error}", param) from None
    try:
        return await _checked(service, found, "tools", client)
    except ApiError:
        await _check_each(service, tools, client)
        raise


def _must_enforce(body: ChatRequest, tools: Sequence[Tool]) -> bool:
    """Return whether calls are enforced: one is required, only some or one at a time are allowed, or one is strict."""
    is_limited = not body.is_parallel or len(tools) < len(body.tools or ())
    return body.must_call or is_limited or any(tool.function.strict for tool in tools)


def _calls(
    constraints: Constraints, body: ChatRequest, tools: Sequence[Tool], structured: StructuredOutput | None
) -> StructuredOutput:
    functions = [
        CallSchema(tool.function.name, tool.function.schema_of_arguments, bool(tool.function.strict)) for tool in tools
    ]
    return constraints.calls(functions, is_parallel=body.is_parallel, must_call=body.must_call, answer=structured)


async def _checked(service: Service, structured: StructuredOutput, field: str, client: str) -> StructuredOutput:
    await service.check_grammar(structured, field, client)
    return structured


async def _check_each(service: Service, tools: Sequence[Tool], client: str) -> None:
    """Raise 400 for the first function whose schema cannot be enforced."""
    for number, tool in enumerate(tools):
        if tool.function.strict:
            param = f"tools.{number}.function.parameters"
            await service.check_grammar(StructuredOutput.json(tool.function.schema_of_arguments), param, client)
