from __future__ import annotations

import json
import logging
import signal
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from skipjoin.formats.table import find_format
from skipjoin.formats.template_input import NO_CONTENT, TemplateInput, find_input, has_late_systems, regrouped, text_of
from skipjoin.model import template_program as program
from skipjoin.model.errors import ModelError
from skipjoin.model.frame_process import ENDED, FrameProcess
from skipjoin.model.settings_files import read_json

# Started by path and without this package, see `template_program`. -P keeps modules in its folder from shadowing other
# packages.
_COMMAND = (sys.executable, "-P", program.__file__)
# Seconds after which a process that uses no CPU, such as a stopped one, is killed. A busy machine may delay a process
# for seconds.
_MAX_WAIT_S = 30.0

logger = logging.getLogger(__name__)


class Sources(NamedTuple):
    """Texts of templates: for conversations without tools, and the model's own for those with tools."""

    default: str
    tool_use: str | None = None


def find_template(folder: Path, settings: Mapping[str, Any]) -> Sources | None:
    value = settings.get("chat_template")
    if isinstance(value, list):
        value = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
    found = dict(value) if isinstance(value, dict) else {"default": value}
    files = {"default": folder / "chat_template.jinja", "tool_use": folder / "additional_chat_templates/tool_use.jinja"}
    found |= {name: read_template(file) for name, file in files.items() if file.is_file()}
    # That of a processor, which older models that see or hear have in its stead.
    if found.get("default") is None and (processor := folder / "chat_template.json").is_file():
        found["default"] = read_json(processor).get("chat_template")
    default, tool_use = (text if isinstance(text := found.get(name), str) else None for name in files)
    return None if default is None else Sources(default, tool_use)


def read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"the chat template {file} cannot be read: {error}") from error


