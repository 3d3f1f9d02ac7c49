from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

from rich.table import Column

from skipjoin.cli.tables import Table
from skipjoin.config import ConfigError
from skipjoin.observe.record import Record
from skipjoin.report.bound import field_value
from skipjoin.report.numbers import number

_COLUMNS = {
    "s/token": "normalized_latency_s.mean",
    "TTFT s": "ttft_s.mean",
    "TTFT kept": "slo.ttft_attained",
    "TPOT s": "tpot_s.mean",
    "TPOT kept": "slo.tpot_attained",
    "done/s": "window.throughput_rps",
    "tokens/s": "window.throughput_tps",
}


def class_table(head: Sequence[str | Column], groups: Iterable[tuple[Sequence[str], Sequence[Record]]]) -> Table:
    # The longest recipe names must fit into 120 columns.
    table = Table(*head, "stream", "class", "finished", *_COLUMNS, box=None, padding=(0, 1, 0, 0))
    for cells, records in groups:
        for stream, part in records[0].get("classes", {}).items():
            parts = [record["classes"][stream] for record in records if stream in record.get("classes", {})]
            figures = [mean_text(parts, field) for field in _COLUMNS.values()]
            table.add_row(*cells, stream, part["service"], finished(parts), *figures)
    return table


def finished(records: Iterable[Record]) -> str:
    counts = [record["requests"] for record in records]
    done, submitted = (sum(count[key] for count in counts) for key in ("finished", "submitted"))
    return f"{done}/{submitted}"


def mean_text(records: Iterable[Record], field: str) -> str:
    try:
        return number_text(fmean(field_value(record, field) for record in records))
    except ConfigError:  # null if no request finished
        return "-"


def number_text(value: float | None) -> str:
    if value is None:
        return "-"
    return number(value, 4)
