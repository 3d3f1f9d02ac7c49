from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from skipjoin.cli import app
from skipjoin.observe.record import Record
from skipjoin.report.bound import Bounds, parse_bound
from skipjoin.report.results import load_results
from skipjoin.sim.experiments.cell import Cell, Extent
from skipjoin.sim.experiments.simulation import run
from skipjoin.sim.experiments.sweep import Grid, RateSearch, ReplicaSearch, sweep
from support.simulated import CELL, SYSTEM, WORKLOAD, repeatable
from support.waiting import wait_until
from support.worlds import exhaustive

SKIPJOIN = str(Path(sys.executable).parent / "skipjoin")
SMALL = ["--model", "opt-13b", "--kv-gib", "11", "--lengths", "uniform:8-64,4-16", "--duration", "20"]


class Collector:
    def __init__(self) -> None:
        self.cells: dict[int, Cell] = {}
        self.records: dict[int, Record] = {}

    def begun(self, number: int, cell: Cell) -> None:
        self.cells[number] = cell

    def share(self, number: int, share: float) -> None:
        assert 0 <= share <= 1

    def done(self, number: int, record: Record) -> None:
        self.records[number] = record


def test_parallel_processes_give_the_same_records() -> None:
    cells = [replace(CELL, extent=replace(CELL.extent, seed=seed)) for seed in range(2)]
    collected = Collector()
    sweep([Grid(cells)], 2, collected)
    assert [repeatable(collected.records[number]) for number in range(2)] == [repeatable(run(cell)) for cell in cells]


def test_shards_in_processes_give_the_same_records() -> None:
    cell = Cell(replace(SYSTEM, replicas=130, recipe="fcfs"), WORKLOAD, Extent(150.0, 1.0, 0))
    assert cell.shards == 3
    collected = Collector()
    sweep([Grid([cell, CELL])], 2, collected)
    assert [repeatable(collected.records[number]) for number in (0, 1)] == [
        repeatable(run(cell)),
        repeatable(run(CELL)),
    ]


def test_a_search_brackets_the_bound() -> None:
    bound = parse_bound("ttft_s.mean<=0.5")
    search = RateSearch([Cell(SYSTEM, WORKLOAD, Extent(1.0, 1.0, seed)) for seed in (0, 1)], bound)
    cells, means = list(search.first()), {}
    while cells:
        rate = cells[0].extent.rate_rps
        assert {cell.extent.rate_rps for cell in cells} == {rate}
        records = [run(cell) for cell in cells]
        means[rate] = sum(map(bound.value, records)) / len(records)
        cells = [more for cell, record in zip(cells, records, strict=True) for more in search.then(cell, record)]
    holds = max(rate for rate, mean in means.items() if mean <= 0.5)
    breaks = min(rate for rate, mean in means.items() if mean > 0.5)
    assert holds < breaks <= 1.02 * holds
    assert len(means) < 20


def test_a_search_ends_for_bounds_that_always_or_never_hold() -> None:
    record = run(CELL)
    for text in ("ttft_s.mean<=1e9", "ttft_s.mean<=-1"):
        search = RateSearch([replace(CELL, workload=Fixed(1))], parse_bound(text))
        steps, cells = 0, list(search.first())
        while cells:
            cells = search.then(cells[0], record)
            steps += 1
        assert steps < 40


def test_a_search_ends_at_rates_without_requests() -> None:
    cell = Cell(SYSTEM, WORKLOAD, Extent(1.0, 20.0, 0))
    search = RateSearch([cell], parse_bound("normalized_latency_s.mean<=1e-9"))
    cells, lowest = list(search.first()), 1.0
    while cells:
        lowest = cells[0].extent.rate_rps or 0.0
        cells = search.then(cells[0], run(cells[0]))
    assert 0.01 < lowest < 0.5


@given(
    needed=st.integers(1, 20_000), start=st.integers(1, 300), requests=st.integers(1, 20_000), seeds=st.integers(1, 2)
)
def test_a_search_finds_the_fewest_replicas(needed: int, start: int, requests: int, seeds: int) -> None:
    """The bound holds from `needed` replicas on. The search never tries more replicas than there are requests."""
    start = min(start, requests)
    extents = [Extent(None, None, seed, limit=requests) for seed in range(seeds)]
    grid = [Cell(replace(SYSTEM, replicas=start), Fixed(requests), extent) for extent in extents]
    search, tried = ReplicaSearch(grid, parse_bound("slo.goodput_rps>=1")), dict[int, bool]()
    cells = list(search.first())
    while cells:
        (replicas,) = {cell.system.replicas for cell in cells}
        assert replicas not in tried
        tried[replicas] = replicas >= needed
        record = {"slo": {"goodput_rps": replicas / needed}}
        cells = [more for cell in cells for more in search.then(cell, record)]
    assert max(tried) <= min(max(start, requests), 10_000)
    assert len(tried) < 20
    if needed > min(requests, 10_000):
        assert not any(tried.values())
    else:
        found = min(replicas for replicas, holds in tried.items() if holds)
        assert found - needed <= max(0, 0.01 * found)


