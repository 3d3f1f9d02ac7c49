"""Constraints of chat requests: enforced tool calls, and structured output after the reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from skipjoin.formats.grammar import CallSchema, Marks, after_reasoning, calls_grammar
from skipjoin.formats.table import OutputFormat
from skipjoin.model.tokenizer import Tokenizer
from skipjoin.server.api.chat_message import is_thinking
from skipjoin.server.api.conversation import Tool
from skipjoin.server.api.errors import ApiError, bad_request
from skipjoin.server.api.protocol import ChatRequest
from skipjoin.server.api.service import Service
from skipjoin.server.api.structured import structured_output
from skipjoin.structured_output import GrammarError, StructuredOutput


async def chat_constraint(service: Service, body: ChatRequest, prompt: str) -> StructuredOutput | None:
    """Return the constraint of a chat request, if any. Raise 400 unless it compiles."""
    structured, field = structured_output(body)
    output_format, tools = service.output_format, body.offered
    if output_format is None or not (tools or structured):
        return await service.structured_output(body)
    writer = _Writer(output_format, service.tokenizer, prompt)
    if not tools:
        assert structured is not None
        return await _checked(service, writer.after_reasoning(structured, field), field)
    if not (structured or _must_enforce(body, tools)):
        return None
    try:
        found = writer.calls(body, tools, structured)
    except GrammarError as error:
        param = field or "tools"
        what = param if field else "tools: the grammar of their calls"
        raise bad_request(f"{what} {error}", param) from None
    try:
        return await _checked(service, found, "tools")
    except ApiError:
        await _check_each(service, tools)
        raise


def _must_enforce(body: ChatRequest, tools: Sequence[Tool]) -> bool:
    """Return whether calls are enforced: there must be one, or at most one, or a function is strict."""
    return body.must_call or body.parallel_tool_calls is False or any(tool.function.strict for tool in tools)


class _Writer:
    """Writes constraints for the output that follows a prompt."""

    def __init__(self, output_format: OutputFormat, tokenizer: Tokenizer, prompt: str) -> None:
        think = output_format.think
        if think is not None and prompt.rstrip().endswith(think.close):  # the prompt has an empty reasoning
            output_format = replace(output_format, think=None)
        self._format, self._tokenizer = output_format, tokenizer
        self._is_thinking = is_thinking(output_format, prompt)
        self._marks = Marks(output_format, lambda mark: next(iter(tokenizer.ids_of([mark])), None))

    def calls(self, body: ChatRequest, tools: Sequence[Tool], structured: StructuredOutput | None) -> StructuredOutput:
        functions = [
            CallSchema(tool.function.name, tool.function.schema_of_arguments, bool(tool.function.strict))
            for tool in tools
        ]
        return calls_grammar(
            self._format,
            self._marks,
            functions,
            is_parallel=body.parallel_tool_calls is not False,
            is_thinking=self._is_thinking,
            answer=structured,
            must_call=body.must_call,
        )

    def after_reasoning(self, structured: StructuredOutput, field: str) -> StructuredOutput:
        think = self._format.think
        if think is None and not self._format.answer:
            return structured
        try:
            if structured.kind == "grammar":  # which has rules of its own
                closing = self._tokenizer.encode(think.close, add_special_tokens=False) if think is not None else []
                return replace(structured, after=tuple(closing)) if self._is_thinking else structured
            return after_reasoning(self._format, self._marks, structured, is_thinking=self._is_thinking)
        except GrammarError as error:
            raise bad_request(f"{field} {error}", field) from None


async def _checked(service: Service, structured: StructuredOutput, field: str) -> StructuredOutput:
    await service.check_grammar(structured, field)
    return structured


async def _check_each(service: Service, tools: Sequence[Tool]) -> None:
    """Raise 400 for the first function whose schema cannot be enforced."""
    for number, tool in enumerate(tools):
        if tool.function.strict:
            param = f"tools.{number}.function.parameters"
            await service.check_grammar(StructuredOutput.json(tool.function.schema_of_arguments), param)
