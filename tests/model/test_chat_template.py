from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from skipjoin.formats.template_input import MessageError
from skipjoin.model.chat_template import ChatTemplate
from skipjoin.model.errors import ModelError

# `it` is 1 at run time, so that the compiler cannot evaluate a case itself.
HOSTILE = {
    "repeat": "{{ 'x' * (it * 10**10) }}",
    "center": "{{ 'x'|center(it * 10**10) }}",
    "method": "{{ 'x'.ljust(it * 10**10) }}",
    "indent": "{{ messages|tojson(indent=it * 10**10) }}",
    "percent": "{{ '%1000000000d' % it }}",
    "format": "{{ '{:>10000000000}'.format(it) }}",
    "power": "{% set n = 9**(it * 10**10) %}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "text": "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = [n.x, n.x]|join %}{% endfor %}",
    "list": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "shared": "{% set n = namespace(x=[1]) %}{% for i in range(90) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "long": "{{ 'x' * (it * 40 * 1024 * 1024) }}",
    "message": "{{ raise_exception('x' * (it * 10**7)) }}",
}
CHOICE = "{% set it = messages|length %}{% set case = messages[0].content %}" + "".join(
    f"{{% if case == '{name}' %}}{source}{{% endif %}}" for name, source in HOSTILE.items()
)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def hostile() -> Iterator[ChatTemplate]:
    template = ChatTemplate(CHOICE + "<{{ case }}>", {})
    template.check()
    yield template
    template.close()


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_templates_fail_without_harming_the_caller(hostile: ChatTemplate, case: str) -> None:
    begin, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(
        ModelError, match=r"the model's chat template (fails on|rejects) this conversation: "
    ) as refused:
        hostile.render(user(case))
    assert len(str(refused.value)) < 2000
    assert time.process_time() - begin < 0.3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
    assert hostile.render(user("next")) == "<next>"


@pytest.mark.parametrize(
    "source",
    ["{{ ('x' * 10**10)|length }}", "{{ 'x'|center(10**10) }}", "{{" + "(" * 50_000 + "1" + ")" * 50_000 + "}}"],
)
def test_templates_that_overload_the_compiler_are_rejected(source: str) -> None:
    """The compiler evaluates constant expressions."""
    template = ChatTemplate(source, {})
    with pytest.raises(ModelError, match=r"chat template (does not compile|fails on this conversation): "):
        template.render(user("hello"))
    template.close()


def process_of(template: ChatTemplate) -> psutil.Process:
    process = template._renderer._process.process
    return psutil.Process(process.pid)


def test_exited_processes_are_replaced_and_stopped_ones_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("<{{ messages[0].content }}>", {})
    template.check()
    process_of(template).kill()
    psutil.wait_procs([process_of(template)])
    assert template.render(user("hello")) == "<hello>"
    monkeypatch.setattr(template._renderer._process, "max_wait_s", 0.1)
    process_of(template).suspend()
    with pytest.raises(ModelError, match="fails on this conversation"):
        template.render(user("hello"))
    monkeypatch.undo()
    assert template.render(user("again")) == "<again>"
    process = process_of(template)
    template.close()
    template.close()
    assert not process.is_running()


def test_the_process_exits_with_its_owner() -> None:
    code = (
        "from skipjoin.model.chat_template import ChatTemplate; t = ChatTemplate('x', {}); t.check();"
        "print(t._renderer._process.process.pid, flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        process = psutil.Process(int(owner.stdout.readline()))
        os.kill(owner.pid, signal.SIGKILL)
    gone, _ = psutil.wait_procs([process], timeout=30)
    assert gone


def test_messages_that_are_not_json_are_rejected() -> None:
    template = ChatTemplate("x", {})
    with pytest.raises(ModelError, match="messages must be of JSON values: object is no JSON value"):
        template.render([{"role": "user", "content": object()}])


CALL = (
    "{% for call in m.tool_calls or [] %}({{ call.function.name }} {{ call.function.arguments | tojson }}){% endfor %}"
)
LOOP = "{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}"
# What a template writes of a message, and of a call without text after "hi".
STYLES = {
    "in": ("{% if '</think>' in m.content %}{% endif %}{{ m.content.strip() }}" + CALL, "hi(f {})"),
    "plus": ("{{ m.content + '' }}" + CALL, "hi(f {})"),
    "printed": ("{{ m.content }}" + CALL, "hi(f {})"),
    "none": ("{% if m.content is none %}" + CALL + "{% else %}[{{ m.content }}]{% endif %}", "[hi](f {})"),
    "absent": ("{% if 'content' in m %}{{ m.content }}{% else %}" + CALL + "{% endif %}", "hi(f {})"),
    "parts": (LOOP + CALL, "hi(f {})"),
    "either": (
        "{% if m.content is string %}{{ m.content }}{% elif m.content %}" + LOOP + "{% endif %}" + CALL,
        "hi(f {})",
    ),
    "parts of users": ("{% if m.role == 'user' %}" + LOOP + "{% else %}{{ m.content }}{% endif %}" + CALL, "hi(f {})"),
    "later": (
        "{% if loop.index > 3 %}{{ m.content + '' }}{% else %}{{ m.content or '' }}{% endif %}" + CALL,
        "hi(f {})",
    ),
    "text": (CALL.replace("arguments | tojson", "arguments + ''") + "{{ m.content or '' }}", "hi(f {})"),
}
NO_TEXT = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]}


