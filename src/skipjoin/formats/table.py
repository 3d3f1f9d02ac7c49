"""Table of output formats, one row per family.

A row describes a format twice: as a response template of transformers, which splits an output into regions, and as the
texts around a call, from which `grammar` builds the grammar of the same calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

# Regions of response templates.
REASONING, CALLS, CONTENT, ANSWER = "reasoning", "calls", "content", "answer"

# White space in patterns is bounded. Otherwise a search in a long run of it takes quadratic time.
_JSON_HEAD = (
    r'[\s\[\]},;]{0,32}\{\s{0,8}(?:"type"\s{0,8}:\s{0,8}"function"\s{0,8},\s{0,8})?"name"\s{0,8}:\s{0,8}"(?P<name>[^"\\]{1,256})"\s{0,8},'
    r'\s{0,8}"(?:arguments|parameters)"\s{0,8}:\s{0,8}\{'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Think:
    """Delimiters of reasoning as text, and as patterns with the white space around them."""

    open: str
    close: str
    open_pattern: str
    close_pattern: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """Elements of arguments: texts before the name, between name and value, after the value, and after the last."""

    open: str
    middle: str
    close: str
    end: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Tool calls of a format.

    Attributes:
        open: Pattern at which a region of calls begins.
        close: Text at which it ends. None: with the message.
        head: Pattern of a call up to the opening brace of its arguments, with the group `name` and possibly `id`.
        begin, end: Texts around all calls that a grammar enforces.
        between: Text between two calls. None: one call per message.
        before, middle, after: Texts before the name, before the arguments, and after them.
        trigger: Start of the first call, which distinguishes it from text.
        is_bare: A message that begins with a head is a call without further marks.
        tags: Arguments are elements instead of JSON. Strings in them are plain text.
        has_own_strings: Strings are between marks of the format instead of quotes, and keys have none.
        id_length: Letters and digits in ids of calls. None: any id.
    """

    open: str
    close: str | None = None
    head: str = _JSON_HEAD
    begin: str = ""
    end: str = ""
    between: str | None = ""
    before: str
    middle: str
    after: str
    trigger: str
    is_bare: bool = False
    tags: Tags | None = None
    has_own_strings: bool = False
    id_length: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFormat:
    """Format of one family.

    Attributes:
        signs: Texts in a chat template that identify the family: all of one group.
        markers: Special tokens of the format, which stay in the text that is split.
        after_think: Text between the reasoning and the rest of the message.
        answer: Text with which a message without calls begins.
        joint: Text between two messages of one kind within an output.
        extra: Further fields of the response template.
        is_prompted: The prompt describes tools and the format, because the chat template knows none.
    """

    name: str
    signs: tuple[tuple[str, ...], ...]
    calls: Calls | None = None
    think: Think | None = None
    markers: tuple[str, ...] = ()
    after_think: str = ""
    answer: str = ""
    joint: str = ""
    extra: Mapping[str, Any] | None = None
    is_prompted: bool = False

    def response_template(self, *, reads_calls: bool) -> dict[str, Any]:
        fields: dict[str, Any] = {CONTENT: _TEXT, **(self.extra or {})}
        if self.think is not None:
            fields[REASONING] = {
                "open_pattern": self.think.open_pattern,
                "close_pattern": self.think.close_pattern,
                **_TEXT,
            }
        if reads_calls and self.calls is not None:
            fields[CALLS] = {"open_pattern": self.calls.open, **_TEXT}
            if self.calls.close is not None:
                fields[CALLS]["close"] = self.calls.close
        return {"start_anchor_pattern": r"\A", "fields": fields}


# A region that occurs again continues the first instead of replacing it.
_TEXT: dict[str, Any] = {"content": "text", "content_args": {"strip": False}, "repeats": True, "join": ""}


def _tags(name: str, open_mark: str = "<{}>", close_mark: str = "</{}>") -> Think:
    opening, closing = open_mark.format(name), close_mark.format(name)
    escaped = [mark.replace("[", r"\[").replace("]", r"\]") for mark in (opening, closing)]
    return Think(
        open=opening,
        close=closing,
        open_pattern=rf"\s{{0,8}}{escaped[0]}\s{{0,8}}",
        close_pattern=rf"\s{{0,8}}{escaped[1]}\s{{0,8}}",
    )


_THINK = _tags("think")

