from __future__ import annotations

from typing import Any

from skipjoin.server.api.errors import bad_request
from skipjoin.server.api.protocol import GenerationBody, RequestBody, ResponseFormat
from skipjoin.structured_output import GrammarError, StructuredOutput

# Older names of the fields of `structured_outputs`.
_GUIDED = ("json", "regex", "choice", "grammar")


def may_compile(body: RequestBody) -> bool:
    fields = ("response_format", "structured_outputs", "tools", *(f"guided_{name}" for name in _GUIDED))
    asked = getattr(body, "chat", body)  # of bodies that are converted
    return any(getattr(asked, field, None) is not None for field in fields)


def structured_output(body: GenerationBody) -> tuple[StructuredOutput | None, str]:
    """Return a body's constraint and its field. Raise 400 for more than one."""
    asked: dict[str, dict[str, Any] | ResponseFormat] = {}
    if body.response_format is not None and body.response_format.type != "text":
        asked["response_format"] = body.response_format
    if body.structured_outputs is not None:
        asked["structured_outputs"] = body.structured_outputs
    for name in _GUIDED:
        if (value := getattr(body, f"guided_{name}")) is not None:
            asked[f"guided_{name}"] = {name: value}
    if not asked:
        return None, ""
    if len(asked) > 1:
        first, second, *_ = asked
        raise bad_request(f"{second} must be null with {first}: a request has one constraint", second)
    ((field, given),) = asked.items()
    try:
        if isinstance(given, ResponseFormat):
            return _of_format(given), field
        if field.startswith("guided_"):
            given["whitespace_pattern"] = body.guided_whitespace_pattern
        return StructuredOutput.of(given), field
    except GrammarError as error:
        raise bad_request(f"{field} {error}", field) from None


def _of_format(given: ResponseFormat) -> StructuredOutput:
    if given.type == "json_object":
        return StructuredOutput.json_object() if given.schema_ is None else StructuredOutput.json(given.schema_)
    assert given.json_schema is not None
    return StructuredOutput.json({} if given.json_schema.schema_ is None else given.json_schema.schema_)
