"""The table of tuned sizes: measured with a timer of the test's own, kept on disk, never in the way."""

from __future__ import annotations

import json
import logging

from skipjoin.model.kernels.tuning import TunedTable, source_hash, table_path

CONFIGS = [{"BLOCK_N": 64, "num_warps": 4}, {"BLOCK_N": 32, "num_warps": 2}, {"BLOCK_N": 128, "num_warps": 8}]
TIMES = {64: 3.0, 32: 1.0, 128: 2.0}


class Runs:
    """A kernel whose runs are counted; its time is that of the last config it ran with."""

    def __init__(self, refuses=()) -> None:
        self.ran, self.refuses = [], refuses

    def run(self, config):
        if config["BLOCK_N"] in self.refuses:
            raise RuntimeError("out of resources: shared memory")
        self.ran.append(config["BLOCK_N"])

    def timer(self, call):
        call()
        return TIMES[self.ran[-1]]


def test_measured_once_and_found_by_others(tmp_path):
    path, runs = tmp_path / "deep" / "table.json", Runs()
    table = TunedTable(path, runs.timer)
    key = ("bfloat16", 4, 128)
    assert table.find("decode", "abc", key, CONFIGS) == CONFIGS[0]
    assert not table.known("decode", "abc", key)
    assert table.measure("decode", "abc", key, CONFIGS, runs.run) == CONFIGS[1]
    assert runs.ran == [64, 32, 128]
    for known in (table, TunedTable(path)):
        assert known.known("decode", "abc", key)
        assert known.find("decode", "abc", key, CONFIGS) == CONFIGS[1]
        # Another key, kernel or source was not measured, and a config that is gone is no choice.
        assert known.find("decode", "abc", (*key, 1), CONFIGS) == CONFIGS[0]
        assert known.find("prefill", "abc", key, CONFIGS) == CONFIGS[0]
        assert known.find("decode", "abd", key, CONFIGS) == CONFIGS[0]
        assert known.find("decode", "abc", key, CONFIGS[2:]) == CONFIGS[2]


def test_two_processes_keep_each_others_choices(tmp_path):
    path, runs = tmp_path / "table.json", Runs()
    tables = [TunedTable(path, runs.timer) for _ in range(2)]
    for i, table in enumerate(tables):
        table.measure("decode", "abc", (i,), CONFIGS, runs.run)
    assert sorted(json.loads(path.read_text())) == ["decode/abc/0", "decode/abc/1"]
    assert [p.name for p in tmp_path.iterdir()] == ["table.json"]


def test_what_a_device_refuses_is_left_out(tmp_path):
    runs = Runs(refuses=(32,))
    table = TunedTable(None, runs.timer)
    assert table.measure("decode", "abc", (), CONFIGS, runs.run) == CONFIGS[2]
    runs = Runs(refuses=(32, 64, 128))
    table = TunedTable(tmp_path / "table.json", runs.timer)
    assert table.measure("decode", "abc", (), CONFIGS, runs.run) == CONFIGS[0]
    assert not table.known("decode", "abc", ())


def test_damaged_or_forbidden_files_are_only_a_warning(tmp_path, caplog):
    path, runs = tmp_path / "table.json", Runs()
    for damage in ("{", "[1]", "\udcff"):
        path.write_text(damage, encoding="utf-8", errors="surrogateescape")
        with caplog.at_level(logging.WARNING):
            table = TunedTable(path, runs.timer)
        assert len(caplog.records) == 1
        assert "ignored" in caplog.text
        caplog.clear()
    path.write_text('{"decode/abc/": {"BLOCK_N": 7}, "decode/abc/1": 5}')
    table = TunedTable(path, runs.timer)
    assert table.find("decode", "abc", (), CONFIGS) == table.find("decode", "abc", (1,), CONFIGS) == CONFIGS[0]
    (tmp_path / "file").touch()
    table = TunedTable(tmp_path / "file" / "table.json", runs.timer)
    with caplog.at_level(logging.WARNING):
        assert table.measure("decode", "abc", (), CONFIGS, runs.run) == CONFIGS[1]
    assert "cannot be saved" in caplog.text


def test_where_tables_are(monkeypatch, tmp_path):
    monkeypatch.setenv("SKIPJOIN_KERNEL_CACHE", str(tmp_path))
    assert table_path("NVIDIA H100 80GB HBM3", "3.6.0") == tmp_path / "NVIDIA-H100-80GB-HBM3-3.6.0.json"
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text("x")
    second.write_text("y")
    assert len({source_hash(str(first)), source_hash(str(second)), source_hash(str(first), str(second))}) == 3
