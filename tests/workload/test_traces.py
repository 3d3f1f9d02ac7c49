from __future__ import annotations

import csv
import gzip
import io
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipjoin.cli.workload import LoadOptions
from skipjoin.config import ConfigError
from skipjoin.core.request import RequestOptions, ServiceClass, Target
from skipjoin.workload.arrivals import parse_arrivals
from skipjoin.workload.prefixes import PromptParts
from skipjoin.workload.request import chains_of
from skipjoin.workload.streams import parse_closed
from skipjoin.workload.traces import Trace, TraceRow, read_trace
from skipjoin.workload.workload import Replay, Workload, with_closed

TRACES = os.environ.get("SKIPJOIN_TRACES")
HEADER = "arrival_s,prompt_tokens,output_tokens\n"


def read(folder: Path, text: str, name: str = "trace.csv") -> Trace:
    (folder / name).write_text(text, encoding="utf-8", newline="")
    return read_trace(folder / name)


def error_of(folder: Path, text: str, name: str = "trace.csv") -> str:
    with pytest.raises(ConfigError) as caught:
        read(folder, text, name)
    return str(caught.value).replace(f"{folder}{os.sep}", "")


def test_rows_are_read_by_column_name(tmp_path: Path) -> None:
    trace = read(tmp_path, 'output_tokens,client, arrival_s,prompt_tokens\r\n5,"a, b",0.0,10\r\n\r\n6,c,1.5,"20"\r\n')
    assert trace == Trace("trace.csv", (TraceRow(0.0, 10, 5), TraceRow(1.5, 20, 6)))
    assert trace.has_arrivals


def test_arrivals_are_optional_and_a_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    trace = read(tmp_path, f"\ufeff{HEADER},10,5\n , 20 ,6")
    assert trace.rows == (TraceRow(None, 10, 5), TraceRow(None, 20, 6))
    assert not trace.has_arrivals
    assert read(tmp_path, "prompt_tokens,output_tokens\n10,5\n20,6\n").rows == trace.rows


def test_gzipped_files_are_read(tmp_path: Path) -> None:
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
        ("0.5,10,5", "column 1 (arrival_s): must not be before the previous row's 1.25 s, got '0.5'"),
        (",10,5", "column 1 (arrival_s): either every row has an arrival or none; the row before differs, got ''"),
    ],
)
def test_errors_of_csv_cells_name_the_line_and_column(tmp_path: Path, row: str, error: str) -> None:
    assert error_of(tmp_path, f"{HEADER}0,10,5\n\n1.25,10,5\n{row}\n2,10,5\n") == f"trace.csv line 5, {error}"


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
        (
            '[{"prompt_tokens": 1}]',
            "trace.csv: JSON is read from files whose name ends in .jsonl, with one object in each",
        ),
        (' {\n "prompt_tokens": 1}', "trace.csv: JSON is read from files whose name ends in .jsonl"),
        (HEADER + "0,10,5\n1,1,200,5\n", "line 3: 4 fields, but the header has 3"),
        (HEADER + '0,10,5\n0,"10,5\n1,10,5\n', "line 3: unexpected end of data"),
    ],
)
def test_malformed_tables_are_refused(tmp_path: Path, text: str, error: str) -> None:
    assert error in error_of(tmp_path, text)


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("trace.csv", b"\xff\xfe\x00\x01", "not a text file in UTF-8"),
        ("trace.csv.gz", b"arrival_s", "not a complete gzip file"),
        ("trace.csv.gz", gzip.compress(HEADER.encode(), mtime=0)[:-9], "not a complete gzip file"),
    ],
)
def test_files_that_are_not_text_are_refused(tmp_path: Path, name: str, content: bytes, error: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=error):
        read_trace(tmp_path / name)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.csv: No such file"):
        read_trace(tmp_path / "none.csv")


@given(
    notes=st.lists(st.text(alphabet='ab,"\n ', max_size=6), min_size=1, max_size=5), bad=st.text("x,\"\n'", max_size=3)
)
def test_error_positions_are_right_after_quoted_cells(
    tmp_path_factory: pytest.TempPathFactory, notes: list[str], bad: str
) -> None:
    """Cells before the invalid one contain quotes, commas and line ends; the position is that of its text."""
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
    error = error_of(tmp_path_factory.mktemp("trace"), head + last.getvalue())
    assert error == (
        f"trace.csv line {line}, column {column} (output_tokens): must be an integer of at least 1, got {bad!r}"
    )


