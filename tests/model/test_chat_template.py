"""Hostile chat templates fail promptly, and the caller continues."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from skipjoin.model import chat_template as module
from skipjoin.model.chat_template import ChatTemplate
from skipjoin.model.config import ModelError

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
    process = template._renderer._process
    assert process is not None
    return psutil.Process(process.pid)


def test_exited_processes_are_replaced_and_stopped_ones_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("<{{ messages[0].content }}>", {})
    template.check()
    process_of(template).kill()
    psutil.wait_procs([process_of(template)])
    assert template.render(user("hello")) == "<hello>"
    monkeypatch.setattr(module, "_MAX_WAIT_S", 0.1)
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
        "print(t._renderer._process.pid, flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        process = psutil.Process(int(owner.stdout.readline()))
        os.kill(owner.pid, signal.SIGKILL)
    gone, _ = psutil.wait_procs([process], timeout=30)
    assert gone


def test_messages_that_are_not_json_are_rejected() -> None:
    template = ChatTemplate("x", {})
    with pytest.raises(ModelError, match="messages must be of JSON values: object is no JSON value"):
        template.render([{"role": "user", "content": object()}])
