from __future__ import annotations

from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path

import pytest

from skipjoin.config import ConfigError
from skipjoin.core.events import Arrived, Event, Finished
from skipjoin.sim.experiments.cell import Cell, Extent
from skipjoin.sim.experiments.machines import Machine
from skipjoin.sim.experiments.simulation import run
from skipjoin.workload.agents import Agents, Tail
from skipjoin.workload.request import WorkloadRequest
from skipjoin.workload.traces import read_trace
from skipjoin.workload.workload import Replay

# About six of these programs fit into the pool of `MACHINE`.
SMALL = Agents(
    calls=(3, 12),
    templates=2,
    template_tokens=512,
    task=Tail(200, 0.6, 1000),
    output=Tail(15, 0.7, 100),
    result=Tail(40, 1.0, 400),
    fast=Tail(0.1, 0.6, 0.5),
    slow=Tail(1.0, 1.0, 20.0),
)
MACHINE = Machine(model="qwen3-8b", hardware="a100-40gb", kv_gib=0.6, swap_gib=0)


def cell(recipe: str) -> Cell:
    (system,) = MACHINE.systems(recipe, predictor="prior")
    return Cell(system, SMALL, Extent(4.0, None, 0, 25))


def programs_of(jobs: list[WorkloadRequest]) -> list[list[WorkloadRequest]]:
    return [list(calls) for _, calls in groupby(jobs, key=lambda job: job.program)]


def test_agents_have_the_published_statistics() -> None:
    jobs = Agents().draw(1.0, None, 0, 150)
    programs = programs_of(jobs)
    assert {min(map(len, programs)), max(map(len, programs))} == {2, 40}
    known = total = 0
    for calls in programs:
        for before, call in pairwise(calls):
            assert call.prompt_tokens > before.prompt_tokens + before.output_tokens
            assert call.parts is not None
            assert before.parts is not None
            assert call.parts.names[: len(before.parts.names)] == before.parts.names
            known, total = known + before.prompt_tokens + before.output_tokens, total + call.prompt_tokens
    assert 0.93 < known / total < 0.97
    pauses = [call.pause_s for calls in programs for call in calls[1:] if call.pause_s is not None]
    assert 0.84 < sum(pause <= 1 for pause in pauses) / len(pauses) < 0.9
    assert max(pauses) > 60


def test_programs_are_the_same_at_every_rate_and_limit() -> None:
    some, more = Agents().draw(1.0, None, 3, 5), Agents().draw(2.0, None, 3, 9)
    assert [job._replace(at=0) for job in some] == [job._replace(at=0) for job in more[: len(some)]]
    with pytest.raises(ConfigError, match="one of duration_s and limit"):
        Agents().draw(1.0, None, 0)


def test_calls_of_a_trace_are_simulated_as_those_of_agents(tmp_path: Path) -> None:
    jobs = [job._replace(parts=None) for job in SMALL.draw(4.0, None, 0, 5)]
    rows = (
        f"{job.at},{job.prompt_tokens},{job.output_tokens},{job.program},{'' if job.pause_s is None else job.pause_s}\n"
        for job in jobs
    )
    file = tmp_path / "calls.csv"
    file.write_text("arrival_s,prompt_tokens,output_tokens,program,pause_s\n" + "".join(rows))
    trace = Replay(read_trace(file))
    first = jobs[0].at
    assert [job[:3] for job in trace.draw(None, None, 0)] == [(job.at - first, *job[1:3]) for job in jobs]
    (system,) = MACHINE.systems("adaptive", predictor="prior")
    found = run(Cell(system, trace, Extent(None, None, 0)))["programs"]
    assert (found["ended"], found["calls"]) == (5, len(jobs))
    assert found["completion_s"]["p99"] > max(
        sum(job.pause_s or 0.0 for job in calls) for calls in programs_of(jobs)
    ) * 0.9  # fmt: skip
    with pytest.raises(ConfigError, match="need one shard"):
        Cell(replace(system, replicas=65), trace, Extent(None, None, 0)).check()


def test_programs_recompute_little_and_end_earlier_when_their_calls_are_scheduled_as_one() -> None:
    events: list[Event] = []
    found = run(cell("adaptive"), on_events=events.extend)["programs"]
    jobs, ends = SMALL.draw(4.0, None, 0, 25), dict[str, float]()
    for event in events:
        if isinstance(event, Arrived):
            job = jobs[event.request.id]
            assert event.now >= ends.get(job.program, job.at) + (job.pause_s or 0.0) - 1e-9
        elif isinstance(event, Finished):
            ends[jobs[event.request.id].program] = event.now
    assert run(cell("adaptive"))["programs"] == found
    alone, fcfs = (run(cell(recipe))["programs"] for recipe in ("adaptive[programs=off]", "fcfs"))
    assert found["ended"] == alone["ended"] == fcfs["ended"] == 25
    assert found["recomputed_tokens"] < 0.9 * min(cell["recomputed_tokens"] for cell in (alone, fcfs))
    assert found["completion_s"]["mean"] < 0.9 * min(cell["completion_s"]["mean"] for cell in (alone, fcfs))