_TOOL_CALL = Calls(
    open=r"\s{0,8}<tool_call>",
    close="</tool_call>",
    between="\n",
    before='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    after="}\n</tool_call>",
    trigger="<tool_call>",
)

HERMES = OutputFormat(
    name="hermes",
    signs=(("<tool_call>",),),
    markers=("<tool_call>", "</tool_call>", "<think>", "</think>"),
    think=_THINK,
    calls=_TOOL_CALL,
)

QWEN_CODER = OutputFormat(
    name="qwen3-coder",
    signs=(("<tool_call>", "<function="),),
    markers=HERMES.markers,
    think=_THINK,
    calls=replace(
        _TOOL_CALL,
        head=r"\s{0,8}<function=(?P<name>[^>\s]{1,256})>",
        before="<tool_call>\n<function=",
        middle=">\n",
        after="</function>\n</tool_call>",
        tags=Tags(open="<parameter=", middle=">\n", close="\n</parameter>\n", end="</function>"),
    ),
)

GLM = OutputFormat(
    name="glm4.5",
    signs=(("<tool_call>", "<arg_key>"),),
    markers=(*HERMES.markers, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    think=_THINK,
    calls=replace(
        _TOOL_CALL,
        head=r"\s{0,8}(?P<name>[^\s<{]{1,256})",
        before="<tool_call>",
        middle="\n",
        after="</tool_call>",
        tags=Tags(open="<arg_key>", middle="</arg_key>\n<arg_value>", close="</arg_value>\n"),
    ),
)

LLAMA = OutputFormat(
    name="llama3",
    signs=(("<|python_tag|>",), ("<|start_header_id|>", '"parameters"')),
    markers=("<|python_tag|>",),
    think=_THINK,
    calls=Calls(
        open=r"\s{0,8}<\|python_tag\|>",
        between=None,
        before='{"name": "',
        middle='", "parameters": ',
        after="}",
        trigger="<|python_tag|>",
        is_bare=True,
    ),
)

MISTRAL = OutputFormat(
    name="mistral",
    signs=(("[TOOL_CALLS]",),),
    markers=("[TOOL_CALLS]", "[THINK]", "[/THINK]"),
    think=_tags("THINK", "[{}]", "[/{}]"),
    calls=Calls(
        open=r"\s{0,8}\[TOOL_CALLS\]",
        begin="[TOOL_CALLS][",
        end="]",
        between=", ",
        before='{"name": "',
        middle='", "arguments": ',
        after="}",
        trigger="[TOOL_CALLS]",
        id_length=9,
    ),
)

# Mistral since version 11 of its tokenizer.
MISTRAL_ARGS = OutputFormat(
    name="mistral-args",
    signs=(("[TOOL_CALLS]", "[ARGS]"),),
    markers=(*MISTRAL.markers, "[ARGS]", "[CALL_ID]"),
    think=MISTRAL.think,
    calls=Calls(
        open=r"\s{0,8}\[TOOL_CALLS\]",
        head=r"\s{0,8}(?:\[TOOL_CALLS\]\s{0,8})?(?P<name>[^\[\]\s{]{1,256})\s{0,8}(?:\[CALL_ID\](?P<id>[A-Za-z0-9]{1,64}))?\[ARGS\]\s{0,8}\{",
        before="[TOOL_CALLS]",
        middle="[ARGS]",
        after="",
        trigger="[TOOL_CALLS]",
        id_length=9,
    ),
)

GEMMA = OutputFormat(
    name="gemma",
    signs=(("<|tool_call>",),),
    markers=("<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>", '<|"|>'),
    think=Think(
        open="<|channel>thought\n",
        close="<channel|>",
        open_pattern=r"\s{0,8}<\|channel>thought\s{0,8}",
        close_pattern=r"\s{0,8}<channel\|>\s{0,8}",
    ),
    calls=Calls(
        open=r"\s{0,8}<\|tool_call>",
        close="<tool_call|>",
        head=r"\s{0,8}call:(?P<name>[^\s{]{1,256})\s{0,8}\{",
        before="<|tool_call>call:",
        middle="",
        after="<tool_call|>",
        trigger="<|tool_call>",
        has_own_strings=True,
    ),
)

_HARMONY_START = r"(?:<\|start\|>assistant\s{0,2})?"
# Type of a message's content. Models leave out marks, and write other words than json.
_HARMONY_TYPE = r"\s{0,8}(?:<\|constrain\|>)?\w{0,32}\s{0,8}<\|message\|>"

# Messages of an answer are channels: analysis is reasoning, commentary has calls, and the text before them. The
# recipient of a call stands before or after the channel.
HARMONY = OutputFormat(
    name="harmony",
    signs=(("<|channel|>",),),
    markers=("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>"),
    after_think="<|start|>assistant",
    answer="<|channel|>final<|message|>",
    joint="\n\n",
    think=Think(
        open="<|channel|>analysis<|message|>",
        close="<|end|>",
        open_pattern=_HARMONY_START + r"<\|channel\|>analysis\s{0,8}<\|message\|>",
        close_pattern=r"<\|end\|>",
    ),
    calls=Calls(
        open=_HARMONY_START
        + r"<\|channel\|>(?:commentary|analysis) ?to=|<\|start\|>assistant\s{0,2}to=| ?to=functions\.",
        close="<|end|>",
        head=r"(?:functions\.)?(?P<name>[^\s<{]{1,256})\s{0,8}(?:<\|channel\|>(?:commentary|analysis))?"
        + _HARMONY_TYPE
        + r"\s{0,8}\{",
        between=None,
        before="<|channel|>commentary to=functions.",
        middle=" <|constrain|>json<|message|>",
        after="",
        trigger="<|channel|>commentary to=",
    ),
    extra={
        ANSWER: {
            "open_pattern": _HARMONY_START + rf"(?:<\|channel\|>(?:final|commentary){_HARMONY_TYPE}|<\|message\|>)",
            "close": "<|end|>",
            **_TEXT,
        }
    },
)

# DeepSeek's marks, with its own bar and space.
_ALL, _CLOSE_ALL, _ONE, _CLOSE_ONE, _SEP = (
    f"<\uff5ctool\u2581{name}\uff5c>"
    for name in ("calls\u2581begin", "calls\u2581end", "call\u2581begin", "call\u2581end", "sep")
)

_DEEPSEEK_CALLS = Calls(
    open=rf"\s{{0,8}}{_ALL}",
    close=_CLOSE_ALL,
    head=rf"[\s`]{{0,8}}(?:{_CLOSE_ONE})?\s{{0,8}}{_ONE}\s{{0,8}}(?:function{_SEP})?(?P<name>[^\s<`{{]{{1,256}})\s{{0,8}}"
    rf"(?:{_SEP}|```(?:json)?)\s{{0,8}}\{{",
    begin=_ALL,
    end=_CLOSE_ALL,
    between="\n",
    before=f"{_ONE}function{_SEP}",
    middle="\n```json\n",
    after=f"\n```{_CLOSE_ONE}",
    trigger=_ALL,
)

DEEPSEEK = OutputFormat(
    name="deepseek",
    signs=((_ALL, "```json"),),
    markers=(_ALL, _CLOSE_ALL, _ONE, _CLOSE_ONE, _SEP, "<think>", "</think>"),
    think=_THINK,
    calls=_DEEPSEEK_CALLS,
)

# DeepSeek since version 3.1.
DEEPSEEK_SEP = OutputFormat(
    name="deepseek-sep",
    signs=((_ALL,),),
    markers=DEEPSEEK.markers,
    think=_THINK,
    calls=replace(_DEEPSEEK_CALLS, between="", before=_ONE, middle=_SEP, after=_CLOSE_ONE),
)

# Reasoning in tags, without a format of calls.
THINK = OutputFormat(name="think", signs=(("</think>",),), markers=("<think>", "</think>"), think=_THINK)

# In the order in which a chat template is compared with their signs.
FORMATS = (DEEPSEEK, DEEPSEEK_SEP, HARMONY, GEMMA, MISTRAL_ARGS, MISTRAL, QWEN_CODER, GLM, HERMES, LLAMA, THINK)


def find_format(template: str) -> OutputFormat | None:
    for found in FORMATS:
        if any(all(sign in template for sign in group) for group in found.signs):
            think = found.think
            is_used = think is not None and (think.open in template or think.close in template)
            return found if is_used else replace(found, think=None)
    return None


def unknown_calls() -> str:
    names = ", ".join(known.name for known in FORMATS if known.calls is not None)
    return (
        "this model's chat template writes calls in a format that is not known. Known are "
        f"{names}. A format that is written into the prompt works with any model (--tool-format json)"
    )
