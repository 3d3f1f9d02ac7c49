"""Chat templates: Jinja programs in model folders that format a conversation as in the model's training.

They come with downloaded models, so they run in Jinja's sandbox, without access to Python objects.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from skipjoin.model.config import ModelError

logger = logging.getLogger(__name__)


def find_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The template's source: chat_template.jinja, or an entry of tokenizer_config.json (`settings`)."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return read_template(file)
    value = settings.get("chat_template")
    if isinstance(value, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in value}
        value = named.get("default")
    return value if isinstance(value, str) else None


def read_template(file: Path) -> str:
    """The source of a template file. Raises `ModelError` if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"the chat template {file} cannot be read: {error}") from error


class ChatTemplate:
    """A compiled template. `special`: texts of special tokens by name ("bos_token"), visible to it."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """Raises `ModelError` for a template that does not compile."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationMarks]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        self._special = dict(special)
        self._failures: set[type[Exception]] = set()  # those that the log has
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ModelError(f"the chat template does not compile: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The conversation as text. Raises `ModelError` with the template's message if it rejects the conversation.

        Where the template itself fails, the message says no more than that: the exception, which may have any text, is
        the error's cause, and the log has the first one of each type.
        """
        context = {"tools": None, "documents": None, **self._special, **variables}
        try:
            return self._template.render(messages=messages, **context)
        except TemplateError as error:
            raise ModelError(f"the model's chat template rejects this conversation: {error}") from error
        except Exception as error:
            if type(error) not in self._failures:
                self._failures.add(type(error))
                logger.warning("the model's chat template fails on a conversation: %r", error)
            raise ModelError("the model's chat template fails on this conversation") from error


class _GenerationMarks(Extension):
    """`{% generation %}` marks the assistant's words for training; rendering outputs only its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Replaces Jinja's own filter, which escapes for HTML and would change the model's input."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