class Fixed:
    best_effort = None
    closed = ()

    def __init__(self, requests: int) -> None:
        self._requests = requests

    def draw(self, *extent: object) -> list[SimpleNamespace]:
        return [SimpleNamespace(parts=None, pause_s=None)] * self._requests

    def describe(self, *extent: object) -> dict[str, Any]:
        return {}


def simulate(*options: str) -> Result:
    """Run the command in this process, and its simulations unless `options` have other `--jobs`."""
    done = CliRunner().invoke(app, ["simulate", "--jobs", "1", *SMALL, *options])
    assert done.exit_code == 0, done.output
    return done


@pytest.mark.exhaustive  # test_a_search_brackets_the_bound searches, too
def test_the_command_finds_the_largest_rate(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ["--duration", "1.5", "--find-max-rate", "normalized_latency_s.mean<=0.1"]
    done = simulate("--recipes", "fcfs", *options, "--out", str(out))
    assert "largest req/s with normalized_latency_s.mean<=0.1" in done.stdout
    assert len(load_results([out])) > 5


def test_the_command_finds_the_fewest_replicas(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    bound = "normalized_latency_s.mean<=0.05"
    options = ["--recipes", "srpt", "--rates", "60,90", "--duration", "2", "--max-num-seqs", "8"]
    done = simulate(*options, "--find-min-replicas", bound, "--out", str(out))
    assert f"fewest replicas with {bound}" in done.stdout
    sizes: dict[tuple[str, float], dict[int, bool]] = {}
    for record in load_results([out]):
        tried = sizes.setdefault((record["recipe"], record["workload"]["rate_rps"]), {})
        tried[record["settings"]["replicas"]] = Bounds((parse_bound(bound),)).hold([record])
    for tried in sizes.values():
        fewest = min(replicas for replicas, holds in tried.items() if holds)
        assert fewest == 1 or tried[fewest - 1] is False
    assert len(sizes) == 2


def test_the_command_writes_a_timeline(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    simulate("--rates", "4", "--timeline", str(path))
    assert {"ph", "name"} <= set(json.loads(path.read_text())[0])


def test_a_single_run_records_each_request_and_reasons_of_rejection(tmp_path: Path) -> None:
    """The options have the same names and units as the server's."""
    trace, file = tmp_path / "trace.csv", tmp_path / "requests.jsonl"
    trace.write_text("arrival_s,prompt_tokens,output_tokens,deadline_s\n0,50,4,\n1,5000,4,\n2,50,400,0.1\n")
    command = f"simulate --model opt-13b --kv-cache-gib 4 --slo-ttft-ms 2000 --trace {trace} --record-requests {file}"
    done = CliRunner().invoke(app, [*command.split(), "--out", str(tmp_path / "out.json")])
    assert done.exit_code == 0, done.output
    whole, late, refused = (json.loads(line) for line in file.read_text().splitlines())
    assert (whole["due_s"], whole["prompt_tokens"], whole["output_tokens"], whole["error"]) == (0, 50, 4, None)
    assert 0 < whole["first_token_s"] < whole["last_token_s"] == whole["ended_s"] < 1
    assert (late["due_s"], late["output_limit"], late["error"]) == (2, 400, "deadline")
    assert (refused["due_s"], refused["prompt_tokens"], refused["error"]) == (1, 5000, "rejected")
    (record,) = load_results([tmp_path / "out.json"])
    assert record["slo"]["ttft_s"] == 2.0
    assert record["slo"]["ttft_attained"] == 0.666667
    assert "rejected" in done.stdout
    assert "1 of 3 requests rejected: prompt and output exceed the context of 2048 tokens" in done.stdout
    of_both = CliRunner().invoke(app, [*command.partition(" --record")[0].split(), "--recipes", "fcfs,sarathi"])
    assert " fcfs, sarathi at 1 req/s: 1 of 3 requests rejected" in of_both.stdout
    again = CliRunner().invoke(app, command.split())
    assert f"{file} exists; name another file, or --overwrite or --append it" in again.stderr


def test_a_sweep_records_the_requests_of_all_runs_in_order(tmp_path: Path) -> None:
    """The runs have several shards."""
    file, out = tmp_path / "requests.jsonl", tmp_path / "out.json"
    options = ["--recipes", "fcfs", "--rates", "4,1", "--replicas", "65", "--out", str(out)]
    simulate(*options, "--jobs", "2", "--record-requests", str(file))
    found = Counter((line["recipe"], line["rate_rps"]) for line in map(json.loads, file.read_text().splitlines()))
    assert list(found) == [("fcfs", 4), ("fcfs", 1)]
    records = load_results([out])
    assert found == {
        (record["recipe"], record["workload"]["rate_rps"]): record["requests"]["submitted"] for record in records
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--rates 1,2 --timeline x.json", "--timeline is for a single run"),
        ("--rates 1 --slo-ttft 1 --slo-ttft-ms 2", "--slo-ttft and --slo-ttft-ms are the same: give one of them"),
        ("--rates 0", "rates must be"),
        ("--rates 1,x", "rates must be a number"),
        ("", "rates must be given"),
        ("--rates 1 --recipes fcfs,sarthi", "did you mean sarathi"),
        ("--rates 1 --hardware a100-41gb", "a100-40gb"),
        ("--rates 1 --hardware missing.json", "missing.json"),
        ("--rates 1 --model opt-14b", "opt-13b"),
        ("--rates 1 --model opt-175b", "would do"),
        ("--rates 1 --trace missing.csv", "missing.csv"),
        ("--rates 1 --seeds 1-x", "seeds"),
        ("--rates 1,1.0", "rates must be different"),
        ("--rates 1 --recipes fcfs,srpt,fcfs", "two are called fcfs"),
        ("--rates 1 --kv-gib 100", "--kv-gib must be"),
        ("--rates 1 --slo-ttft 0", "--slo-ttft must be above 0"),
        ("--rates 1 --slo-ttft 1 --slo-scale 3", "exclude"),
        ("--rates 1 --slo-jct 1 --slo-jct-scale 2", "--slo-jct-scale and --slo-jct exclude"),
        ("--rates 1 --slo-scale 1 --slo-jct-scale 2", "--slo-jct-scale and --slo-scale exclude"),
        ("--rates 1 --slo-jct-scale -2", "--slo-jct-scale must be in (0, 1e+09]"),
        ("--rates 1 --slo-jct-scale nan", "--slo-jct-scale must be in (0, 1e+09]"),
        ("--rates 1 --dispatch random", "least-work"),
        ("--rates 1,2 --timeline x.json", "single run"),
        ("--rates 1 --until -1", "until"),
        ("--find-max-rate nonsense", "bound must read"),
        ("--find-max-rate normalized.mean<=3", "normalized_latency_s.mean"),
        ("--rates 1 --find-max-rate jct_s.mean<=1 --find-min-replicas jct_s.mean<=1", "exclude each other"),
        ("--find-min-replicas jct_s.mean<=1", "rates must be given"),
        ("--rates 1 --find-min-replicas slo.goodput_rps>=1", "slo.goodput_rps would be null"),
        ("--rates 1 --find-min-replicas nonsense", "bound must read"),
        ("--rates 1 --out missing/out.json", "missing"),
        ("--rates 1e9", "--rates: 1e+09 per second for 20 s (--duration) are 2e+10 requests, and a run has at most"),
        ("--rates 1 --duration 1e9", "choose a lower rate or a shorter duration"),
        ("--rates 1 --lengths agents --duration 1e9", "choose a lower rate or a shorter duration"),
        ("--rates 1 --seeds 0-1000000000", "--seeds must be at most 1000 numbers, got '0-1000000000'"),
        ("--rates 1 --seeds 0-99999999999999999999", "--seeds must be at most 1000 numbers"),
        ("--rates 1 --replicas 1000000000", "--replicas must be in [1, 10000], got 1000000000"),
    ],
)
def test_invalid_options_give_a_one_line_error(options: str, message: str) -> None:
    done = CliRunner().invoke(
        app, ["simulate", "--kv-gib", "11", "--model", "opt-13b", "--duration", "20", *options.split()]
    )
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, exhaustive(signal.SIGTERM)])
def test_a_signal_keeps_finished_records_and_leaves_no_process(tmp_path: Path, number: int) -> None:
    out = tmp_path / "out.json"
    seeds = ",".join(map(str, range(200)))
    command = [SKIPJOIN, "simulate", *SMALL, "--duration", "5", "--jobs", "2", "--rates", "40", "--seeds", seeds]
    with subprocess.Popen([*command, "--out", str(out)], stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until(out.exists)
            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(number)
            _, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 128 + number, errors
    assert "Traceback" not in errors
    assert "runs were finished" in errors
    assert 1 <= len(load_results([out])) < 200
    assert children
    _, alive = psutil.wait_procs(children, timeout=10)
    # Without an init process that reaps them, the children remain as zombies.
    assert all(child.status() == psutil.STATUS_ZOMBIE for child in alive)
