from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner, Result

from skipjoin.cli import app
from skipjoin.demo import load, runs, server
from skipjoin.demo.outcome import EngineCounts, Outcome, verdict
from skipjoin.demo.tables import Cells, page
from skipjoin.loadtest.client import Exchange, exchange_of
from skipjoin.report.results import load_results
from skipjoin.workload.request import WorkloadRequest
from support.openai_stub import OpenAiStub

METRICS = """\
# TYPE skipjoin:num_preemptions counter
skipjoin:num_preemptions_total{how="pause",class="real-time"} 3.0
skipjoin:num_preemptions_total{how="swap",class="real-time"} 4.0
# TYPE skipjoin:wait_seconds counter
skipjoin:wait_seconds_total{reason="no_slot"} 5.0
"""


def demo(*args: object) -> Result:
    return CliRunner().invoke(app, ["demo", *map(str, args)])


def test_demo_sends_the_same_load_to_each_recipe_and_to_a_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    with OpenAiStub(metrics=METRICS) as own, OpenAiStub(api_key="sesame") as peer:

        @contextmanager
        def stub_server(model: Path, recipe: str, max_num_seqs: int) -> Iterator[OpenAiStub]:
            started.append((recipe, max_num_seqs))
            yield own

        monkeypatch.setattr(runs, "DemoServer", stub_server)
        args = ("--out", tmp_path / "new" / "folder", "--peer", peer.url, "--api-key", "sesame", "--chats", 9)
        result = demo("--recipes", "fcfs,srpt", "--background", 2, "--max-num-seqs", 3, *args)
    assert result.exit_code == 0, result.output
    assert started == [("fcfs", 3), ("srpt", 3)]
    asked = [body["max_tokens"] for body in peer.bodies]
    assert Counter(asked)[load.MAX_TOKENS] == 2
    assert Counter(body["max_tokens"] for body in own.bodies) == Counter(asked * 2)
    records = load_results([tmp_path / "new" / "folder" / "demo.json"])
    assert [record["recipe"] for record in records] == ["fcfs", "srpt", "peer"]
    assert [set(record["classes"]) for record in records] == [{"chat", "background"}] * 3
    html = (tmp_path / "new" / "folder" / "demo.html").read_text()
    assert "<svg" in html
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", html)
    table = {line.split()[0]: line.split()[-2:] for line in result.output.splitlines() if line and line[0].isalpha()}
    assert table["fcfs"] == ["0", "0"]  # preemptions since the begin of the run, and failures
    assert table["peer"] == ["-", "0"]


@pytest.mark.exhaustive  # the test above has stub servers, and test_bench_command.py loads a real one
def test_demo_runs_a_server_that_preempts_background_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(server._CONFIG, "num_hidden_layers", 1)
    monkeypatch.setattr(load, "_JOB_S", 1.0)
    result = demo("--recipes", "fastserve", "--chats", 6, "--background", 3, "--max-num-seqs", 2, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    row = next(line.split() for line in result.output.splitlines() if re.match(r"fastserve +\d", line))
    preempted, failed = row[-2:]
    assert int(preempted) > 0
    assert failed == "0"
    assert "no slot" in result.output
    below = psutil.Process().children(recursive=True)
    assert not [process for process in below if "serve" in process.cmdline()]


def test_demo_refuses_options_that_need_a_peer(tmp_path: Path) -> None:
    result = demo("--peer-endpoint", "chat", "--out", tmp_path)
    assert result.exit_code == 2
    assert "--peer must be given for --peer-endpoint" in result.output


def exchange(sent: float, ended: float) -> Exchange:
    found = exchange_of(0, WorkloadRequest(sent, 8, 8, load.CHAT, 0))
    found.sent, found.facts.ended = sent, ended
    return found


@pytest.mark.parametrize(("slots", "expected"), [(2, "up to 3 were open"), (3, "they tie. Scheduling helps")])
def test_verdict_compares_open_requests_with_slots(slots: int, expected: str) -> None:
    histories = [exchange(0, 3), exchange(1, 3), exchange(2, 4), exchange(3, 5), exchange(4, 6)]
    outcome = Outcome("fcfs", {}, histories, EngineCounts(), slots)
    assert outcome.max_open == 3
    assert expected in verdict([outcome])
    assert ("--max-num-seqs 2 shows it" in verdict([outcome])) == (slots == 3)


def test_chats_arrive_within_the_duration_and_jobs_fit_into_the_context() -> None:
    for token_s in (1e-4, 0.02, 1.0):
        mixed = load.sized(6, 24, token_s)
        jobs = mixed.draw(None, mixed.duration_s, seed=0)
        times = [job.at for job in jobs]
        assert times == sorted(times)
        assert Counter(job.stream for job in jobs) == {load.BACKGROUND: 6, load.CHAT: 24}
        assert times[-1] < mixed.duration_s
        assert all(job.prompt_tokens + job.output_tokens <= server.CONTEXT for job in jobs)


def test_texts_of_the_page_are_inert() -> None:
    hostile = "<script>alert(1)</script>"
    html = page(hostile, hostile, "<?xml?><svg></svg>", [Cells(hostile, [hostile], [[hostile]])], [hostile])
    assert "<script>" not in html
    assert "<svg></svg>" in html
