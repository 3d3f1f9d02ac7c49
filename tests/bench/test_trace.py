"""Traces: what a file may look like, and what is said about one that is wrong, with line and column."""

from __future__ import annotations

import csv
import gzip
import io
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipjoin.bench.trace import Trace, TraceRow, read_trace
from skipjoin.config import ConfigError

TRACES = os.environ.get("SKIPJOIN_TRACES")
HEADER = "arrival_s,prompt_tokens,output_tokens\n"


def read(folder: Path, text: str, name: str = "trace.csv") -> Trace:
    (folder / name).write_text(text, encoding="utf-8", newline="")
    return read_trace(folder / name)


def told(folder: Path, text: str, name: str = "trace.csv") -> str:
    """The error about a file of this text, without the name of its folder."""
    with pytest.raises(ConfigError) as caught:
        read(folder, text, name)
    return str(caught.value).replace(f"{folder}{os.sep}", "")


def test_rows_are_read_by_column_name(tmp_path: Path) -> None:
    trace = read(tmp_path, 'output_tokens,client, arrival_s,prompt_tokens\r\n5,"a, b",0.0,10\r\n\r\n6,c,1.5,"20"\r\n')
    assert trace == Trace("trace.csv", (TraceRow(0.0, 10, 5), TraceRow(1.5, 20, 6)))
    assert trace.has_arrivals


def test_arrivals_may_be_left_out_and_a_byte_order_mark_does_not_matter(tmp_path: Path) -> None:
    trace = read(tmp_path, f"\ufeff{HEADER},10,5\n , 20 ,6")
    assert trace.rows == (TraceRow(None, 10, 5), TraceRow(None, 20, 6))
    assert not trace.has_arrivals
    assert read(tmp_path, "prompt_tokens,output_tokens\n10,5\n20,6\n").rows == trace.rows


def test_a_gzipped_file_reads_like_a_plain_one(tmp_path: Path) -> None:
    text = HEADER + "0,10,5\n0,20,6\n"
    (tmp_path / "trace.csv.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    assert read_trace(tmp_path / "trace.csv.gz").rows == read(tmp_path, text).rows


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ("1.5,10,x", "column 8 (output_tokens): must be an integer of at least 1, got 'x'"),
        ("1.5,0,5", "column 5 (prompt_tokens): must be an integer of at least 1, got '0'"),
        ("1.5,,5", "column 5 (prompt_tokens): must be an integer of at least 1, got ''"),
        ("1.5,2.5,5", "column 5 (prompt_tokens): must be an integer of at least 1, got '2.5'"),
        ('"1.5","10","-1"', "column 12 (output_tokens): must be an integer of at least 1, got '-1'"),
        ("soon,10,5", "column 1 (arrival_s): must be a number of seconds of at least 0, got 'soon'"),
        ("-1,10,5", "column 1 (arrival_s): must be a number of seconds of at least 0, got '-1'"),
        ("nan,10,5", "column 1 (arrival_s): must be a number of seconds of at least 0, got 'nan'"),
        ("inf,10,5", "column 1 (arrival_s): must be a number of seconds of at least 0, got 'inf'"),
        ("0.5,10,5", "column 1 (arrival_s): must not be before the previous row's 1.25, got '0.5'"),
        (",10,5", "column 1 (arrival_s): either every row has an arrival or none; the row before differs, got ''"),
    ],
)
def test_a_bad_cell_is_told_with_its_place(tmp_path: Path, row: str, error: str) -> None:
    assert told(tmp_path, f"{HEADER}0,10,5\n\n1.25,10,5\n{row}\n2,10,5\n") == f"trace.csv line 5, {error}"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "trace.csv: the file is empty"),
        (HEADER, "trace.csv: no rows below the header"),
        ("arrival_s,prompt\n0,1\n", "line 1: no column prompt_tokens; the columns are arrival_s, prompt"),
        (
            "Arrival,prompt_tokens,output_tokens\n",
            "line 1: no column arrival_s; the columns are Arrival, prompt_tokens",
        ),
        ("arrival_s,prompt_tokens,prompt_tokens,output_tokens\n", "two columns are named prompt_tokens"),
        (HEADER + "0,10,5\n1,1,200,5\n", "line 3: 4 fields, but the header has 3"),
        (HEADER + '0,10,5\n0,"10,5\n1,10,5\n', "line 3: unexpected end of data"),
    ],
)
def test_a_bad_shape_is_told(tmp_path: Path, text: str, error: str) -> None:
    assert error in told(tmp_path, text)


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("trace.csv", b"\xff\xfe\x00\x01", "not a text file in UTF-8"),
        ("trace.csv.gz", b"arrival_s", "not a complete gzip file"),
        ("trace.csv.gz", gzip.compress(HEADER.encode(), mtime=0)[:-9], "not a complete gzip file"),
    ],
)
def test_what_is_no_text_is_told(tmp_path: Path, name: str, content: bytes, error: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=error):
        read_trace(tmp_path / name)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.csv: No such file"):
        read_trace(tmp_path / "none.csv")


@given(
    notes=st.lists(st.text(alphabet='ab,"\n ', max_size=6), min_size=1, max_size=5), bad=st.text("x,\"\n'", max_size=3)
)
def test_the_place_is_right_whatever_stands_before(
    tmp_path_factory: pytest.TempPathFactory, notes: list[str], bad: str
) -> None:
    """Quotes, commas and line ends in cells before the bad one: the place is where that cell's text starts."""
    before = io.StringIO()
    writer = csv.writer(before, lineterminator="\n")
    writer.writerow(["note", "arrival_s", "prompt_tokens", "output_tokens"])
    for note in notes[:-1]:
        writer.writerow([note, "", 10, 5])
    writer.writerow([notes[-1], "", 10, "@"])
    head = before.getvalue()[: -len("@\n")]
    last = io.StringIO()
    csv.writer(last, lineterminator="\n").writerow([bad])
    line, column = head.count("\n") + 1, len(head) - head.rfind("\n")
    error = told(tmp_path_factory.mktemp("trace"), head + last.getvalue())
    assert error == (
        f"trace.csv line {line}, column {column} (output_tokens): must be an integer of at least 1, got {bad!r}"
    )