def test_jsonl_files_have_texts_and_default_to_word_counts(tmp_path: Path) -> None:
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
def test_errors_of_jsonl_lines_name_the_line_and_field(tmp_path: Path, row: str, error: str) -> None:
    first = '{"prompt": "a", "output": "b"}'
    assert error_of(tmp_path, f"{first}\n{row}\n", "trace.jsonl").startswith(f"trace.jsonl {error}")


MOONCAKE = '{"timestamp": %s, "input_length": %s, "output_length": 9, "hash_ids": %s}\n'


def test_hash_ids_identify_parts_of_prompts_with_their_prefixes(tmp_path: Path) -> None:
    rows = [(0, 1100, [0, 1, 2]), (1500, 1024, [0, 1]), (3000, 1600, [3, 1, 1, 2]), (3000, 5, [])]
    trace = read(tmp_path, "".join(MOONCAKE % row for row in rows), "trace.jsonl")
    assert [row[:3] for row in trace.rows] == [(0.0, 1100, 9), (1.5, 1024, 9), (3.0, 1600, 9), (3.0, 5, 9)]
    parts = [row.parts for row in trace.rows]
    assert all(part is not None and part.tokens == 512 for part in parts)
    names = [part.names for part in parts if part is not None]
    assert names[0] == names[1]
    described = LoadOptions(trace=tmp_path / "trace.jsonl").workload().describe(None, None, 0)
    assert described["hash_tokens"] == 512
    # The same id after a different prefix is a different part.
    assert len(set(names[0] + names[2])) == 2 + 3
    assert [len(name) for name in names] == [2, 2, 3, 0]
    table = 'prompt_tokens,output_tokens,hash_ids\n9,1,7 8 5\n12,1,"7, 8, 6"\n'
    (tmp_path / "trace.csv").write_text(table)
    assert [row.parts for row in read_trace(tmp_path / "trace.csv", hash_tokens=4).rows] == [
        PromptParts((0, 1), 4),
        PromptParts((0, 1, 2), 4),
    ]
    assert read_trace(tmp_path / "trace.csv", has_parts=False).part_tokens is None


BAILIAN = '{"chat_id": 1, "timestamp": %s, "input_length": %s, "output_length": 9, "hash_ids": %s}\n'


@pytest.mark.parametrize(
    ("times", "options", "arrivals", "unit"),
    [
        ([0.0, 61.114, 1727.25], {}, [0, 61.114, 1727.25], "s"),  # fractions, as in Qwen-Bailian's traces
        ([0, 27482, 30535], {}, [0, 27.482, 30.535], "ms"),  # integers, as in Mooncake's
        ([5, 5, 6], {}, [5, 5, 6], "s"),  # 2,000 requests per second if these were milliseconds
        ([0, 2, 4, 7], {}, [0, 2, 4, 7], "s"),  # 429 per second, which no model serves
        ([0, 3600000.5], {}, [0, 3600.0005], "ms"),  # 2 requests in 41 days if these were seconds
        ([0, 0], {}, [0, 0], "ms"),
        ([7], {}, [0.007], "ms"),
        ([0, 2, 5], {"time_unit": "s"}, [0, 2, 5], "s"),
        ([0, 61.114], {"time_unit": "ms"}, [0, 0.061114], "ms"),
    ],
)
def test_the_unit_of_timestamps_is_detected_or_given(
    tmp_path: Path, times: list[float], options: dict[str, str], arrivals: list[float], unit: str
) -> None:
    (tmp_path / "trace.jsonl").write_text("".join(BAILIAN % (time, 9, "[4]") for time in times))
    trace = read_trace(tmp_path / "trace.jsonl", **options)
    assert [row.arrival_s for row in trace.rows] == pytest.approx(arrivals, rel=1e-12)
    assert f"(timestamp in {unit}, hash_ids of 512 tokens)" in trace.describe()


