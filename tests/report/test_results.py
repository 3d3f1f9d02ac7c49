from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipjoin.config import ConfigError
from skipjoin.report.results import DISTRIBUTIONS, Record, ResultsFile, load_results

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


def make_record(seed: int = 0, **changes: Any) -> Record:
    record: Record = {"recipe": "fcfs", "model": "tally", "hardware": "cpu", "driver": "http"}
    record["workload"] = {"rate_rps": 1.0, "seed": seed}
    record |= {"requests": {"submitted": 1}, "duration_s": 2.0, "throughput_rps": 0.5, "throughput_tps": 10}
    record |= {name: {"mean": 0.1} for name in DISTRIBUTIONS}
    return record | changes


def test_the_file_is_valid_after_every_append_with_one_record_per_line(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    file = ResultsFile(path)
    assert not path.exists()
    for seed in range(3):
        file.append(make_record(seed))
        assert load_results([path]) == [make_record(done) for done in range(seed + 1)]
        assert len(path.read_text().splitlines()) == seed + 3
        assert list(tmp_path.iterdir()) == [path]


def test_records_can_be_sorted_at_the_end(tmp_path: Path) -> None:
    file = ResultsFile(tmp_path / "r.json")
    for seed in (2, 0, 1):
        file.append(make_record(seed))
    file.sort(lambda record: record["workload"]["seed"])
    assert load_results([file.path]) == [make_record(seed) for seed in range(3)]


@given(settings=st.dictionaries(st.text(), JSON, max_size=4))
def test_appended_records_are_loaded_unchanged(
    tmp_path_factory: pytest.TempPathFactory, settings: dict[str, Any]
) -> None:
    path = tmp_path_factory.mktemp("round") / "r.json"
    ResultsFile(path).append(make_record(settings=settings))
    assert load_results([path]) == [make_record(settings=settings)]


def test_a_failed_append_leaves_the_file_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.json"
    file = ResultsFile(path)
    file.append(make_record(0))
    with pytest.raises(ValueError, match="not JSON compliant"):
        file.append(make_record(1, duration_s=float("nan")))

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", full_disk)
        with pytest.raises(ConfigError, match=f"disk full: no space is left in the folder {tmp_path}"):
            file.append(make_record(2))
    assert load_results([path]) == [make_record(0)]
    assert list(tmp_path.iterdir()) == [path]


def test_an_existing_file_is_replaced_or_extended_only_on_request(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    ResultsFile(path).append(make_record(0))
    with pytest.raises(ConfigError, match=r"r\.json exists"):
        ResultsFile(path)
    ResultsFile(path, existing="extend").append(make_record(1))
    assert load_results([path]) == [make_record(0), make_record(1)]
    file = ResultsFile(path, existing="replace")
    assert len(load_results([path])) == 2, "old records are kept until there is a new one"
    file.append(make_record(2))
    assert load_results([path]) == [make_record(2)]


@pytest.mark.parametrize("existing", ["replace", "extend"])
def test_a_file_that_holds_no_records_is_never_modified(tmp_path: Path, existing: Any) -> None:
    path = tmp_path / "notes.json"
    path.write_text('[{"note": "keep me"}]')
    with pytest.raises(ConfigError, match=r"notes\.json: record 1: missing recipe"):
        ResultsFile(path, existing=existing)
    assert "keep me" in path.read_text()
    with pytest.raises(ConfigError, match="Is a directory"):
        ResultsFile(tmp_path, existing=existing)


def test_an_empty_file_may_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.touch()
    ResultsFile(path).append(make_record())
    assert load_results([path]) == [make_record()]


def test_symbolic_links_are_preserved(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "target.json")
    ResultsFile(tmp_path / "link.json").append(make_record())
    assert (tmp_path / "link.json").is_symlink()
    assert load_results([tmp_path / "target.json"]) == [make_record()]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no folder .*nowhere"):
        ResultsFile(tmp_path / "nowhere" / "r.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[\n{"recipe": "fcfs",}\n]', r"r\.json line 2, column \d+: "),
        ("", r"r\.json: the file is empty"),
        ('{"recipe": "fcfs"}', "must be an array of result records, got an object"),
        ("[1]", "record 1: must be an object, got a number"),
        ("[NaN]", "NaN is not a JSON number"),
        ("[" * 100_000, r"r\.json: "),
    ],
)
def test_errors_of_malformed_files_name_the_position(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_results([path])


def test_missing_and_binary_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    with pytest.raises(ConfigError, match=r"r\.json: No such file"):
        load_results([path])
    path.write_bytes(b"[\xff]")
    with pytest.raises(ConfigError, match=r"r\.json: not a text file \(byte 1 is not UTF-8\)"):
        load_results([path])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"throughput_rps": None}, "throughput_rps must be a number, got null"),
        ({"throughput_rps": True}, "throughput_rps must be a number, got true or false"),
        ({"recipe": 3}, "recipe must be a string, got a number"),
        ({"ttft_s": [0.1]}, "ttft_s must be an object, got an array"),
        ({"breakdown_s": "none"}, "breakdown_s must be an object or null, got a string"),
        ({"workload": {"rate_rps": "2"}}, "workload.rate_rps must be a number or null, got a string"),
        ({"quantiles": {"ttft_s": [1.0, 2.0]}}, "quantiles.ttft_s must be 101 numbers, or none"),
        ({"quantiles": {"ttft_s": None}}, "quantiles.ttft_s must be 101 numbers, or none"),
        ({"series": {"time_s": [0.0, 1.0], "kv_used": [0.5]}}, "series must be lists of numbers, equally long"),
        ({"series": {"time_s": None, "kv_used": [0.5]}}, "series must be lists of numbers, equally long"),
    ],
)
def test_errors_of_invalid_records_name_the_number_and_field(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps([make_record(), make_record(), make_record(**changes)]))
    with pytest.raises(ConfigError, match=f"record 3: {message}"):
        load_results([path])


@pytest.mark.parametrize("name", sorted(make_record()))
def test_a_missing_field_is_named(tmp_path: Path, name: str) -> None:
    record = make_record()
    del record[name]
    path = tmp_path / "r.json"
    path.write_text(json.dumps([record]))
    with pytest.raises(ConfigError, match=f"record 1: missing {name}"):
        load_results([path])


def test_multiple_files_are_read_in_order(tmp_path: Path) -> None:
    paths = [tmp_path / "b.json", tmp_path / "a.json"]
    for seed, path in enumerate(paths):
        ResultsFile(path).append(make_record(seed))
    assert load_results(paths) == [make_record(0), make_record(1)]
