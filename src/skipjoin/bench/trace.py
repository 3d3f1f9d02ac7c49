"""Recorded requests: a CSV file of arrival times and lengths. Errors give the line and column."""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TextIO, cast

from skipjoin.config import ConfigError

TOKEN_COLUMNS = ("prompt_tokens", "output_tokens")


class TraceRow(NamedTuple):
    """One request. arrival_s: seconds, None in a file without arrivals; the tokens are at least 1."""

    arrival_s: float | None
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Trace:
    """The requests of a file, in order. name: the file's name. Either all rows have an arrival or none has."""

    name: str
    rows: tuple[TraceRow, ...]

    @property
    def has_arrivals(self) -> bool:
        """Whether the rows have arrival times."""
        return self.rows[0].arrival_s is not None


def read_trace(path: str | Path) -> Trace:
    """Read a trace from a CSV file, gzipped if the name ends in .gz, with the columns prompt_tokens and output_tokens,
    optionally arrival_s, and any others.

    Either every row has an arrival or none; times must not decrease. Raises `ConfigError` with the line and the column,
    in characters from 1, of the error.
    """
    path = Path(path)
    try:
        with _opened(path) as file:
            rows = tuple(_rows(str(path), file))
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file in UTF-8") from None
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise ConfigError(f"{path}: not a complete gzip file") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    if not rows:
        raise ConfigError(f"{path}: no rows below the header")
    return Trace(path.name, rows)


def _opened(path: Path) -> TextIO:
    # Spreadsheets write a byte order mark first; utf-8-sig drops it.
    if path.suffix == ".gz":
        return cast(TextIO, gzip.open(path, "rt", encoding="utf-8-sig", newline=""))
    return path.open(encoding="utf-8-sig", newline="")


@dataclass(frozen=True, slots=True)
class _Record:
    """One row of cells and its text. line: the number of the text's first line."""

    file: str
    line: int
    cells: list[str]
    text: str

    def error(self, index: int, what: str) -> ConfigError:
        """The error for the cell at `index`, with the position of its first character."""
        before = self.text[: self._start(index)]
        line = self.line + before.count("\n")
        column = len(before) - before.rfind("\n")
        return ConfigError(f"{self.file} line {line}, column {column} {what}, got {self.cells[index]!r}")

    def _start(self, index: int) -> int:
        """The position of a cell's text: after `index` commas outside quotes."""
        start, quoted = 0, False
        for place, character in enumerate(self.text):
            if index == 0:
                break
            if character == '"':
                # Two quotes inside quotes close and reopen them, which leaves the state unchanged.
                quoted = not quoted
            elif character == "," and not quoted:
                index -= 1
                start = place + 1
        return start


def _records(name: str, file: TextIO) -> Iterator[_Record]:
    """The rows of a CSV file that are not blank, each with its position."""
    seen: list[str] = []
    line = 1
    try:
        # Strict: a quote that is never closed is an error, not a cell as long as the file.
        for cells in csv.reader(_noting(file, seen), strict=True):
            if cells:
                yield _Record(name, line, cells, "".join(seen))
            line += len(seen)
            seen.clear()
    except csv.Error as error:
        raise ConfigError(f"{name} line {line}: {error}") from None


def _noting(lines: Iterable[str], seen: list[str]) -> Iterator[str]:
    for line in lines:
        seen.append(line)
        yield line


def _rows(name: str, file: TextIO) -> Iterator[TraceRow]:
    records = _records(name, file)
    header = next(records, None)
    if header is None:
        raise ConfigError(f"{name}: the file is empty")
    arrival, prompt, output = _columns(header)
    previous: TraceRow | None = None
    for record in records:
        if len(record.cells) != len(header.cells):
            raise ConfigError(
                f"{name} line {record.line}: {len(record.cells)} fields, but the header has {len(header.cells)}"
            )
        row = TraceRow(
            _arrival(record, arrival, previous),
            _tokens(record, prompt, "prompt_tokens"),
            _tokens(record, output, "output_tokens"),
        )
        yield row
        previous = row


def _columns(header: _Record) -> tuple[int | None, int, int]:
    """The indexes of arrival_s (None: missing), prompt_tokens and output_tokens."""
    names = [cell.strip() for cell in header.cells]
    place = f"{header.file} line {header.line}"
    needed = list(TOKEN_COLUMNS)
    if any("arrival" in name.lower() for name in names):
        # A misspelt arrival_s would be ignored, and the arrival times replaced by drawn ones.
        needed.append("arrival_s")
    for column in needed:
        if names.count(column) > 1:
            raise ConfigError(f"{place}: two columns are named {column}")
        if column not in names:
            raise ConfigError(f"{place}: no column {column}; the columns are {', '.join(names)}")
    prompt, output = map(names.index, TOKEN_COLUMNS)
    return names.index("arrival_s") if "arrival_s" in names else None, prompt, output


def _arrival(record: _Record, index: int | None, previous: TraceRow | None) -> float | None:
    if index is None:
        return None
    text = record.cells[index].strip()
    if previous is not None and (previous.arrival_s is None) != (not text):
        raise record.error(index, "(arrival_s): either every row has an arrival or none; the row before differs")
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise record.error(index, "(arrival_s): must be a number of seconds of at least 0")
    if previous is not None and previous.arrival_s is not None and seconds < previous.arrival_s:
        raise record.error(index, f"(arrival_s): must not be before the previous row's {previous.arrival_s:g}")
    return seconds


def _tokens(record: _Record, index: int, column: str) -> int:
    try:
        tokens = int(record.cells[index])
    except ValueError:
        tokens = 0
    if tokens < 1:
        raise record.error(index, f"({column}): must be an integer of at least 1")
    return tokens
