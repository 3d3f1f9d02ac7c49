from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from subprocess import run
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipjoin.formats.message import MessageReader
from skipjoin.formats.table import (
    DEEPSEEK,
    DEEPSEEK_SEP,
    FORMATS,
    GEMMA,
    GLM,
    HARMONY,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    QWEN_CODER,
    THINK,
    OutputFormat,
    find_format,
)

ARGUMENTS = '{"city": "a}\\"{b", "n": [1, {"x": null}]}'


@dataclass
class Read:
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)


def read(
    output_format: OutputFormat,
    pieces: list[str],
    *,
    is_thinking: bool = False,
    schemas: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> Read:
    numbers = itertools.count()
    reader = MessageReader(
        output_format,
        reads_calls=True,
        is_thinking=is_thinking,
        new_id=lambda: f"id{next(numbers)}",
        schemas=schemas,
    )
    parts = [part for piece in pieces for part in reader.feed(piece)] + reader.finish()
    found, ids = Read(), set()
    for part in parts:
        if part.call is None:
            if part.is_reasoning:
                found.reasoning += part.text
            else:
                found.content += part.text
        elif part.name:
            assert part.call == len(found.calls)
            found.calls.append((part.name, part.text))
            ids.add(part.id)
        else:
            name, arguments = found.calls[part.call]
            found.calls[part.call] = (name, arguments + part.text)
    assert len(ids) == len(found.calls)
    assert reader.has_calls == bool(found.calls)
    return found


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


TWO = [("f", ARGUMENTS), ("g", "{}")]


def deepseek(output_format: OutputFormat) -> str:
    calls = output_format.calls
    written = [calls.before + name + calls.middle + arguments + calls.after for name, arguments in TWO]
    return f"why\n</think>\n\nx{calls.begin}{(calls.between or '').join(written)}{calls.end}"


CASES: list[tuple[OutputFormat, str, Read]] = [
    (
        HERMES,
        f"<think>\nhm\n</think>\n\nLook {hermes('f', ARGUMENTS)}\nand\n{hermes('g', '{}')}\n",
        Read("Look\nand", "hm", TWO),
    ),
    (HERMES, hermes("f", '{"t": "</tool_call>"}') + "\n so", Read("\n so", "", [("f", '{"t": "</tool_call>"}')])),
    (HERMES, '<tool_call>{"arguments": {"t": 1}, "name": "f"}</tool_call>', Read("", "", [("f", '{"t": 1}')])),
    (HERMES, '<tool_call>\n{"name": "f", "argum', Read('<tool_call>\n{"name": "f", "argum')),
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": "b', Read("", "", [("f", '{"a": "b')])),
    (HERMES, hermes("f", '{"a": "b"}')[:-4], Read("", "", [("f", '{"a": "b"}')])),
    (DEEPSEEK, deepseek(DEEPSEEK).partition("</think>\n\n")[2][:-10], Read("x", "", TWO)),
    (HERMES, "<tool_call>\nnonsense\n</tool_call> x", Read("<tool_call>\nnonsense\n</tool_call> x")),
    (HERMES, "<think>open {", Read("", "open {")),
    (HERMES, "<tool_call>" + "[" * 5000 + "</tool_call>", Read("<tool_call>" + "[" * 5000 + "</tool_call>")),
    (GEMMA, "<|tool_call>call:f" + "{a:" * 5000 + "<tool_call|>", Read("", "", [("f", "{a:" * 5000)])),
    (LLAMA, f'{{"name": "f", "parameters": {ARGUMENTS}}}', Read("", "", TWO[:1])),
    (
        LLAMA,
        f'<|python_tag|>{{"name": "f", "parameters": {ARGUMENTS}}}; {{"name": "g", "parameters": {{}}}}',
        Read("", "", TWO),
    ),
    (LLAMA, '{"name": "Bob", "age": 5}', Read('{"name": "Bob", "age": 5}')),
    (LLAMA, " plain { text", Read(" plain { text")),
    (
        MISTRAL,
        f'[TOOL_CALLS] [{{"name": "f", "arguments": {ARGUMENTS}}}, {{"name": "g", "arguments": {{}}}}]',
        Read("", "", TWO),
    ),
    (MISTRAL_ARGS, f"ok [TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{ARGUMENTS}[TOOL_CALLS]g[ARGS]{{}}", Read("ok", "", TWO)),
    (
        GEMMA,
        '<|channel>thought\nabc<channel|>hi<|tool_call>call:f{city:<|"|>Lon"don<|"|>,n:[1,2]}<tool_call|>'
        '<|tool_call>call:g{"a": "b"}<tool_call|>',
        Read("hi", "abc", [("f", '{"city": "Lon\\"don", "n": [1, 2]}'), ("g", '{"a": "b"}')]),
    ),
    (
        HARMONY,
        "<|channel|>analysis<|message|>need<|end|><|start|>assistant<|channel|>commentary<|message|>Wait<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{ARGUMENTS}",
        Read("Wait", "need", TWO[:1]),
    ),
    (
        HARMONY,
        "<|channel|>analysis<|message|>need<|end|><|start|>assistant<|channel|>final<|message|>So",
        Read("So", "need"),
    ),
    (
        HARMONY,
        "<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}",
        Read("", "", TWO[1:]),
    ),
    (
        HARMONY,
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
        f"<|start|>assistant<|channel|>analysis to=f code<|message|>{ARGUMENTS}<|end|><|start|>assistant<|message|>x"
        "<|end|><|start|>assistant <|channel|>final <|constrain|>json<|message|>y",
        Read("x\n\ny", "a\n\nb", TWO[:1]),
    ),
    (
        QWEN_CODER,
        'ok\n<tool_call>\n<function=f>\n<parameter=city>\na\n"b" </b>\n</parameter>\n<parameter=n>\n[1, 2]\n'
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
        Read("ok", "", [("f", '{"city": "a\\n\\"b\\" </b>", "n": [1, 2]}'), ("g", "{}")]),
    ),
    (QWEN_CODER, "<tool_call>\n<function=f>\n<parameter=a", Read("<tool_call>\n<function=f>\n<parameter=a")),
    (
        GLM,
        "<think></think>\n<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>-3</arg_value>\n<arg_key>t</arg_key>\n"
        "<arg_value>{x</arg_value>\n</tool_call><tool_call>g</tool_call>",
        Read("", "", [("f", '{"n": -3, "t": "{x"}'), ("g", "{}")]),
    ),
    (
        QWEN_CODER,
        '<tool_call>\n<function=f>\n<parameter=a>["\\ud800"]</parameter><parameter=b>1e999</parameter></tool_call>',
        Read("", "", [("f", '{"a": "[\\"\\\\ud800\\"]", "b": "1e999"}')]),
    ),
    (GLM, "<tool_call>no call at all</tool_call> x", Read("<tool_call>no call at all</tool_call> x")),
    (THINK, "<think>a</think>b <tool_call>", Read("b <tool_call>", "a")),
]


THINKING = [(row, deepseek(row), Read("x", "why", TWO)) for row in (DEEPSEEK, DEEPSEEK_SEP)]


@pytest.mark.parametrize(("output_format", "text", "expected"), CASES, ids=[case[1][:30] for case in CASES])
def test_output_is_split(output_format: OutputFormat, text: str, expected: Read) -> None:
    assert read(output_format, [text]) == expected
    assert read(output_format, list(text)) == expected


@pytest.mark.parametrize(("output_format", "text", "expected"), THINKING, ids=[row.name for row, *_ in THINKING])
def test_prompt_may_begin_the_reasoning(output_format: OutputFormat, text: str, expected: Read) -> None:
    assert read(output_format, [text], is_thinking=True) == expected
    assert read(output_format, list(text), is_thinking=True) == expected


def pieces_of(output_format: OutputFormat) -> st.SearchStrategy[str]:
    """Return outputs of marks, calls and text in any order, most of them broken."""
    calls, think = output_format.calls, output_format.think
    marks = [*output_format.markers, "{", "}", '"', "\\", "\n", " ", "a", "é", "json", "call:", "[{"]
    if calls is not None:
        call = calls.before + "f" + calls.middle + ARGUMENTS + calls.after
        marks += [calls.trigger, calls.begin, calls.before, calls.middle, calls.after, calls.end, call, '"x": 1']
    if think is not None:
        marks += [think.open, think.close]
    return st.lists(st.sampled_from(marks), max_size=14).map("".join)


@pytest.mark.parametrize("output_format", FORMATS, ids=lambda row: row.name)
@given(data=st.data())
def test_any_chunking_gives_the_same_message(output_format: OutputFormat, data: st.DataObject) -> None:
    text = data.draw(pieces_of(output_format))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    is_thinking = data.draw(st.booleans())
    whole = read(output_format, [text], is_thinking=is_thinking)
    assert read(output_format, pieces, is_thinking=is_thinking) == whole
    assert read(output_format, list(text), is_thinking=is_thinking) == whole


def test_formats_are_found_by_their_templates() -> None:
    for row in FORMATS:
        for group in row.signs:
            found = find_format(" ".join(group))
            assert found.name == row.name
    assert find_format("{{ messages }}") is None
    hermes_without_reasoning = find_format("{% if tools %}<tool_call>{% endif %}")
    assert hermes_without_reasoning.think is None


def test_patterns_repeat_nothing_without_bound() -> None:
    """A search for an unbounded repetition takes quadratic time in long runs, for example of line breaks."""
    for row in FORMATS:
        fields = row.response_template(reads_calls=True)["fields"].values()
        patterns = [part for field in fields for name, part in field.items() if name.endswith("_pattern")]
        patterns += [] if row.calls is None else [row.calls.head]
        for pattern in patterns:
            assert not re.search(r"(?<!\\)[*+]", pattern), (row.name, pattern)
    text = "\n" * 20_000 + "a"
    assert read(HERMES, [text]) == read(HERMES, list(text)) == Read(text)


def test_formats_do_not_import_transformers_and_their_parser_no_torch() -> None:
    code = "import sys; import skipjoin.server.api.app; assert 'transformers' not in sys.modules; "
    code += "from skipjoin.formats.message import load_parser; load_parser(); assert 'torch' not in sys.modules"
    run([sys.executable, "-c", code], check=True)
