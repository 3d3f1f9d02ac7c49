from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

from skipjoin.config import ConfigError
from skipjoin.system.disk import why_not_written

Record = dict[str, Any]
Existing = Literal["refuse", "replace", "extend"]

DISTRIBUTIONS = ("normalized_latency_s", "ttft_s", "tpot_s", "jct_s", "queue_s")
_TEXTS = ("recipe", "model", "hardware", "driver")
_NUMBERS = ("duration_s", "throughput_rps", "throughput_tps")
_OBJECTS = ("workload", "requests", *DISTRIBUTIONS)
# Null in a client's records if it cannot observe them, and possibly missing in those of other programs.
_OPTIONAL_OBJECTS = (
    "recipe_params",
    "settings",
    "slo",
    "breakdown_s",
    "wait_s",
    "kv",
    "forward",
    "groups",
    "decision_ms",
    "quantiles",
    "series",
    "classes",
)
_PERCENTILES = 101


class ResultsFile:
    """Result records as a JSON array that is complete and readable after every `append`.

    An `existing` file is refused, replaced at the first append, or extended.
    """

    def __init__(self, path: Path, *, existing: Existing = "refuse") -> None:
        self.path = path
        # Renaming onto a link would replace the link instead of its target.
        self._target = path.resolve()
        self._lines: list[str] = []
        self._check_folder()
        if not self._target.exists() or (self._target.is_file() and self._target.stat().st_size == 0):
            return
        if existing == "refuse":
            raise ConfigError(f"{path} exists; name another file, or --overwrite or --append it")
        records = load_results([path])
        if existing == "extend":
            self._lines = [_line(record) for record in records]

    def append(self, record: Record) -> None:
        self._lines.append(_line(record))
        self._write()

    def _write(self) -> None:
        # In the same folder, because a rename is atomic only within one file system.
        partial = self._target.with_name(f".{self._target.name}.{os.getpid()}")
        try:
            with partial.open("w", encoding="utf-8") as file:
                file.write("[\n" + ",\n".join(self._lines) + "\n]\n")
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self._target)
        except OSError as error:
            raise ConfigError(f"{self.path}: {why_not_written(error, self._target)}") from error
        finally:
            partial.unlink(missing_ok=True)

    def sort(self, key: Callable[[Record], Any]) -> None:
        self._lines.sort(key=lambda line: key(json.loads(line)))
        self._write()

    def _check_folder(self) -> None:
        folder = self._target.parent
        if not folder.is_dir():
            raise ConfigError(f"{self.path}: there is no folder {folder}")
        if not os.access(folder, os.W_OK):
            raise ConfigError(f"{self.path}: the folder {folder} cannot be written")


def load_results(paths: Iterable[Path]) -> list[Record]:
    return [record for path in paths for record in _load(path)]


def rate_of(record: Record) -> float | None:
    """Return a record's arrival rate, or None for a replay at recorded times."""
    rate: float | None = record["workload"].get("rate_rps")
    return rate


def basis_text(record: Record) -> str:
    """Return the source of a simulation's costs and their error against measurements; empty for a measurement."""
    if record["driver"] != "simulator":
        return ""
    basis = record.get("basis")
    machine = f"{record['model']} on {record['hardware']}"
    if not basis:  # written by another program or an older version
        return f"simulated {machine}"
    if basis["profile"] is None:
        return f"simulated {machine}: costs computed from its data sheet, which no measurement has confirmed"
    median, p95 = (f"{100 * basis[name]:.0f} %" for name in ("error_median", "error_p95"))
    return (
        f"simulated {machine}: costs of the profile {basis['profile']} of {basis['date'][:10]}, whose error was "
        f"{median} (median) and {p95} (P95)"
    )


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _line(record: Record) -> str:
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


def _load(path: Path) -> list[Record]:
    try:
        found = json.loads(text := path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file (byte {error.start} is not UTF-8)") from error
    except json.JSONDecodeError as error:
        if not text.strip():
            raise ConfigError(f"{path}: the file is empty") from error
        raise ConfigError(f"{path} line {error.lineno}, column {error.colno}: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(found, list):
        raise ConfigError(f"{path}: must be an array of result records, got {_kind(found)}")
    for number, record in enumerate(found, start=1):
        if problem := _problem(record):
            raise ConfigError(f"{path}: record {number}: {problem}")
    return found


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _problem(record: object) -> str | None:
    if not isinstance(record, dict):
        return f"must be an object, got {_kind(record)}"
    for name in (*_TEXTS, *_NUMBERS, *_OBJECTS):
        if name not in record:
            return f"missing {name}"
    for names, fits, wanted in (
        (_TEXTS, lambda value: isinstance(value, str), "a string"),
        (_NUMBERS, is_number, "a number"),
        (_OBJECTS, lambda value: isinstance(value, dict), "an object"),
        (_OPTIONAL_OBJECTS, lambda value: value is None or isinstance(value, dict), "an object or null"),
    ):
        for name in names:
            if not fits(record.get(name)):
                return f"{name} must be {wanted}, got {_kind(record.get(name))}"
    rate = rate_of(record)
    if rate is not None and not is_number(rate):
        return f"workload.rate_rps must be a number or null, got {_kind(rate)}"
    return _problem_of_lists(record)


def _problem_of_lists(record: Record) -> str | None:
    for name, values in (record.get("quantiles") or {}).items():
        if not _are_numbers(values) or len(values) not in (0, _PERCENTILES):
            return f"quantiles.{name} must be {_PERCENTILES} numbers, or none"
    series = record.get("series") or {}
    if not all(map(_are_numbers, series.values())) or len(set(map(len, series.values()))) > 1:
        return "series must be lists of numbers, equally long"
    return None


def _are_numbers(values: object) -> bool:
    return isinstance(values, list) and all(map(is_number, values))


def _kind(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
