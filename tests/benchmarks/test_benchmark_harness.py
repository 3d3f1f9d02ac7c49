from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

import harness
from support.figures import BENCHMARKS

SCRIPTS = sorted(
    path.relative_to(BENCHMARKS)
    for path in BENCHMARKS.glob("performance/*/*.py")
    if path.parent.name != "gpu" and "harness.parser" in path.read_text(encoding="utf-8")
)


def test_every_second_round_runs_in_reverse_order() -> None:
    assert [harness.in_turn("abc", turn) for turn in range(3)] == [list("abc"), list("cba"), list("abc")]


def test_ratios_compare_common_rounds() -> None:
    assert harness.median_ratio([2.0, 6.0, 9.0], [1.0, 2.0]) == 2.5


def test_spreads_have_median_and_range_of_each_figure() -> None:
    assert harness.spreads([{"ms": 3.0}, {"ms": 1.0}, {"ms": 2.0}]) == {"ms": {"median": 2.0, "min": 1.0, "max": 3.0}}


def test_unknown_parts_are_rejected_with_the_known_ones() -> None:
    parse = harness.some_of("parts", ("rates", "kills"))
    assert parse("kills, rates") == ["kills", "rates"]
    with pytest.raises(argparse.ArgumentTypeError, match="parts must be of rates, kills, got hop"):
        parse("rates,hop")


def test_records_contain_command_and_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = BENCHMARKS / "performance" / "parity" / "run.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--repeats", "2", "--out", str(tmp_path / "record.json")])
    record = harness.new_record(rows=[1])
    assert record["command"] == "python benchmarks/performance/parity/run.py --repeats 2 --out record.json"
    assert record["machine"]["cores"]
    harness.write_record(record, tmp_path / "record.json")
    assert harness.read_record(tmp_path / "record.json") == json.loads(json.dumps(record))
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_failed_commands_are_named() -> None:
    with pytest.raises(RuntimeError, match="skipjoin simulate"):
        harness.records_of("simulate", "--no-such-option")


def test_scripts_use_the_harness_for_options_and_records() -> None:
    assert len(SCRIPTS) >= 15
    for script in SCRIPTS:
        text = (BENCHMARKS / script).read_text(encoding="utf-8")
        assert "ArgumentParser(" not in text, script
        assert "describe_machine" not in text, script


def test_a_script_runs_at_its_minimum_size(tmp_path: Path) -> None:
    script = BENCHMARKS / "performance" / "output_parser" / "run.py"
    command = [sys.executable, str(script), "--repeats", "1", "--tokens", "10", "--out", str(tmp_path / "record.json")]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    record = harness.read_record(tmp_path / "record.json")
    assert list(record)[:3] == ["date", "command", "machine"]
    assert all(row["begin_us"]["median"] > 0 for row in record["rows"])
