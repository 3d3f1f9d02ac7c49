from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from skipjoin.formats.table import OutputFormat
from skipjoin.formats.tagged import ARGUMENTS, tagged_arguments
from skipjoin.schemas.notation import Notation
from skipjoin.schemas.rules import Rules, json_rules, schema_of
from skipjoin.structured_output import GrammarError, StructuredOutput

# White space that models write between the reasoning and what follows.
_SPACE = r"/[ \n]{0,2}/"
_ANY = r"/(.|\n)*/"


class CallSchema(NamedTuple):
    """Function that a grammar allows. Without `is_strict`, keywords that cannot be enforced are ignored."""

    name: str
    schema: dict[str, Any]
    is_strict: bool = False


class Marks:
    """Writer of grammar rules. Marks that are special tokens become token rules, which no text matches."""

    def __init__(self, output_format: OutputFormat, id_of: Callable[[str], int | None]) -> None:
        self._ids = {mark: found for mark in output_format.markers if (found := id_of(mark)) is not None}
        self._split = (
            re.compile("|".join(map(re.escape, sorted(self._ids, key=len, reverse=True)))) if self._ids else None
        )

    def rule(self, text: str) -> str:
        if self._split is None:
            return _quoted(text)
        pieces, at = [], 0
        for found in self._split.finditer(text):
            pieces += [_quoted(text[at : found.start()]), f"<[{self._ids[found[0]]}]>"]
            at = found.end()
        return " ".join(piece for piece in [*pieces, _quoted(text[at:])] if piece)

    def begins_with_token(self, text: str) -> bool:
        return self._split is not None and self._split.match(text) is not None


def calls_grammar(
    output_format: OutputFormat,
    marks: Marks,
    functions: Sequence[CallSchema],
    *,
    is_parallel: bool,
    is_thinking: bool,
    answer: StructuredOutput | None = None,
    must_call: bool = False,
) -> StructuredOutput:
    """Return the grammar of messages with calls of some functions; others follow `answer`."""
    calls = output_format.calls
    assert calls is not None
    trigger = "" if calls.is_bare else calls.trigger
    opening, after = (calls.begin + calls.before).removeprefix(trigger), marks.rule(calls.after)
    names = [f"call_{number}" for number in range(len(functions))]
    more = f"({marks.rule(calls.between + calls.before)} call)*" if is_parallel and calls.between is not None else ""
    lines = [
        *(
            line
            for name, function in zip(names, functions, strict=True)
            for line in _function_lines(output_format, marks, name, function)
        ),
        f"call: ({' | '.join(names)}) {after}",
        f"opened: {marks.rule(opening)} call {more} {marks.rule(calls.end)}",
        f"calls: {marks.rule(trigger)} opened",
    ]
    message = "calls"
    if not must_call:
        message = "mixed"
        lines += _with_answers(output_format, marks, answer)
    return _grammar(output_format, marks, message, lines, is_thinking)


def after_reasoning(
    output_format: OutputFormat, marks: Marks, structured: StructuredOutput, *, is_thinking: bool
) -> StructuredOutput:
    rules = _answer(structured)
    line = f"answer: {marks.rule(output_format.answer)} ({rules.expression})"
    return _grammar(output_format, marks, "answer", [line, *rules.lines], is_thinking)


def _function_lines(output_format: OutputFormat, marks: Marks, name: str, function: CallSchema) -> list[str]:
    calls = output_format.calls
    assert calls is not None
    head = f"{name}: {marks.rule(function.name + calls.middle)}"
    if calls.tags is None:
        rules = _arguments(name, function)
        return [f"{head} {rules.expression}", *rules.lines]
    arguments, more = tagged_arguments(calls.tags, name, function.schema, marks.rule, is_strict=function.is_strict)
    return [f"{head} {arguments}", *more]


def _with_answers(output_format: OutputFormat, marks: Marks, answer: StructuredOutput | None) -> list[str]:
    calls, opening = output_format.calls, marks.rule(output_format.answer)
    assert calls is not None
    if answer is not None:
        if calls.is_bare:
            raise GrammarError(f"must be null with tools: in the format {output_format.name} both are JSON")
        rules = _answer(answer)
        return [f"mixed: calls | {opening} ({rules.expression})", *rules.lines]
    if calls.is_bare:  # a call begins with a brace
        return [r"mixed: calls | /([^{ \n](.|\n)*)?/"]
    if opening:
        return [f"mixed: calls | {opening} TEXT", f"TEXT: {_ANY}"]
    if marks.begins_with_token(calls.trigger):
        return ["mixed: TEXT calls?", f"TEXT: {_ANY}"]
    # Text ends as soon as a call begins, and does not begin as the reasoning does.
    think = output_format.think
    text = _ANY if think is None else f"{_ANY} & ~/{_escaped(think.open)}(.|\\n)*/"
    return ["mixed: TEXT | lead opened", f"lead[lazy]: TEXT {_quoted(calls.trigger)}", f"TEXT: {text}"]


def _grammar(
    output_format: OutputFormat, marks: Marks, message: str, lines: list[str], is_thinking: bool
) -> StructuredOutput:
    think, lead = output_format.think, ""
    if think is not None:
        opening, closing = marks.rule(think.open), marks.rule(think.close + output_format.after_think)
        is_token = marks.begins_with_token(think.close)
        lazy = "" if is_token else "[lazy]"
        lines += [
            f"thoughts{lazy}: THOUGHTS {closing}",
            f"THOUGHTS: {_ANY}",
            f"SPACE: {_SPACE}",
        ]
        if is_thinking:
            lead = "thoughts SPACE "
        elif is_token:
            lead = f"({opening} thoughts SPACE)? "
        else:
            lines.append(f"reasoning[lazy]: {opening} THOUGHTS {closing}")
            lead = "(reasoning SPACE)? "
    text = "\n".join([f"start: {lead}{message}", *lines])
    return StructuredOutput(kind="grammar", text=text)


def _answer(structured: StructuredOutput) -> Rules:
    if structured.kind == "json":
        return json_rules(schema_of(structured.text), Notation(whitespace=structured.whitespace))
    if structured.kind == "choice":
        return Rules(" | ".join(map(_quoted, json.loads(structured.text))), [], [])
    if structured.kind == "regex":
        return Rules("/" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", structured.text) + "/", [], [])
    raise GrammarError("must not be a grammar together with tools or with a model that reasons: use json or regex")


def _arguments(name: str, function: CallSchema) -> Rules:
    schema = function.schema
    kinds = schema.get("type", "object")
    if isinstance(kinds, list):
        kinds = "object" if "object" in kinds else kinds
    if kinds != "object":
        raise GrammarError(f"needs parameters of the type object: those of {function.name} are of {json.dumps(kinds)}")
    schema = {**schema, "type": "object"}
    if "properties" in schema and not {"additionalProperties", "patternProperties", "$ref", "allOf"} & schema.keys():
        schema = {**schema, "additionalProperties": False}
    return json_rules(schema, replace(ARGUMENTS, is_lenient=not function.is_strict), name)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _escaped(text: str) -> str:
    return re.escape(text).replace("\\\n", r"\n").replace("/", r"\/")