@pytest.mark.parametrize(("tokens", "lengths"), [(512, (600, 40, 2000)), (16, (600, 40, 33)), (64, (600, 40, 6400))])
def test_the_size_of_hash_ids_is_detected(tmp_path: Path, tokens: int, lengths: tuple[int, ...]) -> None:
    text = "".join(BAILIAN % (n, length, [*range(-(-length // tokens))]) for n, length in enumerate(lengths))
    trace = read(tmp_path, text, "trace.jsonl")
    assert trace.part_tokens == tokens
    assert [len(row.parts.names) for row in trace.rows if row.parts] == [length // tokens for length in lengths]


def test_a_trace_is_described_by_its_span_and_rate(tmp_path: Path) -> None:
    trace = read(tmp_path, f"{HEADER}10,5,5\n11,5,5\n14,5,5\n")
    assert trace.describe() == "trace.csv: 3 requests in 4 s, 0.5 per second"
    assert read(tmp_path, "prompt_tokens,output_tokens\n10,5\n").describe() == "trace.csv: 1 request"


def test_a_timestamp_counts_with_any_names_of_lengths(tmp_path: Path) -> None:
    text = '{"timestamp": 1.5, "prompt_tokens": 3, "output_tokens": 2}\n' * 2
    assert read(tmp_path, text, "trace.jsonl").rows == (TraceRow(1.5, 3, 2),) * 2


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ((0, 1100, "[1]"), "(hash_ids): must have 2 or 3 ids for a prompt of 1100 tokens, one for each 512 (hash_tok"),
        ((0, 1024, "[1, 2, 3]"), "(hash_ids): must have 2 ids for a prompt of 1024 tokens, one for each 512 (hash_tok"),
        ((0, 600, "[1, -2]"), "(hash_ids): must be a list of integers of at least 0, got [1, -2]"),
        ((0, 600, "[1, true]"), "(hash_ids): must be a list of integers of at least 0, got [1, true]"),
        ((0, 600, "7"), "(hash_ids): must be a list of integers of at least 0, got 7"),
        ((0, 600, '"a b"'), '(hash_ids): must be a list of integers of at least 0, got "a b"'),
        ((0, 600, "null"), "(hash_ids): either every row has hash_ids or none; the row before differs, got null"),
        ((-5, 600, "[1]"), "(timestamp): must be a number of seconds of at least 0, got -5"),
        (("true", 600, "[1]"), "(timestamp): must be a number of seconds of at least 0, got true"),
        (("1" * 400, 600, "[1]"), "(timestamp): must be a number of seconds of at least 0, got 111"),
        ((0, '"x"', "[1]"), '(input_length): must be an integer of at least 1, got "x"'),
    ],
)
def test_errors_of_mooncake_lines_name_the_line_and_field(tmp_path: Path, row: tuple[object, ...], error: str) -> None:
    text = MOONCAKE % (0, 9, "[4]") + MOONCAKE % row
    assert error_of(tmp_path, text, "trace.jsonl").startswith(f"trace.jsonl line 2 {error}")


def test_columns_of_numbers_are_available_by_name(tmp_path: Path) -> None:
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


def test_request_options_of_rows_are_read(tmp_path: Path) -> None:
    names = "prompt_tokens,output_tokens,deadline_s,priority,class,ttft_s,tpot_s,jct_s\n"
    cells = "10,5,2.5,-1,real-time,0.5,0.1,9\n10,5,,,,,,\n10,5,,3,best-effort,,,60\n"
    expected = RequestOptions(deadline_s=2.5, priority=-1, target=Target(0.5, 0.1, 9.0))
    batch = RequestOptions(service=ServiceClass.BEST_EFFORT, priority=3, target=Target(jct_s=60.0))
    trace = read(tmp_path, names + cells)
    assert [row.options for row in trace.rows] == [expected, RequestOptions(), batch]
    for job in Replay(trace, arrivals=parse_arrivals("constant")).draw(1.0, None, 7, 3):
        options = trace.rows[job.row or 0].options
        actual = RequestOptions(
            service=job.service, priority=job.priority, deadline_s=job.deadline_s, target=job.target
        )
        assert actual == options
    line = (
        '{"prompt": "a", "output": "b", "deadline_s": 2.5, "priority": -1, "ttft_s": 0.5, "tpot_s": 0.1, "jct_s": 9}\n'
    )
    assert read(tmp_path, line, "trace.jsonl").rows[0].options == expected


@pytest.mark.parametrize(
    ("column", "cell", "error"),
    [
        ("deadline_s", "0", "must be a number of seconds above 0, got '0'"),
        ("ttft_s", "soon", "must be a number of seconds above 0, got 'soon'"),
        ("jct_s", "inf", "must be a number of seconds above 0, got 'inf'"),
        ("priority", "1.5", "must be an integer, got '1.5'"),
        ("class", "batch", "must be one of real-time, best-effort, got 'batch'"),
    ],
)
def test_invalid_request_options_are_refused(tmp_path: Path, column: str, cell: str, error: str) -> None:
    text = f"prompt_tokens,output_tokens,{column}\n10,5,{cell}\n"
    assert error_of(tmp_path, text) == f"trace.csv line 2, column 6 ({column}): {error}"


def test_calls_of_programs_follow_each_other_after_pauses(tmp_path: Path) -> None:
    names = "arrival_s,prompt_tokens,output_tokens,program,pause_s\n"
    trace = read(tmp_path, names + "0,9,5,a,\n1,9,5,b,\n2,9,5,a,0.5\n3,9,5,,\n4,9,5,a,0\n5,9,5,b,\n6,9,5,b,2\n")
    jobs = Replay(trace).draw(None, None, 0)
    assert [(job.program, job.pause_s) for job in jobs[2:5]] == [("a", 0.5), ("", None), ("a", 0.0)]
    # A call without a pause is sent at its own time, and begins another chain.
    assert chains_of(jobs) == [[0, 2, 4], [1], [3], [5, 6]]
    with pytest.raises(ConfigError, match=r"closed and the column pause_s of trace\.csv exclude each other"):
        with_closed(Replay(trace), [parse_closed("name=be,lengths=fixed:8,8,size=2")])


@pytest.mark.parametrize(
    ("cells", "error"),
    [
        ("0,9,5,a,1", "column 9 (pause_s): must be empty, because no row before is of its program, got '1'"),
        ("0,9,5,,1", "column 8 (pause_s): must be a number of seconds of at least 0, of a row with a program, got '1'"),
        ("0,9,5,a,-1", "column 9 (pause_s): must be a number of seconds of at least 0, of a row with a program, got"),
        ("0,9,5,\u00e9,", "column 7 (program): must be 1 to 512 printable characters of ASCII, got"),
        (",9,5,a,", "column 6 (program): needs arrival_s: rows without it are drawn one by one, got 'a'"),
    ],
)
def test_invalid_calls_are_refused(tmp_path: Path, cells: str, error: str) -> None:
    text = f"arrival_s,prompt_tokens,output_tokens,program,pause_s\n{cells}\n"
    assert error_of(tmp_path, text).startswith(f"trace.csv line 2, {error}")


def test_a_best_effort_row_may_not_have_a_tpot_objective(tmp_path: Path) -> None:
    text = "prompt_tokens,output_tokens,class,tpot_s\n10,5,best-effort,1\n"
    assert "(tpot_s): must be empty for class best-effort" in error_of(tmp_path, text)
    classes = read(tmp_path, "prompt_tokens,output_tokens,class\n10,5,best-effort\n")
    with pytest.raises(ConfigError, match=r"best_effort and the column class of trace\.csv exclude each other"):
        Replay(classes, arrivals=parse_arrivals("constant"), best_effort=0.5)


def test_azure_headers_and_timestamps_are_read(tmp_path: Path) -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n{}18:15:50.9951690,396,109\n"
    for day in ("2023-11-16 ", "2023-11-16T"):
        first, second = read(tmp_path, text.format(day)).rows
        assert (first[1:3], second[1:3]) == ((374, 44), (396, 109))
        assert second[0] - first[0] == pytest.approx(4.314579, abs=1e-5)
    (row,) = read(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,1,2\n").rows
    assert row.arrival_s == pytest.approx(1715299200.00993, abs=1e-5)


def test_unknown_columns_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("prompt_tokens,output_tokens,client,deadline_ms,pred\n10,5,a,200,3\n")

    def workload(ignore: str | None = None, reads: tuple[str, ...] = ()) -> Workload:
        return LoadOptions(trace=file, ignore_columns=ignore).workload(reads=reads)

    with pytest.raises(
        ConfigError, match=r"trace\.csv: unknown column deadline_ms; did you mean deadline_s\?; known are"
    ):
        workload()
    with pytest.raises(ConfigError, match=r"unknown column pred; .*; --ignore-columns pred leaves it out"):
        workload("deadline_ms")
    workload("deadline_ms, pred")
    workload("deadline_ms", ("pred",))
    with pytest.raises(ConfigError, match="ignore_columns goes with trace"):
        LoadOptions(ignore_columns="pred").workload()


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
def test_recorded_traces_can_be_read(name: str, rows: int, has_arrivals: bool) -> None:
    trace = read_trace(Path(str(TRACES)) / name)
    assert (len(trace.rows), trace.has_arrivals) == (rows, has_arrivals)
