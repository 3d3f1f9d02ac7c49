from __future__ import annotations

import contextlib
import json
import logging
import types

import pytest
import torch

pytest.importorskip("triton")

from skipjoin.model.kernels import choices, tuning
from skipjoin.model.kernels.choices import Shape, tune_attention
from skipjoin.model.kernels.tuning import TunedTable, source_hash, table_path

CONFIGS = [{"BLOCK_N": 64, "num_warps": 4}, {"BLOCK_N": 32, "num_warps": 2}, {"BLOCK_N": 128, "num_warps": 8}]
TIMES = {64: 3.0, 32: 1.0, 128: 2.0}


class Runs:
    def __init__(self, refuses=()) -> None:
        self.ran, self.refuses = [], refuses

    def run(self, config, turn):
        if config["BLOCK_N"] in self.refuses:
            raise RuntimeError("out of resources: shared memory")
        self.ran.append(config["BLOCK_N"])

    def timer(self, call, turns):
        call(turns - 1)
        return TIMES[self.ran[-1]]


def test_configs_are_measured_once_and_shared(tmp_path):
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
        # Other keys, kernels and sources are unmeasured, and removed configs are not chosen.
        assert known.find("decode", "abc", (*key, 1), CONFIGS) == CONFIGS[0]
        assert known.find("prefill", "abc", key, CONFIGS) == CONFIGS[0]
        assert known.find("decode", "abd", key, CONFIGS) == CONFIGS[0]
        assert known.find("decode", "abc", key, CONFIGS[2:]) == CONFIGS[2]


def test_concurrent_processes_keep_each_others_choices(tmp_path):
    path, runs = tmp_path / "table.json", Runs()
    tables = [TunedTable(path, runs.timer) for _ in range(2)]
    for i, table in enumerate(tables):
        table.measure("decode", "abc", (i,), CONFIGS, runs.run)
    assert sorted(json.loads(path.read_text())) == ["decode/abc/0", "decode/abc/1"]
    assert [p.name for p in tmp_path.iterdir()] == ["table.json"]


def test_configs_that_fail_are_skipped(tmp_path):
    runs = Runs(refuses=(32,))
    table = TunedTable(None, runs.timer)
    assert table.measure("decode", "abc", (), CONFIGS, runs.run) == CONFIGS[2]
    runs = Runs(refuses=(32, 64, 128))
    table = TunedTable(tmp_path / "table.json", runs.timer)
    assert table.measure("decode", "abc", (), CONFIGS, runs.run) == CONFIGS[0]
    assert not table.known("decode", "abc", ())


def test_damaged_or_unwritable_tables_are_warned_about(tmp_path, caplog):
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


def test_table_paths_follow_device_and_version(monkeypatch, tmp_path):
    monkeypatch.setenv("SKIPJOIN_KERNEL_CACHE", str(tmp_path))
    assert table_path("NVIDIA H100 80GB HBM3", "3.6.0") == tmp_path / "NVIDIA-H100-80GB-HBM3-3.6.0.json"
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text("x")
    second.write_text("y")
    assert len({source_hash(str(first)), source_hash(str(second)), source_hash(str(first), str(second))}) == 3


class FakeGpu:
    """Fake torch.cuda with a clock; kernels take a millisecond each, Python takes a second."""

    def __init__(self, monkeypatch) -> None:
        self.now, self.captured, self.graphs = 0.0, None, []
        for name, value in {
            "Event": lambda enable_timing: FakeEvent(self),
            "CUDAGraph": lambda: types.SimpleNamespace(kernels=0, replay=self.replay),
            "graph": self.capture,
            "synchronize": lambda: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    @contextlib.contextmanager
    def capture(self, graph, capture_error_mode):
        assert capture_error_mode == "thread_local"  # the engine has other threads
        self.captured = 0
        yield
        self.graphs.append(self.captured)
        self.captured = None

    def launch(self, turn) -> None:
        self.now += 1000.0
        if self.captured is not None:
            assert turn == self.captured
            self.captured += 1

    def replay(self) -> None:
        self.now += self.graphs[-1]


class FakeEvent:
    def __init__(self, gpu) -> None:
        self.gpu = gpu

    def record(self) -> None:
        self.at = self.gpu.now

    def elapsed_time(self, end) -> float:
        return end.at - self.at


def test_timer_excludes_python(monkeypatch):
    gpu = FakeGpu(monkeypatch)
    assert tuning.cuda_ms(gpu.launch, 20) == pytest.approx(1.0)
    assert gpu.graphs == [20]


class Measured:
    """Empty table that records what it is asked to measure."""

    def __init__(self) -> None:
        self.asked = []

    def known(self, *key) -> bool:
        return False

    def measure(self, name, *choice_and_work) -> None:
        _, _, configs, run, turns = choice_and_work
        self.asked.append((name, turns, [run(configs[0], turn) for turn in range(turns)]))


def test_measured_calls_read_uncached_keys(monkeypatch):
    """Each call reads keys of its own, and all calls together read more than the cache holds."""
    read = []
    monkeypatch.setattr(choices.decode, "share_out", lambda batch, **rest: None)
    monkeypatch.setattr(choices.decode, "decode_attention", lambda *args, **rest: read.append(args[5]))
    monkeypatch.setattr(choices.prefill, "prefill_attention", lambda *args, **rest: read.append(args[5].block_tables))
    monkeypatch.setattr(choices, "_DECODES", (1, 4))
    monkeypatch.setattr(choices, "_PROMPTS", (8,))
    table, shape, cache = Measured(), Shape(torch.float32, 1, 16, 16), 4 << 20
    tune_attention(table, shape, 1, torch.device("cpu"), 4, cache)
    token_bytes = 2 * 16 * 4
    for name, turns, calls in table.asked:
        tables, read = read[: len(calls)], read[len(calls) :]
        blocks = torch.cat([table.flatten() for table in tables])
        assert len(set(blocks.tolist())) == len(blocks), name
        assert len(blocks) * 16 * token_bytes >= 2 * cache
        assert turns >= 20
    assert [name for name, *_ in table.asked] == ["decode", "decode", "prefill"]
    # Calls that each read more than half of the memory share one slice.
    monkeypatch.setattr(choices, "_POOL_BYTES", 1024 * token_bytes)
    table, read = Measured(), []
    tune_attention(table, shape, 1, torch.device("cpu"), 4, cache)
    assert len({tuple(blocks.flatten().tolist()) for blocks in read[: len(table.asked[0][2])]}) == 1


def test_choices_of_other_measurement_methods_are_ignored():
    """Entries of single calls have another hash."""
    kernels = [choices.paged, choices.decode, choices.prefill]
    assert choices.decode_choice(Shape(torch.float32, 1, 16, 16), 1)[1] != source_hash(*(m.__file__ for m in kernels))


def test_out_of_memory_during_tuning_is_warned_about(monkeypatch, caplog):
    def full(*args, **rest):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore")

    monkeypatch.setattr(choices.torch, "randn", full)
    tune_attention(Measured(), Shape(torch.float32, 1, 16, 16), 1, torch.device("cpu"), 4, 1)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning == (
        "too little memory to measure kernel sizes; the default sizes are used: "
        "CUDA out of memory. Tried to allocate 2.00 GiB."
    )