@pytest.mark.parametrize("style", STYLES)
def test_messages_are_given_as_templates_expect_them(style: str) -> None:
    body, expected = STYLES[style]
    template = ChatTemplate("{% for m in messages %}" + body + "{% endfor %}", {})
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    for content in ("hi", parts):
        for nothing in ({}, {"content": None}, {"content": ""}):
            found = template.render([{"role": "user", "content": content}, {**NO_TEXT, **nothing}])
            assert found == expected
    for role in ("system", "assistant", "tool"):
        for content in ("hi", parts):
            assert "hi" in template.render([{"role": "user", "content": "a"}, {"role": role, "content": content}])
    long = [{"role": "user", "content": "hi"}, NO_TEXT, {"role": "tool", "content": "r"}, NO_TEXT]
    assert template.render(long).count("(f {})") == 2
    template.close()


def with_arguments(arguments: object) -> list[dict[str, object]]:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    return [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": calls}]


@pytest.mark.parametrize(
    ("written", "cut"),
    [
        ("arguments | tojson", '"{\\"a\\": "'),
        ("arguments + ''", '{"a": '),
        ("arguments if call.function.arguments is string else call.function.arguments | tojson", '{"a": '),
        ("arguments | items | list | tojson", None),
    ],
)
def test_arguments_are_given_as_templates_expect_them(written: str, cut: str | None) -> None:
    template = ChatTemplate(
        "{% for m in messages %}" + CALL.replace("arguments | tojson", written) + "{% endfor %}", {}
    )
    for empty in ("", " \n", "{}", None, {}):
        assert template.render(with_arguments(empty)) == ("(f [])" if cut is None else "(f {})")
    if cut is not None:
        assert template.render(with_arguments('{"a": ')) == f"(f {cut})"
    for wrong in ('{"a": ', "[1]", "null") if cut is None else ():
        with pytest.raises(MessageError, match=r"messages\.1\.tool_calls\.0\.function\.arguments must be a JSON"):
            template.render(with_arguments(wrong))
    template.close()


def test_reasoning_has_the_names_that_templates_read() -> None:
    template = ChatTemplate("{{ messages[0] | tojson }}", {})
    for name in ("reasoning", "reasoning_content", "thinking"):
        found = json.loads(template.render([{"role": "assistant", "content": "a", name: "hm"}]))
        assert found["reasoning_content"] == found["reasoning"] == found["thinking"] == "hm"
    template.close()


ALTERNATING = (
    "{% for m in messages %}{% if m.role == 'system' and (not loop.first or FORBIDDEN) %}"
    "{{ raise_exception('a system message here') }}{% endif %}"
    "{% if not loop.first and m.role == messages[loop.index0 - 1].role %}{{ raise_exception('twice') }}{% endif %}"
    "[{{ m.role }}:{{ m.content }}]{% endfor %}"
)
# As coding agents send them: two messages with rules, context before the question, and a note after it.
AGENT = [
    {"role": "developer", "content": "Rules."},
    {"role": "system", "content": [{"type": "text", "text": "Skills."}]},
    {"role": "user", "content": "Context."},
    {"role": "user", "content": "Question?"},
    {"role": "system", "content": "Note."},
    {"role": "assistant", "content": "Answer."},
    {"role": "system", "content": "Later."},
    {"role": "user", "content": "More?"},
]
_TURNS = "Context.\n\nQuestion?\n\nNote.][assistant:Answer.][user:Later.\n\nMore?]"


@pytest.mark.parametrize(
    ("forbidden", "expected"),
    [("false", f"[system:Rules.\n\nSkills.][user:{_TURNS}"), ("true", f"[user:Rules.\n\nSkills.\n\n{_TURNS}")],
)
def test_messages_are_regrouped_for_a_template_that_rejects_their_order(forbidden: str, expected: str) -> None:
    template = ChatTemplate(ALTERNATING.replace("FORBIDDEN", forbidden), {})
    assert template.render(AGENT) == expected
    plain = [message | {"role": role} for message, role in zip(AGENT[2:6:3], ("user", "assistant"), strict=True)]
    assert template.render(plain) == "[user:Context.][assistant:Answer.]"
    with pytest.raises(ModelError, match="rejects this conversation: twice"):
        template.render([{"role": "tool", "tool_call_id": "a", "content": "1"}] * 2)
    template.close()


def test_a_template_that_takes_any_order_gets_the_messages_as_sent() -> None:
    template = ChatTemplate("{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}", {})
    assert template.render(AGENT).count("[") == len(AGENT)
    template.close()


# As gpt-oss: one call a message, whose analysis is its text or its reasoning, and one message of the system.
CHANNELS = (
    "{% for m in messages %}{% if 'tool_calls' in m %}"
    "{% if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}[{{ m.content or m.thinking }}]"
    "{% set f = m.tool_calls[0].function %}({{ f.name }} {{ f.arguments | tojson }})"
    "{% elif m.role != 'system' or loop.first %}[{{ m.content }}]{% endif %}{% endfor %}"
)


def test_nothing_is_lost_in_templates_with_one_call_a_message() -> None:
    template = ChatTemplate(CHANNELS, {})
    calls = [{"id": name, "function": {"name": name, "arguments": "{}"}} for name in "fg"]
    called = {"role": "assistant", "content": "Wait.", "reasoning_content": "Hm.", "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": name, "content": name.upper()} for name in "gf"]
    start = [{"role": "user", "content": "a"}, called, *results]
    later = [{"role": "assistant", "content": "b", "tool_calls": None}, {"role": "system", "content": "c"}]
    found = template.render([*start, *later, {"role": "user", "content": "d"}])
    assert found == "[a][Hm.\n\nWait.](f {})[F][](g {})[G][b][c\n\nd]"
    template.close()
