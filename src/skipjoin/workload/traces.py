"""Recorded requests: a CSV or JSONL file of lengths, and perhaps arrival times and prompts. Errors give the line and
column."""

from __future__ import annotations

import gzip
import math
import re
import zlib
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, TextIO, cast

from skipjoin.config import ConfigError
from skipjoin.core.request import DEFAULT_OPTIONS, RequestOptions, ServiceClass, Target
from skipjoin.options import nearest
from skipjoin.workload.prefixes import HASH_TOKENS, PromptParts
from skipjoin.workload.trace_lines import (
    HASH_IDS,
    MOONCAKE_COLUMNS,
    TEXT_COLUMNS,
    TOKEN_COLUMNS,
    Line,
    csv_lines,
    json_lines,
)

_WORD_OR_MARK = re.compile(r"\w+|[^\w\s]")
# Soft objectives of a row, in seconds; the fields of `Target`.
TARGET_COLUMNS = Target._fields
# What a row asks of the scheduler.
OPTION_COLUMNS = ("deadline_s", "priority", "class", *TARGET_COLUMNS)
# Where a row comes from: nothing follows from it.
LABEL_COLUMNS = ("client", "conv", "id", "model", "split", "src", "turn")
KNOWN_COLUMNS = (
    "arrival_s",
    *TOKEN_COLUMNS,
    "context_tokens",
    *TEXT_COLUMNS,
    HASH_IDS,
    *OPTION_COLUMNS,
    *LABEL_COLUMNS,
)


class TraceRow(NamedTuple):
    """One request. arrival_s: seconds, None in a file without arrivals; the tokens are at least 1. prompt: its text;
    None in a file without texts. options: what it asks of the scheduler. parts: those of the prompt that are named,
    the full ones; None in a file without names."""

    arrival_s: float | None
    prompt_tokens: int
    output_tokens: int
    prompt: str | None = None
    options: RequestOptions = DEFAULT_OPTIONS
    parts: PromptParts | None = None


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

    @property
    def part_tokens(self) -> int | None:
        """Tokens of each part of a prompt that has a name; None: the rows have no names."""
        parts = self.rows[0].parts
        return None if parts is None else parts.tokens

    def has_any(self, *columns: str) -> bool:
        """Whether it has one of these columns."""
        return any(name in self.columns for name in columns)

    def check_columns(self, unread: Collection[str] = ()) -> None:
        """Raise `ConfigError` for a column that is not known: what it asks for would be left out without a word.
        unread: columns that may be left out."""
        for name in self.columns:
            if name not in (*KNOWN_COLUMNS, *MOONCAKE_COLUMNS.values()) and name not in unread:
                hint = nearest(name, KNOWN_COLUMNS)
                raise ConfigError(
                    f"{self.name}: unknown column {name}{hint}; known are {', '.join(KNOWN_COLUMNS)}; "
                    f"--ignore-columns {name} leaves it out"
                )

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


def read_trace(path: str | Path, *, hash_tokens: int | None = HASH_TOKENS) -> Trace:
    """Read a trace from a CSV file, or a JSONL file if the name ends in .jsonl; gzipped if it ends in .gz besides.

    CSV has the columns prompt_tokens and output_tokens, optionally arrival_s. JSONL has an object on each line with the
    texts prompt and output, or output_tokens instead of output, optionally prompt_tokens and arrival_s. Lengths that it
    does not give are the numbers of words and punctuation marks in the texts: a tokenizer makes more of the same text,
    by a factor that is not guessed here. Either format may have context_tokens, all that the model reads for a row, of
    which prompt_tokens is the last part; then it is the length of the request's prompt. Either may have, for all rows
    or for some, deadline_s, priority, class (real-time or best-effort), and the objectives ttft_s, tpot_s and jct_s, in
    seconds. Other columns are kept: see `Trace.check_columns`.

    Either format may have hash_ids, as Mooncake's traces: names of the prompt's parts of `hash_tokens` tokens, the last
    of which may be shorter (None: hash_ids are not read). Equal names are equal text after equal text. In CSV commas or
    blanks separate them. JSONL may have Mooncake's columns timestamp, in milliseconds, input_length and output_length.

    arrival_s is in seconds, or a date and time (ISO 8601, UTC where it names no zone). Either every row has an arrival
    or none; times must not decrease. Raises `ConfigError` with the line and the column
    of the error; in CSV a column is told in characters from 1.
    """
    path = Path(path)
    try:
        with _opened(path) as file:
            rows, columns = _read(_lines(path, file), hash_tokens)
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


def _read(lines: Iterable[Line], hash_tokens: int | None) -> tuple[tuple[TraceRow, ...], dict[str, Column]]:
    rows: list[TraceRow] = []
    columns: dict[str, Column] = {}
    names = _Names(hash_tokens)
    for line in lines:
        rows.append(_row(line, rows[-1] if rows else None, names))
        _add_numbers(columns, line, first=len(rows) == 1)
    return tuple(rows), columns


