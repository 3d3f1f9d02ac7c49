from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skipjoin.sim.models import model_shape
from support.scripts import load

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "performance" / "gpu"


RUN, FLOOR = load("benchmarks/performance/gpu/run.py"), load("benchmarks/performance/gpu/floor.py")


@pytest.mark.exhaustive  # as of the other parts; each takes 10 s
def test_rehearsals_are_marked_and_report_their_measurements(tmp_path: Path) -> None:
    result = rehearsal(tmp_path, "decode")
    assert "--parts machine,decode --minutes 3 --rehearse" in result["command"]
    ceilings = result["parts"]["machine"]["figures"]["ceilings"]
    check_decodes(result["parts"]["decode"]["figures"]["batches"], ceilings["copy_bytes_per_s"])


@pytest.mark.exhaustive
def test_rehearsals_of_prefill_report_their_measurements(tmp_path: Path) -> None:
    result = rehearsal(tmp_path, "prefill")
    ceilings = result["parts"]["machine"]["figures"]["ceilings"]
    steps = result["parts"]["prefill"]["figures"]["steps"]
    assert list(steps) == ["1 x 64", "4 x 16"]
    one, four = steps.values()
    assert one["step_ms"]["min"] <= one["step_ms"]["median"] <= one["step_ms"]["max"]
    assert one["of_rate"] == pytest.approx(one["flop_per_s"] / ceilings["matmul_flop_per_s"], rel=1e-3)
    # Llama with 2 layers of 4 heads of 16, of which 2 have keys and values, width 64, 128 in the MLP, and 512 tokens.
    # Counted are two operations per weight and token, the output head for sampled tokens, and four per dimension of a
    # query-key pair.
    weights, head = 2 * (2 * 64 * 16 * (4 + 2) + 3 * 64 * 128), 64 * 512
    assert one["flop"] == 2 * 64 * weights + 2 * head + 4 * 2 * 64 * (64 * 65 // 2)
    assert four["flop"] == 2 * 64 * weights + 2 * 4 * head + 4 * 2 * 64 * 4 * (16 * 17 // 2)


@pytest.mark.exhaustive
def test_rehearsals_of_kernels_and_recipes_report_their_measurements(tmp_path: Path) -> None:
    result = rehearsal(tmp_path, "attention,pressure,copies")
    found = {name: part["figures"] for name, part in result["parts"].items()}
    assert all(move["share"]["median"] > 0 for move in found["copies"]["moves"])
    assert [copy["swap_dtype"] for copy in found["copies"]["concurrent"]] == ["auto", "int8", "auto"]
    assert set(found["attention"]["flash"].values()) == {True}
    cases = [case for case in found["attention"]["cases"] if case["implementation"] != "flash"]
    assert [case["kind"] for case in cases] == ["decode"] * 2 + ["prefill"] * 6
    assert all(case["difference"] < (0.02 if "int8" in case["implementation"] else 1e-5) for case in cases)
    runs = found["pressure"]["runs"]
    kinds = [(run["recipe"], run["swap_dtype"]) for run in runs]
    assert kinds == [("fastserve", "auto"), ("fcfs", "auto"), ("fastserve", "int8")]
    assert all(run["record"]["requests"]["finished"] for run in runs)
    assert runs[0]["swaps"] > 0
    assert not any(run["is_enough"] for run in runs)


@pytest.mark.exhaustive
def test_rehearsals_of_steps_compare_them_with_each_other(tmp_path: Path) -> None:
    result = rehearsal(tmp_path, "mixed,small,ranks")
    found = {name: part["figures"] for name, part in result["parts"].items()}
    assert list(found["mixed"]["steps"]) == ["0", "8", "16"]
    assert all(step["step_ms"]["median"] > 0 for step in found["mixed"]["steps"].values())
    drawn, greedy = (found["small"]["batches"][name] for name in ("4 top-k, top-p", "4"))
    assert drawn["of_greedy"] == pytest.approx(drawn["step_ms"]["median"] / greedy["step_ms"]["median"], rel=1e-3)
    assert found["ranks"] == {"pair": [{"gloo": True}] * 2, "alone": {"backend": "gloo", "replayed": True}}


@pytest.mark.exhaustive
def test_rehearsals_of_peers_load_two_servers_in_turns(tmp_path: Path) -> None:
    loads = rehearsal(tmp_path, "peers")["parts"]["peers"]["figures"]["loads"]
    assert list(loads) == ["decode 4", "ShareGPT, 8/s"]
    for found in loads.values():
        assert all(run["requests"]["finished"] for runs in found["runs"].values() for run in runs)
        assert found["ratio"] > 0


def rehearsal(out: Path, parts: str, minutes: float = 3) -> dict[str, Any]:
    command = [sys.executable, str(FOLDER / "run.py"), "--rehearse", "--out", str(out), "--parts", parts]
    command += ["--minutes", f"{minutes:g}"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60 + 60 * minutes)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert not (out / "result.json").exists()
    result = json.loads((out / "rehearsal.json").read_text())
    assert (result["device"], result["rehearsal"]) == ("cpu", True)
    assert result["machine"]["versions"]["torch"]
    assert set(result["parts"]) == {"machine", *parts.split(",")}
    for outcome in result["parts"].values():
        assert outcome["status"] == "ok"
        assert outcome["seconds"] > 0
        assert outcome["date"]
    return result


def check_decodes(batches: dict[str, Any], bandwidth: float) -> None:
    assert list(batches) == ["4", "1"]
    for batch, found in batches.items():
        # Weights and output head, plus keys and values of 2 layers with 2 heads of 16, two bytes each.
        context = found["context_mean"] * int(batch)
        read = 2 * (2 * (2 * 64 * 16 * (4 + 2) + 3 * 64 * 128) + 64 * 512) + context * 2 * 2 * 2 * 16 * 2
        assert found["bytes"] == pytest.approx(read, abs=2 * 2 * 2 * 16 * 2)
        assert 44 < found["context_mean"] < 56
        assert found["of_read_floor"] > 0
        assert found["floor_ms"] >= found["bytes"] / bandwidth * 1e3 * 0.999
        assert found["of_floor"] == pytest.approx(found["floor_ms"] / found["step_ms"]["median"], rel=1e-3)
        assert found["step_ms"]["runs"] == 6
        assert 0 < found["scheduling_share"] < 1
        assert found["forward"]["ms"]["runs"] == 20


def test_failed_and_hung_parts_are_reported_with_their_logs() -> None:
    task = {"device": "cpu", "seconds": 1.0, "ceilings": {}}
    failed = RUN.run_part(RUN.Part("nothing", 1.0), task, 60.0)
    assert (failed["status"], failed["figures"]) == ("failed with exit code 1", {})
    assert "KeyError: 'nothing'" in failed["log"]
    hung = RUN.run_part(RUN.Part("machine", 1.0), task, 0.05)
    assert hung["status"] == "stopped after 0 s"
    assert hung["seconds"] < 30


def test_nothing_is_written_if_the_machine_cannot_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = {"status": "failed with exit code 1", "seconds": 1.0, "figures": {}, "log": "there is no GPU"}
    monkeypatch.setattr(RUN, "run_part", lambda part, task, limit_s: failed)
    with pytest.raises(RuntimeError, match="there is no GPU"):
        RUN.run_all(RUN.chosen(None), 1.0, tmp_path / "result.json", rehearse=False)
    assert not list(tmp_path.iterdir())


def test_earlier_parts_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "result.json"
    ceilings = {"machine": {"gpu": "a GPU"}, "ceilings": {}}
    found = {"machine": ceilings, "decode": {"batches": {}}}

    def run_part(part: object, task: dict[str, object], limit_s: float) -> dict[str, object]:
        figures = dict(found[part.name])
        return {"status": "ok" if figures else "failed", "seconds": 1.0, "figures": figures}

    monkeypatch.setattr(RUN, "run_part", run_part)
    RUN.run_all(RUN.chosen("decode"), 1.0, file, rehearse=False)
    found["decode"] = {}
    result = RUN.run_all(RUN.chosen("decode"), 1.0, file, rehearse=False)
    assert result == json.loads(file.read_text())
    assert result["parts"]["decode"]["figures"] == {"batches": {}}
    assert result["statuses"] == {"machine": "ok", "decode": "failed"}
    assert "decode     failed, 1 s" in RUN.summary(result)
    assert result["parts"]["decode"]["gpu"] == "a GPU"


def test_unknown_benchmark_parts_are_rejected() -> None:
    assert RUN.chosen(None) == list(RUN.PARTS)
    with pytest.raises(ValueError, match="parts must be of machine, attention, "):
        RUN.chosen("decode,other")
    assert [part.name for part in RUN.chosen("copies,decode")] == ["machine", "decode", "copies"]


def test_the_plan_fits_a_quarter_of_an_hour() -> None:
    assert sum(minutes for _, minutes in RUN.STAGES.values()) < 13
    assert all(len(RUN.chosen(parts)) > 1 for parts, _ in RUN.STAGES.values())


def test_decode_floor_includes_computation() -> None:
    """At batch 256 an H100 computes for as long as it reads, and no product overlaps another one's reads."""
    shape, machine = model_shape("llama-3-8b"), {"copy_bytes_per_s": 3e12, "matmul_flop_per_s": 7e14}
    read, alone = FLOOR.floor_of(shape, 1, 1024, machine)
    weights = shape.parameter_bytes * (shape.layers * shape.layer_parameters + shape.head_parameters)
    assert read == weights + 1024 * shape.kv_bytes_per_token
    assert alone == pytest.approx(read / 3e12)
    for batch in (256, 1024):
        read, floor = FLOOR.floor_of(shape, batch, batch * 1024, machine)
        assert floor == pytest.approx(batch * 2 * weights / shape.parameter_bytes / 7e14 + (read - weights) / 3e12)
        assert floor > 1.02 * read / 3e12
