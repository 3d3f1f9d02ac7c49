"""Recorded requests: a CSV or JSONL file of lengths, and perhaps arrival times and prompts. Errors give the line and
column."""

from __future__ import annotations

import gzip
import math
import re
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TextIO, cast

from skipjoin.bench.trace_lines import Line, csv_lines, json_lines
from skipjoin.config import ConfigError

_WORD_OR_MARK = re.compile(r"\w+|[^\w\s]")


class TraceRow(NamedTuple):
    """One request. arrival_s: seconds, None in a file without arrivals; the tokens are at least 1. prompt: its text;
    None in a file without texts."""

    arrival_s: float | None
    prompt_tokens: int
    output_tokens: int
    prompt: str | None = None


@dataclass(slots=True)
class Column:
    """The numbers of a column, one per row. error: what is wrong with the first cell that is not a number; empty:
    there is none."""

    values: array[float]
    error: str = ""


@dataclass(frozen=True)
class Trace:
    """The requests of a file, in order. name: the file's name. Either all rows have an arrival or none has, and so with
    prompts. columns: all that the file has, by name."""

    name: str
    rows: tuple[TraceRow, ...]
    columns: Mapping[str, Column] = field(default_factory=dict, repr=False, compare=False)

    @property
    def has_arrivals(self) -> bool:
        """Whether the rows have arrival times."""
        return self.rows[0].arrival_s is not None

    @property
    def has_texts(self) -> bool:
        """Whether the rows have the texts of their prompts."""
        return self.rows[0].prompt is not None

    def check_texts(self) -> None:
        """Raise `ConfigError` for a trace without texts."""
        if not self.has_texts:
            raise ConfigError(f"{self.name} has no texts: a trace that has them is JSONL with a prompt in each line")

    def column(self, name: str) -> Sequence[float]:
        """The numbers that the file has in a column, by row. Raises `ConfigError` where there is no such column, naming
        those that there are, and for a cell that is not a number, with its place."""
        found = self.columns.get(name)
        if found is None:
            known = ", ".join(other for other, one in self.columns.items() if not one.error)
            raise ConfigError(f"{self.name}: no column {name}; the columns of numbers are {known}")
        if found.error:
            raise ConfigError(found.error)
        return found.values


def read_trace(path: str | Path) -> Trace:
    """Read a trace from a CSV file, or a JSONL file if the name ends in .jsonl; gzipped if it ends in .gz besides.

    CSV has the columns prompt_tokens and output_tokens, optionally arrival_s. JSONL has an object on each line with the
    texts prompt and output, or output_tokens instead of output, optionally prompt_tokens and arrival_s. Lengths that it
    does not give are the numbers of words and punctuation marks in the texts: a tokenizer makes more of the same text,
    by a factor that is not guessed here. Either format may have context_tokens, all that the model reads for a row, of
    which prompt_tokens is the last part; then it is the length of the request's prompt. Other columns are kept.

    Either every row has an arrival or none; times must not decrease. Raises `ConfigError` with the line and the column
    of the error; in CSV a column is told in characters from 1.
    """
    path = Path(path)
    try:
        with _opened(path) as file:
            rows, columns = _read(_lines(path, file))
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file in UTF-8") from None
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise ConfigError(f"{path}: not a complete gzip file") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    if not rows:
        raise ConfigError(f"{path}: no rows{'' if _is_json(path) else ' below the header'}")
    return Trace(path.name, rows, columns)


def count_words(text: str) -> int:
    """Words and punctuation marks of a text: what it counts for where its tokens are not known."""
    return len(_WORD_OR_MARK.findall(text))


def _opened(path: Path) -> TextIO:
    # Spreadsheets write a byte order mark first; utf-8-sig drops it.
    if path.suffix == ".gz":
        return cast(TextIO, gzip.open(path, "rt", encoding="utf-8-sig", newline=""))
    return path.open(encoding="utf-8-sig", newline="")


def _is_json(path: Path) -> bool:
    return path.name.removesuffix(".gz").endswith(".jsonl")


def _lines(path: Path, file: TextIO) -> Iterable[Line]:
    return json_lines(str(path), file) if _is_json(path) else csv_lines(str(path), file)


def _read(lines: Iterable[Line]) -> tuple[tuple[TraceRow, ...], dict[str, Column]]:
    rows: list[TraceRow] = []
    columns: dict[str, Column] = {}
    for line in lines:
        rows.append(_row(line, rows[-1] if rows else None))
        _add_numbers(columns, line, first=len(rows) == 1)
    return tuple(rows), columns


def _row(line: Line, previous: TraceRow | None) -> TraceRow:
    prompt = line.text("prompt")
    if previous is not None and (previous.prompt is None) != (prompt is None):
        raise line.error("prompt", "either every row has a prompt or none; the row before differs")
    tokens = _tokens(line, "prompt_tokens", "prompt")
    if line.cell("context_tokens") is not None:
        tokens = _integer(line, "context_tokens", tokens)
    return TraceRow(_arrival(line, previous), tokens, _tokens(line, "output_tokens", "output"), prompt)


def _arrival(line: Line, previous: TraceRow | None) -> float | None:
    cell = line.cell("arrival_s")
    if previous is not None and (previous.arrival_s is None) != (cell is None):
        raise line.error("arrival_s", "either every row has an arrival or none; the row before differs")
    if cell is None:
        return None
    seconds = _number(cell)
    if not 0 <= seconds < math.inf:
        raise line.error("arrival_s", "must be a number of seconds of at least 0")
    if previous is not None and previous.arrival_s is not None and seconds < previous.arrival_s:
        raise line.error("arrival_s", f"must not be before the previous row's {previous.arrival_s:g}")
    return seconds


def _tokens(line: Line, column: str, text_column: str) -> int:
    """The tokens that a column says, or the words of a text where it says none."""
    if line.cell(column) is not None or (text := line.text(text_column)) is None:
        return _integer(line, column, 1)
    words = count_words(text)
    if not words:
        raise line.error(text_column, f"must have a word or a mark, where there is no {column}")
    return words


def _integer(line: Line, column: str, least: int) -> int:
    cell = line.cell(column)
    try:
        number = int(cell) if isinstance(cell, str) else cell
    except ValueError:
        number = None
    # True counts as 1 in Python.
    if not isinstance(number, int) or isinstance(number, bool) or number < least:
        raise line.error(column, f"must be an integer of at least {least}")
    return number


def _number(cell: object) -> float:
    """What a cell says; not a number (NaN) where it is none."""
    try:
        return math.nan if isinstance(cell, bool) else float(cell)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _add_numbers(columns: dict[str, Column], line: Line, *, first: bool) -> None:
    """Add a row to the columns. first: whether it is the first row."""
    for name in [name for name in line.columns if name not in columns]:
        columns[name] = Column(array("d"), "" if first else str(line.error(name, "the rows before have none")))
    for name, column in columns.items():
        if not column.error:
            number = _number(line.cell(name))
            column.values.append(number)
            column.error = "" if math.isfinite(number) else str(line.error(name, "must be a number"))
