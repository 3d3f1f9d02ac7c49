"""Logging to standard error, in one format for all processes; `extra={"fields": {...}}` has a record's fields."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# Engine processes inherit the settings in these environment variables.
_LEVEL, _FORM = "SKIPJOIN_LOG_LEVEL", "SKIPJOIN_LOG_FORMAT"
_spell: Callable[[str], str] = str


class TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__(_TEXT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base's name
        fields = "".join(f" {name}={_shown(value)}" for name, value in _fields(record).items())
        return super().formatMessage(record) + fields


class JsonFormatter(logging.Formatter):
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
    """Configure logging in this process and in engine processes that it starts.

    `spell` converts setting names in errors to the operator's names for them.
    """
    global _spell  # noqa: PLW0603 - as the log's, it is the process's
    _spell = spell
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=max(number, logging.WARNING), handlers=[handler])
    logging.getLogger("skipjoin").setLevel(number)
    if form == "json":
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
        threading.excepthook = _log_uncaught_in_thread
        sys.unraisablehook = _log_unraisable
        # Libraries write these to standard error themselves, also in engine processes.
        os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    os.environ[_LEVEL], os.environ[_FORM] = level, form


def configure_engine() -> None:
    configure(os.environ.get(_LEVEL, "info"), os.environ.get(_FORM, "text"))


def announce(text: str, **fields: Any) -> None:
    """Print a text on standard output, in JSON mode its first line with fields."""
    if os.environ.get(_FORM) == "json":
        first, _, _ = text.partition("\n")
        record = logging.makeLogRecord({"name": __name__, "levelname": "INFO", "msg": first, "fields": fields})
        text = JsonFormatter().format(record)
    try:
        print(text, flush=True)
    except OSError as error:  # such as a full disk
        logging.getLogger(__name__).warning("standard output cannot be written: %s", error.strerror or error)
        sys.stdout = None  # because the interpreter would write the rest when it exits


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger(__name__).critical("uncaught exception", exc_info=(kind, error, trace))


def _log_uncaught_in_thread(what: threading.ExceptHookArgs) -> None:
    if what.exc_value is not None and what.exc_type is not SystemExit:
        _log_uncaught(what.exc_type, what.exc_value, what.exc_traceback)


def _log_unraisable(what: sys.UnraisableHookArgs) -> None:
    if what.exc_value is not None:
        _log_uncaught(what.exc_type, what.exc_value, what.exc_traceback)


def fail(text: str) -> None:
    _report(logging.ERROR, _spell(text))


def warn(text: str) -> None:
    _report(logging.WARNING, text)


def _report(level: int, text: str) -> None:
    if os.environ.get(_FORM) == "json":
        logging.getLogger(__name__).log(level, "%s", text)
    else:
        print(f"{logging.getLevelName(level).lower()}: {text}", file=sys.stderr, flush=True)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    found: dict[str, Any] = getattr(record, "fields", {})
    return found


def _shown(value: Any) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
