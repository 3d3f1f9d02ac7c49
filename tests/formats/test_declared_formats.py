from __future__ import annotations

import itertools
import json
from typing import Any

import llguidance
import pytest
from test_message_reader import Read, read

from skipjoin.formats.choice import choose_format
from skipjoin.formats.grammar import CallSchema, Marks, calls_grammar
from skipjoin.formats.table import GEMMA, HERMES, QWEN_CODER, OutputFormat

THINK = {"open": "[[", "close_pattern": r"\s*\]\]", "content": "text"}
WHOLE = {"type": "function", "function": "{content}"}
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
LISTED = {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}}
CALL = '{"name": "f", "arguments": {"city": "a", "n": [1, {"x": null}]}}'
ARGUMENTS = '{"city": "a", "n": [1, {"x": null}]}'
# Declarations of calls, and two calls as a model writes them.
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "JSON": ({"open": "<call>", "close": "</call>", "transform": WHOLE}, f"<call>{CALL}</call>\n<call>{CALL}</call>"),
    "pattern": (
        {"open_pattern": r"\s*<call>\s*", "close_pattern": r"\s*</call>", "transform": WHOLE},
        f"<call>\n{CALL}\n</call>\n<call>\n{CALL}\n</call>",
    ),
    "name in the mark": (
        {"open_pattern": r"\s*<fn=(?P<name>[^>\n]+)>", "close": "</fn>", "transform": NAMED},
        f"<fn=f>{ARGUMENTS}</fn><fn=f>{ARGUMENTS}</fn>",
    ),
    "list": (
        {"open": "CALLS:", "close": ":END", "transform": LISTED, "transform_each": True},
        f"CALLS:[{CALL}, {CALL}]:END",
    ),
}


def declared(calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    given = {"repeats": True, "content": "json", **calls}
    return {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|assistant|>",
        "fields": {"thinking": THINK, "tool_calls": given, "content": {"close": "<end>", "content": "text"}, **fields},
    }


def chosen(template: dict[str, Any], source: str = "") -> OutputFormat:
    found = choose_format(source, knows_tools=True, declared=template)
    assert found is not None
    return found


@pytest.mark.parametrize("case", CASES)
def test_declared_formats_are_read_as_by_transformers(case: str) -> None:
    calls, written = CASES[case]
    text = f"[[hm ]]So: {written}"
    from transformers.utils.chat_parsing import parse_response  # noqa: PLC0415 - takes seconds

    theirs = parse_response(text, declared(calls), prefix="")
    found = list(
        itertools.chain.from_iterable(call if isinstance(call, list) else [call] for call in theirs["tool_calls"])
    )
    expected = [(call["function"]["name"], json.dumps(call["function"]["arguments"])) for call in found]
    for pieces in ([text], list(text)):
        ours = read(chosen(declared(calls)), pieces)
        # Theirs loses the content if white space stands between two calls.
        assert (ours.reasoning.strip(), ours.content) == (theirs["thinking"], theirs.get("content", "So:"))
        assert ours.calls == expected == [("f", ARGUMENTS), ("f", ARGUMENTS)]


@pytest.mark.parametrize("case", CASES)
def test_cut_answers_in_declared_formats_lose_nothing(case: str) -> None:
    """The parser of transformers raises ValueError for them."""
    calls, written = CASES[case]
    for end in range(len(written)):
        found = read(chosen(declared(calls)), [f"[[hm]]So {written[:end]}"])
        assert found.reasoning == "hm"
        assert found.content.startswith("So")
        for name, arguments in found.calls:
            assert name == "f"
            assert ARGUMENTS.startswith(arguments)


@pytest.mark.parametrize("case", CASES)
def test_calls_of_declared_formats_are_enforced_as_they_are_read(case: str) -> None:
    calls, _ = CASES[case]
    found = chosen(declared(calls))
    row = found.calls
    functions = [CallSchema("f", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})]
    marks = Marks(found, lambda mark: None)
    grammar = calls_grammar(found, marks, functions, is_parallel=False, is_thinking=False, must_call=True)
    assert llguidance.LLMatcher.validate_grammar(llguidance.LLMatcher.grammar_from_lark(grammar.text)) == ""
    text = row.begin + row.before + "f" + row.middle + '{"a": 1}' + row.after + row.end
    assert read(found, list(text)) == Read("", "", [("f", '{"a": 1}')])


def test_a_declaration_precedes_the_table_and_is_completed_by_it() -> None:
    found = chosen(declared(CASES["name in the mark"][0]), "<tool_call> </think>")
    assert (found.think.open, found.calls and found.calls.trigger) == ("[[", "<fn=")
    partly = chosen({"fields": {"thinking": THINK, "content": {"content": "text"}}}, "<tool_call> </think>")
    assert partly.calls is HERMES.calls
    same = chosen(declared({"open": "<tool_call>", "close": "</tool_call>", "transform": WHOLE}), "<tool_call>")
    assert same.calls is HERMES.calls


NOT_UNDERSTOOD = {
    "not an object": "x",
    "version": {**declared(CASES["JSON"][0]), "version": 2},
    "field": declared(CASES["JSON"][0], audio={"open": "<a>", "close": "</a>"}),
    "content with marks": declared(CASES["JSON"][0], content={"open": "<a>"}),
    "slow pattern": declared({"open_pattern": "(a+)+b", "close": "c", "transform": WHOLE}),
    "alternatives": declared({"open_pattern": "<a>|<b>", "close": "c", "transform": WHOLE}),
    "shape": declared({"open": "<a>", "close": "c", "transform": {"function": {"name": "{content.n}"}}}),
    "parser": declared({"open": "<a>", "close": "c", "content": "kv-lines", "transform": WHOLE}),
}


@pytest.mark.parametrize("case", NOT_UNDERSTOOD)
def test_declarations_that_are_not_understood_leave_the_table(case: str, caplog: pytest.LogCaptureFixture) -> None:
    assert choose_format("<tool_call>", knows_tools=True, declared=NOT_UNDERSTOOD[case]) == choose_format(
        "<tool_call>", knows_tools=True
    )
    assert "response_template is not understood" in caplog.text


def test_declarations_of_calls_that_are_no_json_take_rows_of_the_table() -> None:
    tags = {"tag_pattern": r"<parameter=(?P<key>[^>]+)>(?P<value>.*?)</parameter>"}
    elements = {
        "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        "close_pattern": r"</function>\s*</tool_call>",
        "content": "xml-inline",
        "content_args": tags,
        "transform": NAMED,
    }
    strings = {
        "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
        "close": "<tool_call|>",
        "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
        "transform": NAMED,
    }
    for calls, row in ((elements, QWEN_CODER), (strings, GEMMA)):
        found = chosen(declared(calls))
        assert found.calls is row.calls
        assert found.think.open == "[["
