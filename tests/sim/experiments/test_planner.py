from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from skipjoin.cli import app
from skipjoin.config.profile import write_profile
from support.profiles import PROFILE

SMALL = ("--model", "opt-13b", "--kv-gib", "11", "--lengths", "fixed:64,64", "--duration", "10", "--jobs", "1")


def simulate(*options: str, system: tuple[str, ...] = SMALL) -> Result:
    return CliRunner().invoke(app, ["simulate", *system, "--recipes", "fcfs,fastserve", *options])


def test_bottleneck_is_named_and_a_tie_is_called_one(tmp_path: Path) -> None:
    options = ("--rates", "0.5,12", "--max-num-seqs", "8", "--slo-ttft", "1", "--slo-tpot", "1")
    result = simulate(*options, "--out", str(tmp_path / "out.json"))
    assert result.exit_code == 0, result.output
    assert "nothing waits at 0.5 req/s, so recipes cannot differ here" in result.output
    assert "bottleneck at 12 req/s, with the share of latency that is waiting: fcfs slots (" in result.output
    assert "opt-13b on a100-40gb: costs computed from its data sheet" in result.output
    header, fcfs, *_ = result.stdout.splitlines()
    assert all(column in header for column in ("P95 s/token", "TTFT P95 s", "TTFT kept", "TPOT kept", "all kept"))
    assert "0.5" in fcfs


def test_repeated_bounds_combine_and_need_objectives() -> None:
    loose, tight = "jct_s.mean<=100", "ttft_s.p95<=0.5"
    options = ("--rates", "4", "--duration", "2", "--max-num-seqs", "2")
    alone = simulate(*options, "--find-min-replicas", tight)
    both = simulate(*options, "--find-min-replicas", loose, "--find-min-replicas", tight)
    assert both.exit_code == 0, both.output
    assert f"fewest replicas with {loose} and {tight}" in both.output
    answers = [result.output.splitlines()[-2:] for result in (alone, both)]
    alone_rows, both_rows = ([line.split() for line in lines] for lines in answers)
    assert alone_rows == both_rows
    bare = simulate(*options, "--find-min-replicas", "slo.all_attained>=0.9")
    assert bare.exit_code == 2
    assert "slo.all_attained would be null" in bare.output
    assert "--slo-ttft" in bare.output


def test_figures_of_a_profile_name_it_and_its_error(tmp_path: Path) -> None:
    write_profile(dataclasses.replace(PROFILE, max_positions=512), tmp_path / "mine.json")
    system = ("--hardware", str(tmp_path / "mine.json"), "--kv-gib", "0.1", "--lengths", "fixed:64,64")
    out = tmp_path / "out.json"
    result = simulate("--rates", "2", "--duration", "5", "--jobs", "1", "--out", str(out), system=system)
    assert result.exit_code == 0, result.output
    basis = "costs of the profile mine.json of 2030-01-02, whose error was 4 % (median) and 12 % (P95)"
    assert basis in result.output
    drawn = CliRunner().invoke(app, ["plot", str(out), "--out", str(tmp_path / "p.svg")])
    assert drawn.exit_code == 0, drawn.output
    svg = (tmp_path / "p.svg").read_text()
    assert "share of requests" in svg  # distributions, because there is one rate only
    assert "mine.json of 2030-01-02" in svg


@pytest.mark.parametrize("options", [("--find-max-rate", "ttft_s.mean<=1", "--find-min-replicas", "ttft_s.mean<=1")])
def test_searches_of_two_kinds_exclude_each_other(options: tuple[str, ...]) -> None:
    result = simulate("--rates", "1", *options)
    assert result.exit_code == 2
    assert "--find-max-rate and --find-min-replicas exclude each other" in result.output
