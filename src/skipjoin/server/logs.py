"""The server's log, on standard error: one form for its own processes and what they import.

A record may have `fields` (`extra={"fields": {...}}`): text has them as name=value, JSON as members of the object.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# From which the engine's processes know the form, as they inherit the environment.
_LEVEL, _FORM = "SKIPJOIN_LOG_LEVEL", "SKIPJOIN_LOG_FORMAT"
_spell: Callable[[str], str] = str


class TextFormatter(logging.Formatter):
    """A line of text with its time."""

    def __init__(self) -> None:
        super().__init__(_TEXT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base's name
        fields = "".join(f" {name}={_shown(value)}" for name, value in _fields(record).items())
        return super().formatMessage(record) + fields


class JsonFormatter(logging.Formatter):
    """A JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(level: str, form: str, spell: Callable[[str], str] = str) -> None:
    """Log from now on, here and in the engine's processes that are started from here.

    level: of what Skipjoin logs; of libraries warnings are shown, or less. form: text or json. spell: makes settings
    in errors what the operator calls them.
    """
    global _spell  # noqa: PLW0603 - as the log's, it is the process's
    _spell = spell
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=max(number, logging.WARNING), handlers=[handler])
    logging.getLogger("skipjoin").setLevel(number)
    os.environ[_LEVEL], os.environ[_FORM] = level, form


def configure_engine() -> None:
    """Log as the process does that has started this one."""
    configure(os.environ.get(_LEVEL, "info"), os.environ.get(_FORM, "text"))


def fail(text: str) -> None:
    """Say why a server does not start, or ends: as every command does, but for a log in JSON."""
    if os.environ.get(_FORM) == "json":
        logging.getLogger(__name__).error(_spell(text))
    else:
        print(f"error: {_spell(text)}", file=sys.stderr, flush=True)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    found: dict[str, Any] = getattr(record, "fields", {})
    return found


def _shown(value: Any) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
