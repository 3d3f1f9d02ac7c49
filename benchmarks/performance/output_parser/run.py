"""Measure the time per token of splitting an output into content, reasoning and tool calls.

For each format, a message of `--tokens` pieces of four characters is read piece by piece, as the API process reads a
stream: only content, only reasoning, and one call with long arguments. `begin_us` is the time to create a reader. The
target is 20 us per token.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from skipjoin.formats.message import MessageReader, load_parser
from skipjoin.formats.table import FORMATS, OutputFormat

sys.path.insert(0, str(Path(__file__).parents[2]))
import harness

PIECE = "word"


def outputs(row: OutputFormat, tokens: int) -> Iterator[tuple[str, list[str]]]:
    text = PIECE * tokens
    yield "content", cut(row.answer + text)
    if row.think is not None:
        yield "reasoning", cut(row.think.open + text)
    if row.calls is not None:
        calls = row.calls
        yield "arguments", cut(calls.begin + calls.before + "f" + calls.middle + f'{{"a": "{text}"}}' + calls.after)


def cut(text: str) -> list[str]:
    return [text[at : at + len(PIECE)] for at in range(0, len(text), len(PIECE))]


def reader_of(row: OutputFormat) -> MessageReader:
    return MessageReader(row, reads_calls=row.calls is not None, is_thinking=False, new_id=lambda: "id")


def read(row: OutputFormat, pieces: list[str]) -> None:
    reader = reader_of(row)
    for piece in pieces:
        reader.feed(piece)
    reader.finish()


def main() -> None:
    args = harness.parser(__doc__, repeats=7, tokens=2000).parse_args()
    load_parser()
    gc.freeze()
    record = harness.new_record(tokens=args.tokens, rows=[])
    for row in FORMATS:
        runs = []
        for _ in range(args.repeats):
            times = {
                f"{kind}_us": (partial(read, row, pieces), len(pieces)) for kind, pieces in outputs(row, args.tokens)
            }
            found = {name: harness.seconds_of(work) / count * 1e6 for name, (work, count) in times.items()}
            runs.append(found | {"begin_us": harness.seconds_of(partial(reader_of, row)) * 1e6})
        figures = harness.spreads(runs, 1)
        record["rows"].append({"format": row.name} | figures)
        harness.show(row.name, {name: one["median"] for name, one in figures.items()})
    harness.write_record(record, args.out)


if __name__ == "__main__":
    main()
