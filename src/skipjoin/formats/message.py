from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from skipjoin.formats.calls import CallsReader, Part
from skipjoin.formats.table import CALLS, REASONING, OutputFormat

if TYPE_CHECKING:
    import regex


def load_parser() -> None:
    """Import the parser of transformers, which takes two seconds and does not import torch."""
    import transformers.utils.chat_parsing  # noqa: PLC0415, F401 - servers of other models never need it


def is_thinking(output_format: OutputFormat, prompt: str) -> bool:
    think = output_format.think
    return think is not None and prompt.rstrip().endswith(think.open.rstrip())


def new_call_id(output_format: OutputFormat) -> str:
    length = None if output_format.calls is None else output_format.calls.id_length
    return f"call_{secrets.token_hex(12)}" if length is None else secrets.token_hex(length)[:length]


class MessageReader:
    """Splits one message into content, reasoning and tool calls while it is generated.

    The joined parts do not depend on how the text is cut. Output that does not follow the format is content unless it
    is a call. `schemas` are those of the functions' arguments, for formats that do not write JSON.
    """

    def __init__(
        self,
        output_format: OutputFormat,
        *,
        reads_calls: bool,
        is_thinking: bool,
        new_id: Callable[[], str] | None = None,
        schemas: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    ) -> None:
        from transformers.utils.chat_parsing import ResponseParser  # noqa: PLC0415 - see `load_parser`

        self._calls = output_format.calls if reads_calls else None
        self.has_reasoning = output_format.think is not None
        self._new_id, self._schemas = new_id or partial(new_call_id, output_format), schemas
        think = output_format.think
        self._parser = ResponseParser(
            output_format.response_template(reads_calls=reads_calls),
            prefix=think.open if is_thinking and think is not None else "",
        )
        self._count = 0
        self._joint = output_format.joint
        # Fields that had text, and that which begins again.
        self._had: set[str] = set()
        self._again = ""
        self._reader: CallsReader | None = None
        self._is_region = False  # `_reader` reads a region, not a message that may be a bare call
        self._is_finished = False
        self._is_resumed = False  # the region of `_reader` was closed within its arguments
        self._closing = "" if self._calls is None else self._calls.close or ""
        self._space = ""  # white space after calls, shown only before text
        if self._calls is not None and self._calls.is_bare:
            self._reader = self._new_reader()

    @property
    def has_calls(self) -> bool:
        return self._count > 0

    def feed(self, text: str) -> list[Part]:
        return self._read(self._parser.feed(text))

    def finish(self) -> list[Part]:
        self._is_finished = True
        parts = self._read(self._parser.finalize()[1])
        if self._reader is not None:
            parts += self._close()
        return parts

    def _read(self, events: list[dict[str, Any]]) -> list[Part]:
        parts: list[Part] = []
        for event in events:
            kind, field = event["type"], event["field"]
            if kind == "region_chunk":
                parts += self._take(field, self._joined(field, event["text"]))
            elif field != CALLS:
                self._again = field if kind == "region_open" and field in self._had else ""
            elif field == CALLS and not self._is_resumed:
                parts += self._open() if kind == "region_open" else self._end_region()
        return parts

    def _joined(self, field: str, text: str) -> str:
        """Return text of a field with what separates it from an earlier message of the same kind."""
        is_again, self._again = bool(text) and field == self._again, "" if text else self._again
        if text:
            self._had.add(field)
        return self._joint + text if is_again else text

    def _take(self, field: str, text: str) -> list[Part]:
        if field == REASONING:
            return [Part(text, is_reasoning=True)]
        reader = self._reader
        if reader is None:
            return self._content(text)
        parts = reader.feed(text)
        self._count = reader.count
        if field != CALLS and not self.has_calls and reader.is_other:  # not a bare call
            self._reader = None
            parts += self._content(reader.held)
        elif self._is_resumed and (rest := reader.after(self._closing)) is not None:
            self._reader, self._is_resumed = None, False
            parts += self._content(rest)
        return parts

    def _open(self) -> list[Part]:
        before = [] if self._reader is None else self._close()
        self._reader, self._is_region = self._new_reader(), True
        return before

    def _end_region(self) -> list[Part]:
        """Close a region, unless its closing mark is within a string of the arguments."""
        assert self._reader is not None
        assert self._calls is not None
        if self._reader.is_in_arguments and not (self._calls.has_own_strings or self._is_finished):
            self._is_resumed = True
            return self._reader.feed(self._closing)
        return self._close()

    def _close(self) -> list[Part]:
        assert self._reader is not None
        assert self._calls is not None
        reader, self._reader = self._reader, None
        if not (self._is_region or self.has_calls):
            return self._content(reader.held)
        parts = reader.close(self._calls.trigger, "" if self._is_finished else self._closing)
        self._count = reader.count
        return self._show(parts)

    def _new_reader(self) -> CallsReader:
        assert self._calls is not None
        return CallsReader(self._calls, _head(self._calls.head), self._count, self._new_id, self._schemas)

    def _show(self, parts: list[Part]) -> list[Part]:
        shown = []
        for part in parts:
            shown += self._content(part.text) if part.call is None else [part]
        return shown

    def _content(self, text: str) -> list[Part]:
        if not self.has_calls:
            return [Part(text)] if text else []
        self._space += text
        if not self._space.strip():
            return []
        text, self._space = self._space, ""
        return [Part(text)]


@lru_cache(maxsize=64)
def _head(pattern: str) -> regex.Pattern[str]:
    import regex  # noqa: PLC0415 - see `load_parser`

    return regex.compile(pattern)
