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
from skipjoin.routes import MAX_PROGRAM, is_program_name
from skipjoin.workload.prefixes import PromptParts
from skipjoin.workload.trace_lines import (
    HASH_IDS,
    MOONCAKE_COLUMNS,
    TEXT_COLUMNS,
    TOKEN_COLUMNS,
    Line,
    csv_lines,
    json_lines,
)
from skipjoin.workload.trace_units import TIME_UNITS, TraceUnits, with_units

_WORD_OR_MARK = re.compile(r"\w+|[^\w\s]")
# Soft objectives in seconds: the fields of `Target`.
TARGET_COLUMNS = Target._fields
# Columns of scheduling options.
OPTION_COLUMNS = ("deadline_s", "priority", "class", *TARGET_COLUMNS)
# Program of a call, and the pause after which it follows the one before.
PROGRAM_COLUMNS = ("program", "pause_s")
# Columns that only describe a row's origin.
LABEL_COLUMNS = ("chat_id", "client", "conv", "id", "model", "parent_chat_id", "split", "src", "turn", "type")
KNOWN_COLUMNS = (
    "arrival_s",
    *TOKEN_COLUMNS,
    "context_tokens",
    *TEXT_COLUMNS,
    HASH_IDS,
    *PROGRAM_COLUMNS,
    *OPTION_COLUMNS,
    *LABEL_COLUMNS,
)


class TraceRow(NamedTuple):
    arrival_s: float | None
    prompt_tokens: int
    output_tokens: int
    prompt: str | None = None
    options: RequestOptions = DEFAULT_OPTIONS
    parts: PromptParts | None = None
    program: str = ""
    pause_s: float | None = None


@dataclass(slots=True)
class Column:
    values: array[float]
    error: str = ""


@dataclass(frozen=True)
class Trace:
    """Recorded requests of a file, in order. Either all rows have an arrival or none, and likewise for prompts."""

    name: str
    rows: tuple[TraceRow, ...]
    columns: Mapping[str, Column] = field(default_factory=dict, repr=False, compare=False)
    time_unit: str | None = field(default=None, compare=False)

    @property
    def has_arrivals(self) -> bool:
        return self.rows[0].arrival_s is not None

    @property
    def has_texts(self) -> bool:
        return self.rows[0].prompt is not None

    @property
    def part_tokens(self) -> int | None:
        parts = self.rows[0].parts
        return None if parts is None else parts.tokens

    def describe(self) -> str:
        """Return number, span, rate and units on one line, by which a wrong unit is noticed."""
        requests, found = f"{self.name}: {len(self.rows)} request{'s' * (len(self.rows) > 1)}", []
        if self.has_arrivals:
            span = (self.rows[-1].arrival_s or 0.0) - (self.rows[0].arrival_s or 0.0)
            rate = f", {(len(self.rows) - 1) / span:.4g} per second" if span else ""
            requests += f" in {span:.6g} s{rate}"
        if self.time_unit is not None:
            found.append(f"timestamp in {self.time_unit}")
        if self.part_tokens is not None:
            found.append(f"{HASH_IDS} of {self.part_tokens} tokens")
        return requests + (f" ({', '.join(found)})" if found else "")

    def has_any(self, *columns: str) -> bool:
        return any(name in self.columns for name in columns)

    def check_columns(self, unread: Collection[str] = ()) -> None:
        """Raise `ConfigError` for an unknown column not in `unread`, which would otherwise be ignored silently."""
        for name in self.columns:
            if name not in (*KNOWN_COLUMNS, *MOONCAKE_COLUMNS.values()) and name not in unread:
                hint = nearest(name, KNOWN_COLUMNS)
                raise ConfigError(
                    f"{self.name}: unknown column {name}{hint}; known are {', '.join(KNOWN_COLUMNS)}; "
                    f"--ignore-columns {name} leaves it out"
                )

    def check_texts(self) -> None:
        if not self.has_texts:
            raise ConfigError(f"{self.name} has no texts: a trace that has them is JSONL with a prompt in each line")

    def column(self, name: str) -> Sequence[float]:
        found = self.columns.get(name)
        if found is None:
            known = ", ".join(other for other, column in self.columns.items() if not column.error)
            raise ConfigError(f"{self.name}: no column {name}; the columns of numbers are {known}")
        if found.error:
            raise ConfigError(found.error)
        return found.values


def read_trace(
    path: str | Path, *, time_unit: str = "auto", hash_tokens: int | None = None, has_parts: bool = True
) -> Trace:
    """Read a trace from a CSV file, or from JSONL if the name ends in .jsonl; a further .gz means gzip.

    `docs/simulate.md` has the columns, besides context_tokens: the length of the whole prompt, if prompt_tokens counts
    its last part. arrival_s is in seconds, or an ISO 8601 date and time, UTC by default.
    """
    path = Path(path)
    try:
        with _opened(path) as file:
            lines, units = with_units(_lines(path, file), time_unit, hash_tokens, has_parts=has_parts)
            rows, columns, is_timed = _read(lines, units)
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file in UTF-8") from None
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise ConfigError(f"{path}: not a complete gzip file") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    if not rows:
        raise ConfigError(f"{path}: no rows{'' if _is_json(path) else ' below the header'}")
    unit = next(name for name, per_s in TIME_UNITS.items() if per_s == units.per_s)
    return Trace(path.name, rows, columns, unit if is_timed else None)


def count_words(text: str) -> int:
    return len(_WORD_OR_MARK.findall(text))