def _row(line: Line, previous: TraceRow | None, names: _Names) -> TraceRow:
    prompt = line.text("prompt")
    if previous is not None and (previous.prompt is None) != (prompt is None):
        raise line.error("prompt", "either every row has a prompt or none; the row before differs")
    tokens = _tokens(line, "prompt_tokens", "prompt")
    if line.cell("context_tokens") is not None:
        tokens = _integer(line, "context_tokens", tokens)
    output = _tokens(line, "output_tokens", "output")
    parts = names.parts(line, tokens)
    if previous is not None and (previous.parts is None) != (parts is None):
        raise line.error(HASH_IDS, f"either every row has {HASH_IDS} or none; the row before differs")
    return TraceRow(_arrival(line, previous), tokens, output, prompt, _options(line), parts)


def _options(line: Line) -> RequestOptions:
    if all(line.cell(name) is None for name in OPTION_COLUMNS):
        return DEFAULT_OPTIONS
    service = line.cell("class") or ServiceClass.REAL_TIME.value
    if service not in tuple(ServiceClass):
        raise line.error("class", f"must be one of {', '.join(ServiceClass)}")
    if service == ServiceClass.BEST_EFFORT:
        for name in ("ttft_s", "tpot_s"):
            if line.cell(name) is not None:
                raise line.error(name, f"must be empty for class {service}, whose tokens have no time to keep")
    targets = {name: _positive(line, name) for name in TARGET_COLUMNS}
    return RequestOptions(
        service=ServiceClass(str(service)),
        priority=0 if line.cell("priority") is None else _integer(line, "priority", None),
        deadline_s=_positive(line, "deadline_s"),
        target=Target(**{name: seconds for name, seconds in targets.items() if seconds is not None}),
    )


def _positive(line: Line, column: str) -> float | None:
    """A cell's seconds; None where it is empty."""
    cell = line.cell(column)
    if cell is None:
        return None
    seconds = _number(cell)
    if not 0 < seconds < math.inf:
        raise line.error(column, "must be a number of seconds above 0")
    return seconds


def _arrival(line: Line, previous: TraceRow | None) -> float | None:
    cell = line.cell("arrival_s")
    if previous is not None and (previous.arrival_s is None) != (cell is None):
        raise line.error("arrival_s", "either every row has an arrival or none; the row before differs")
    if cell is None:
        return None
    seconds = _timestamp(cell) if isinstance(cell, str) else _number(cell)
    if not 0 <= seconds < math.inf:
        raise line.error("arrival_s", "must be a number of seconds of at least 0")
    if previous is not None and previous.arrival_s is not None and seconds < previous.arrival_s:
        raise line.error("arrival_s", f"must not be before the previous row's {previous.arrival_s:g} s")
    return seconds


def _tokens(line: Line, column: str, text_column: str) -> int:
    """The tokens that a column says, or the words of a text where it says none."""
    if line.cell(column) is not None or (text := line.text(text_column)) is None:
        return _integer(line, column, 1)
    words = count_words(text)
    if not words:
        raise line.error(text_column, f"must have a word or a mark, where there is no {column}")
    return words


def _timestamp(text: str) -> float:
    """The seconds that a text says, or those of a date and time since 1970; NaN for any other text."""
    if not math.isnan(seconds := _number(text)):
        return seconds
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return math.nan
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def _integer(line: Line, column: str, least: int | None) -> int:
    """A cell's integer. least: the smallest that there may be; None: any."""
    cell = line.cell(column)
    try:
        number = int(cell) if isinstance(cell, str) else cell
    except ValueError:
        number = None
    # True counts as 1 in Python.
    if not isinstance(number, int) or isinstance(number, bool) or (least is not None and number < least):
        bound = "" if least is None else f" of at least {least}"
        raise line.error(column, f"must be an integer{bound}")
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


class _Names:
    """Names of the parts of prompts from a column of ids, in which an id may stand for a part alone: a name stands for
    the parts before it, too.

    hash_tokens: of a part; None: ids are not read.
    """

    def __init__(self, hash_tokens: int | None) -> None:
        self._tokens = hash_tokens
        self._known: dict[tuple[int, int], int] = {}  # by the name before and the id

    def parts(self, line: Line, prompt_tokens: int) -> PromptParts | None:
        """The full parts of a prompt; None: the row has no ids."""
        cell = line.cell(HASH_IDS)
        if self._tokens is None or cell is None:
            return None
        ids = _ids(line, cell)
        full, most = prompt_tokens // self._tokens, -(-prompt_tokens // self._tokens)
        if not full <= len(ids) <= most:
            bound = f"{full}" if full == most else f"{full} or {most}"
            what = f"prompt of {prompt_tokens} tokens, one for each {self._tokens} (hash_tokens)"
            raise line.error(HASH_IDS, f"must have {bound} ids for a {what}; it has {len(ids)}")
        return PromptParts(tuple(self._chained(ids[:full])), self._tokens)

    def _chained(self, ids: Sequence[int]) -> Iterator[int]:
        name, known = -1, self._known
        for one in ids:
            name = known.setdefault((name, one), len(known))
            yield name


def _ids(line: Line, cell: object) -> Sequence[int]:
    """The ids in a cell."""
    try:
        ids = list(map(int, cell.replace(",", " ").split())) if isinstance(cell, str) else cell
    except ValueError:
        ids = None
    # True is an int in Python.
    if not isinstance(ids, list) or not all(type(one) is int and one >= 0 for one in ids):
        raise line.error(HASH_IDS, "must be a list of integers of at least 0")
    return ids