class ChatTemplate:
    """Template that `template_program` renders in a process with limits; `source` has the one with tools, too."""

    def __init__(self, source: str, special: Mapping[str, str], with_tools: str | None = None) -> None:
        self.default = source
        self.source = source if with_tools is None else f"{source}\n{with_tools}"
        self._special = dict(special)
        self._failures: set[str] = set()  # failures that were logged
        self._renderer = _Renderer(source)
        self._tool_renderer = self._renderer if with_tools is None else _Renderer(with_tools)
        for renderer in (self._renderer, self._tool_renderer):
            weakref.finalize(self, renderer.close)

    def check(self) -> None:
        for renderer in (self._renderer, self._tool_renderer):
            self._input(renderer)

    @property
    def input(self) -> TemplateInput:
        return self._input(self._renderer)

    @property
    def variables(self) -> frozenset[str]:
        return self._renderer.variables() | self._tool_renderer.variables()

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Return the conversation, in OpenAI's form, as text. Releases the GIL.

        Raises:
            ModelError: If the template rejects the conversation, fails or reaches a limit.
            MessageError: If the template does not support a message.
        """
        renderer = self._tool_renderer if variables.get("tools") else self._renderer
        if not self._input(renderer).keeps_systems and has_late_systems(messages):
            messages = regrouped(messages)
            self._log_once("systems", "loses system messages after the first, which are regrouped")
        kind, answer = self._ask(renderer, messages, variables)
        if kind == program.REJECTED:
            for has_system in (True, False):
                other = regrouped(messages, has_system=has_system)
                kind_so, text = self._ask(renderer, other, variables) if other != list(messages) else (kind, answer)
                if kind_so == program.TEXT:
                    self._log_once("regrouped", "rejects a conversation, whose messages are regrouped")
                    return text.decode()
        if kind != program.TEXT:
            self._refuse(kind, answer)
        return answer.decode()

    def _ask(
        self, renderer: _Renderer, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> tuple[int, bytes]:
        form = self._input(renderer)
        kind, answer = renderer.ask(self._content(form.messages(messages), variables))
        if kind == program.FAILED and _lacks_content(messages):
            # The template reads the text of calls where short conversations do not show it.
            for other in NO_CONTENT:
                if kind == program.FAILED and other != form.no_content:
                    messages_so = replace(form, no_content=other).messages(messages)
                    kind, answer = renderer.ask(self._content(messages_so, variables))
        return kind, answer

    def _content(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> bytes:
        context = {"tools": None, "documents": None, **self._special, "messages": messages, **variables}
        try:
            return json.dumps(context, default=_plain).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ModelError(f"messages must be of JSON values: {error}") from error

    def _input(self, renderer: _Renderer) -> TemplateInput:
        if renderer.input is None:

            def render(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str | None:
                given = {"tools": tools, "add_generation_prompt": True}
                kind, answer = renderer.ask(self._content(messages, given))
                if kind not in (program.TEXT, program.REJECTED, program.FAILED):
                    raise _LimitError
                return answer.decode() if kind == program.TEXT else None

            renderer.start()
            try:
                found = find_input(render)
            except _LimitError:
                found = TemplateInput()
            known = find_format(self.source)
            calls = None if known is None else known.calls
            renderer.input = replace(found, id_length=None if calls is None else calls.id_length)
        return renderer.input

    def close(self) -> None:
        for renderer in (self._renderer, self._tool_renderer):
            renderer.close()

    def _refuse(self, kind: int, answer: bytes) -> NoReturn:
        said = answer.decode()
        if kind == program.REJECTED:
            raise ModelError(f"the model's chat template rejects this conversation: {said}")
        limit = _LIMITS.get(kind)
        self._log_once(limit or said.partition("(")[0], f"fails on a conversation: {limit or said}")
        raise ModelError(f"the model's chat template fails on this conversation{f': {limit}' if limit else ''}")

    def _log_once(self, failure: str, what: str) -> None:
        if failure not in self._failures:
            self._failures.add(failure)
            logger.warning("the model's chat template %s", what)


class _LimitError(Exception):
    pass


def _lacks_content(messages: Sequence[Mapping[str, Any]]) -> bool:
    return any(message.get("tool_calls") and not text_of(message.get("content")) for message in messages)


# In addition to the kinds of `template_program`: the kernel killed its process.
_OUT_OF_TIME = ENDED - 1
_LIMITS = {
    _OUT_OF_TIME: f"it takes more than {program.MAX_CPU_S:g} s of processor time",
    program.OUT_OF_MEMORY: f"it needs more than {program.MAX_MEMORY_BYTES >> 20} MiB of memory",
    program.TOO_LONG: f"its text has more than {program.MAX_TEXT_BYTES >> 20} MiB",
}


class _Renderer:
    def __init__(self, source: str) -> None:
        self.input: TemplateInput | None = None
        self._source = source
        self._process = FrameProcess(_COMMAND, _MAX_WAIT_S)
        self._lock = threading.Lock()
        self._variables: frozenset[str] = frozenset()

    def variables(self) -> frozenset[str]:
        if not self._variables:
            self.start()
        return self._variables

    def start(self) -> None:
        with self._lock:
            self._start()

    def ask(self, content: bytes) -> tuple[int, bytes]:
        with self._lock:
            self._start()
            return self._noted(self._process.ask(content))

    def close(self) -> None:
        with self._lock:
            self._process.end()

    def _start(self) -> None:
        if (answer := self._process.start(json.dumps(self._source).encode())) is None:
            return
        kind, said = self._noted(answer)
        if kind != program.TEXT:
            self._process.end()
            raise ModelError(f"the chat template does not compile: {_LIMITS.get(kind) or said.decode()}")
        self._variables = frozenset(json.loads(said))

    def _noted(self, answer: tuple[int, bytes]) -> tuple[int, bytes]:
        kind, said = answer
        if kind == program.OUT_OF_MEMORY:  # the interpreter may keep the memory
            self._process.end()
        if kind == ENDED:
            is_late = int(said) == -signal.SIGPROF
            return (_OUT_OF_TIME, b"") if is_late else (ENDED, b"its process ended: " + said)
        return answer


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no JSON value")