def _opened(path: Path) -> TextIO:
    # utf-8-sig drops the byte order mark that spreadsheets write.
    if path.suffix == ".gz":
        return cast(TextIO, gzip.open(path, "rt", encoding="utf-8-sig", newline=""))
    return path.open(encoding="utf-8-sig", newline="")


def _is_json(path: Path) -> bool:
    return path.name.removesuffix(".gz").endswith(".jsonl")


def _lines(path: Path, file: TextIO) -> Iterator[Line]:
    return json_lines(str(path), file) if _is_json(path) else csv_lines(str(path), file)


def _read(lines: Iterable[Line], units: TraceUnits) -> tuple[tuple[TraceRow, ...], dict[str, Column], bool]:
    rows: list[TraceRow] = []
    columns: dict[str, Column] = {}
    names, is_timed, programs = _Names(units.hash_tokens), False, set[str]()
    for line in lines:
        row = _row(line, rows[-1] if rows else None, names, units.per_s)
        if row.pause_s is not None and row.program not in programs:
            raise line.error("pause_s", "must be empty, because no row before is of its program")
        programs.add(row.program)
        rows.append(row)
        _add_numbers(columns, line, first=len(rows) == 1)
        is_timed = is_timed or line.has_timestamp
    return tuple(rows), columns, is_timed


def _row(line: Line, previous: TraceRow | None, names: _Names, per_s: int) -> TraceRow:
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
    arrival, options, (program, pause_s) = _arrival(line, previous, per_s), _options(line), _call(line)
    if program and arrival is None:
        raise line.error("program", "needs arrival_s: rows without it are drawn one by one")
    return TraceRow(arrival, tokens, output, prompt, options, parts, program, pause_s)


def _call(line: Line) -> tuple[str, float | None]:
    name, pause = line.cell("program"), line.cell("pause_s")
    program = "" if name is None else str(name)
    if name is not None and not is_program_name(program):
        raise line.error("program", f"must be 1 to {MAX_PROGRAM} printable characters of ASCII")
    if pause is None:
        return program, None
    seconds = _number(pause)
    if not program or not 0 <= seconds < math.inf:
        raise line.error("pause_s", "must be a number of seconds of at least 0, of a row with a program")
    return program, seconds


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
    cell = line.cell(column)
    if cell is None:
        return None
    seconds = _number(cell)
    if not 0 < seconds < math.inf:
        raise line.error(column, "must be a number of seconds above 0")
    return seconds


def _arrival(line: Line, previous: TraceRow | None, per_s: int) -> float | None:
    cell = line.cell("arrival_s")
    if previous is not None and (previous.arrival_s is None) != (cell is None):
        raise line.error("arrival_s", "either every row has an arrival or none; the row before differs")
    if cell is None:
        return None
    seconds = _number(cell) / (per_s if line.has_timestamp else 1)
    if isinstance(cell, str) and math.isnan(seconds):
        seconds = _date(cell)
    if not 0 <= seconds < math.inf:
        raise line.error("arrival_s", "must be a number of seconds of at least 0")
    if previous is not None and previous.arrival_s is not None and seconds < previous.arrival_s:
        raise line.error("arrival_s", f"must not be before the previous row's {previous.arrival_s:g} s")
    return seconds


def _tokens(line: Line, column: str, text_column: str) -> int:
    if line.cell(column) is not None or (text := line.text(text_column)) is None:
        return _integer(line, column, 1)
    words = count_words(text)
    if not words:
        raise line.error(text_column, f"must have a word or a mark, where there is no {column}")
    return words


def _date(text: str) -> float:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return math.nan
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def _integer(line: Line, column: str, least: int | None) -> int:
    cell = line.cell(column)
    try:
        number = int(cell) if isinstance(cell, str) else cell
    except ValueError:
        number = None
    # bool is a subclass of int.
    if not isinstance(number, int) or isinstance(number, bool) or (least is not None and number < least):
        bound = "" if least is None else f" of at least {least}"
        raise line.error(column, f"must be an integer{bound}")
    return number


def _number(cell: object) -> float:
    try:
        return math.nan if isinstance(cell, bool) else float(cell)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _add_numbers(columns: dict[str, Column], line: Line, *, first: bool) -> None:
    for name in [name for name in line.columns if name not in columns]:
        columns[name] = Column(array("d"), "" if first else str(line.error(name, "the rows before have none")))
    for name, column in columns.items():
        if not column.error:
            number = _number(line.cell(name))
            column.values.append(number)
            column.error = "" if math.isfinite(number) else str(line.error(name, "must be a number"))


class _Names:
    """Unique names of prompt parts, each for a part and all parts before it: ids may repeat in other contexts."""

    def __init__(self, hash_tokens: int | None) -> None:
        self._tokens = hash_tokens
        self._known: dict[tuple[int, int], int] = {}  # by previous name and id

    def parts(self, line: Line, prompt_tokens: int) -> PromptParts | None:
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
        for id_ in ids:
            name = known.setdefault((name, id_), len(known))
            yield name


def _ids(line: Line, cell: object) -> Sequence[int]:
    try:
        ids = list(map(int, cell.replace(",", " ").split())) if isinstance(cell, str) else cell
    except ValueError:
        ids = None
    # bool is a subclass of int.
    if not isinstance(ids, list) or not all(type(id_) is int and id_ >= 0 for id_ in ids):
        raise line.error(HASH_IDS, "must be a list of integers of at least 0")
    return ids
