from __future__ import annotations

import csv
import json
from collections.abc import Collection, Iterable, Iterator, KeysView, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

from skipjoin.config import ConfigError

TOKEN_COLUMNS = ("prompt_tokens", "output_tokens")
# Alternatives to these in JSONL.
TEXT_COLUMNS = ("prompt", "output")
# Column names of Azure's LLM inference traces (github.com/Azure/AzurePublicDataset).
AZURE_COLUMNS = {"TIMESTAMP": "arrival_s", "ContextTokens": "prompt_tokens", "GeneratedTokens": "output_tokens"}
HASH_IDS = "hash_ids"
# Column names of Mooncake's traces (github.com/kvcache-ai/Mooncake) and of others in the same form.
MOONCAKE_COLUMNS = {"prompt_tokens": "input_length", "output_tokens": "output_length", "arrival_s": "timestamp"}
# Maximum number of characters of a value in an error.
_SHOWN = 60


class Line(Protocol):
    @property
    def columns(self) -> KeysView[str]: ...

    @property
    def has_timestamp(self) -> bool:
        """Whether `arrival_s` is a `timestamp`, whose unit the file does not name."""

    def cell(self, column: str) -> object: ...

    def text(self, column: str) -> str | None:
        """Return a prompt or output, or None; raise `ConfigError` if it is not UTF-8 text."""

    def error(self, column: str, what: str) -> ConfigError: ...


# -- CSV --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CsvLine:
    """CSV row with its source text."""

    file: str
    line: int
    cells: list[str]
    source: str
    places: dict[str, int]  # cell indices of uniquely named columns

    has_timestamp = False

    @property
    def columns(self) -> KeysView[str]:
        return self.places.keys()

    def cell(self, column: str) -> object:
        return self.cells[self.places[column]].strip() or None if column in self.places else None

    def text(self, column: str) -> str | None:
        return None

    def error(self, column: str, what: str) -> ConfigError:
        index = self.places[column]
        before = self.source[: self._start(index)]
        line = self.line + before.count("\n")
        character = len(before) - before.rfind("\n")
        return ConfigError(f"{self.file} line {line}, column {character} ({column}): {what}, got {self.cells[index]!r}")

    def _start(self, index: int) -> int:
        start, quoted = 0, False
        for place, character in enumerate(self.source):
            if index == 0:
                break
            if character == '"':
                # A doubled quote toggles the state twice.
                quoted = not quoted
            elif character == "," and not quoted:
                index -= 1
                start = place + 1
        return start


def csv_lines(name: str, file: TextIO) -> Iterator[CsvLine]:
    records = _records(name, file)
    header = next(records, None)
    if header is None:
        raise ConfigError(f"{name}: the file is empty")
    line, names, _ = header
    if names[0].lstrip()[:1] in ("{", "["):
        raise ConfigError(f"{name}: JSON is read from files whose name ends in .jsonl, with one object in each line")
    places = _places(f"{name} line {line}", [AZURE_COLUMNS.get(cell.strip(), cell.strip()) for cell in names])
    for line, cells, source in records:
        if len(cells) != len(names):
            raise ConfigError(f"{name} line {line}: {len(cells)} fields, but the header has {len(names)}")
        yield CsvLine(name, line, cells, source, places)


def _records(name: str, file: TextIO) -> Iterator[tuple[int, list[str], str]]:
    seen: list[str] = []
    line = 1
    try:
        # Strict: an unclosed quote is an error, instead of one cell up to the end of the file.
        for cells in csv.reader(_noting(file, seen), strict=True):
            if cells:
                yield line, cells, "".join(seen)
            line += len(seen)
            seen.clear()
    except csv.Error as error:
        raise ConfigError(f"{name} line {line}: {error}") from None


def _noting(lines: Iterable[str], seen: list[str]) -> Iterator[str]:
    for line in lines:
        seen.append(line)
        yield line


def _places(header: str, names: list[str]) -> dict[str, int]:
    _check_has(header, names, *TOKEN_COLUMNS)
    for column in (*TOKEN_COLUMNS, "arrival_s"):
        if names.count(column) > 1:
            raise ConfigError(f"{header}: two columns are named {column}")
    return {name: index for index, name in enumerate(names) if name and names.count(name) == 1}


def _check_has(place: str, names: Collection[str], *needed: str) -> None:
    """Raise `ConfigError` for a missing column.

    A column with "arrival" in its name requires `arrival_s`, since arrivals would otherwise be drawn at random.
    """
    times = ["arrival_s"] if any("arrival" in name.lower() for name in names) else []
    for column in (*needed, *times):
        if column not in names:
            raise ConfigError(f"{place}: no column {column}; the columns are {', '.join(names)}")


# -- JSONL ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JsonLine:
    """JSON object on one line."""

    file: str
    line: int
    values: dict[str, Any]
    names: Mapping[str, str]  # columns with different names in the object

    @property
    def columns(self) -> KeysView[str]:
        return self.values.keys()

    @property
    def has_timestamp(self) -> bool:
        return "arrival_s" in self.names

    def cell(self, column: str) -> object:
        return self.values.get(self.names.get(column, column))

    def text(self, column: str) -> str | None:
        found = self.values.get(column)
        if found is not None and not (isinstance(found, str) and _is_utf8(found)):
            raise self.error(column, "must be a text in UTF-8")
        return found

    def error(self, column: str, what: str) -> ConfigError:
        name = self.names.get(column, column)
        shown = json.dumps(self.values.get(name))
        shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
        return ConfigError(f"{self.file} line {self.line} ({name}): {what}, got {shown}")


def json_lines(name: str, file: TextIO) -> Iterator[JsonLine]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            place = f"{name} line {number}"
            values = _object(place, line)
            _check_has(place, values)
            names = _names(values)
            for tokens, text in zip(TOKEN_COLUMNS, TEXT_COLUMNS, strict=True):
                if names.get(tokens, tokens) not in values and text not in values:
                    raise ConfigError(f"{place}: neither {text} nor {tokens}; the columns are {', '.join(values)}")
            yield JsonLine(name, number, values, names)


def _names(values: dict[str, Any]) -> Mapping[str, str]:
    return {column: name for column, name in MOONCAKE_COLUMNS.items() if name in values and column not in values}


def _object(place: str, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{place}, column {error.colno}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError):  # thousands of digits or nested brackets
        raise ConfigError(f"{place}: not JSON that can be read") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{place}: must be an object, got {line.strip()[:_SHOWN]}")
    return found


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