# -- texts and further columns ----------------------------------------------------------------------------------------


def test_a_jsonl_file_has_texts_and_words_count_where_tokens_are_not_given(tmp_path: Path) -> None:
    text = (
        '{"prompt": "Count to 5!", "output": "1, 2, 3, 4, 5.", "arrival_s": 0}\n\n'
        '{"prompt": "And on", "prompt_tokens": 9, "context_tokens": 30, "output_tokens": 7, "output": "6", '
        '"arrival_s": 1.5}\n'
    )
    trace = read(tmp_path, text, "trace.jsonl")
    assert trace.rows == (TraceRow(0.0, 4, 10, "Count to 5!"), TraceRow(1.5, 30, 7, "And on"))
    trace.check_texts()
    (tmp_path / "trace.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    assert read_trace(tmp_path / "trace.jsonl.gz").rows == trace.rows
    with pytest.raises(ConfigError, match=r"trace\.csv has no texts: a trace that has them is JSONL"):
        read(tmp_path, HEADER + "0,10,5\n").check_texts()


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ('{"prompt": "a", "output": "b", }', "line 2, column 32: not JSON: "),
        ("[1]", "line 2: must be an object, got [1]"),
        ("[" * 100_000, "line 2: not JSON that can be read"),
        ('{"prompt": "a"}', "line 2: neither output nor output_tokens; the columns are prompt"),
        ('{"prompt": "a", "output_tokens": 1.5}', "line 2 (output_tokens): must be an integer of at least 1, got 1.5"),
        (
            '{"prompt": "a", "output_tokens": true}',
            "line 2 (output_tokens): must be an integer of at least 1, got true",
        ),
        (
            '{"prompt": "a", "output": " "}',
            'line 2 (output): must have a word or a mark, where there is no output_tokens, got " "',
        ),
        ('{"prompt": 5, "output": "b"}', "line 2 (prompt): must be a text in UTF-8, got 5"),
        ('{"prompt": "\\ud800", "output": "b"}', "line 2 (prompt): must be a text in UTF-8, got"),
        ('{"prompt_tokens": 5, "output": "b"}', "line 2 (prompt): either every row has a prompt or none"),
        (
            '{"prompt": "a", "output": "b", "arrival_s": 3}',
            "line 2 (arrival_s): either every row has an arrival or none",
        ),
        (
            '{"prompt": "a", "output": "b", "Arrival": 3}',
            "line 2: no column arrival_s; the columns are prompt, output, Arr",
        ),
        (
            '{"prompt": "a b", "output": "c", "context_tokens": 1}',
            "line 2 (context_tokens): must be an integer of at least 2",
        ),
    ],
)
def test_a_bad_line_of_jsonl_is_told_with_its_place(tmp_path: Path, row: str, error: str) -> None:
    first = '{"prompt": "a", "output": "b"}'
    assert told(tmp_path, f"{first}\n{row}\n", "trace.jsonl").startswith(f"trace.jsonl {error}")


def test_columns_of_numbers_are_there_by_name(tmp_path: Path) -> None:
    csv_text = "prompt_tokens,output_tokens,pred,client,twice,twice\n10,5,1.5,7,0,0\n20,6,-2,a,0,0\n"
    json_text = '{"prompt": "a", "output": "b", "pred": 1.5, "late": 1}\n{"prompt": "a", "output": "b", "pred": -2}\n'
    tables, texts = read(tmp_path, csv_text), read(tmp_path, json_text, "trace.jsonl")
    assert list(tables.column("pred")) == list(texts.column("pred")) == [1.5, -2]
    assert list(tables.column("output_tokens")) == [5, 6]
    for trace, name, error in (
        (tables, "x", "trace.csv: no column x; the columns of numbers are prompt_tokens, output_tokens, pred"),
        (tables, "twice", "trace.csv: no column twice; "),
        (tables, "client", "trace.csv line 3, column 9 (client): must be a number, got 'a'"),
        (texts, "x", "trace.jsonl: no column x; the columns of numbers are pred"),
        (texts, "prompt", 'trace.jsonl line 1 (prompt): must be a number, got "a"'),
        (texts, "late", "trace.jsonl line 2 (late): must be a number, got null"),
    ):
        with pytest.raises(ConfigError) as caught:
            trace.column(name)
        assert str(caught.value).replace(f"{tmp_path}{os.sep}", "").startswith(error)


@pytest.mark.shared
@pytest.mark.skipif(TRACES is None, reason="SKIPJOIN_TRACES names no folder")
@pytest.mark.parametrize(
    ("name", "rows", "has_arrivals"),
    [
        ("azure2023_conv.csv", 19366, True),
        ("mooncake_conversation.csv", 12031, True),
        ("servegen_m_large_1h.csv.gz", 46411, True),
        ("alpaca.csv", 50000, False),
        ("alpaca_text.jsonl.gz", 52002, False),
    ],
)
def test_recorded_traces_are_read_whole(name: str, rows: int, has_arrivals: bool) -> None:
    trace = read_trace(Path(str(TRACES)) / name)
    assert (len(trace.rows), trace.has_arrivals) == (rows, has_arrivals)
