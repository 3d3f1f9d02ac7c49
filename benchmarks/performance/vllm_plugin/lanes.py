"""Measures vLLM with its own scheduler and with Skipjoin's, in one process. `run.py` starts it with vLLM's interpreter.

SETTINGS is a JSON object; the results are the last line of the output. Each engine has a clock of its own, the CPU time
of its steps, so that engines take turns without delaying each other, and other programs count little.
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine.llm_engine import LLMEngine

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tests"))
from skipjoin.core.step import StepShape
from skipjoin.vllm.planning import START_COST
from skipjoin.vllm.scheduler import Scheduler
from support.vllm_shadow import Setup, engine_config, make_request, make_scheduler, write_model

STOCK = ("stock", "stock-priority")
_SLOTS = 8
_names = count()


@dataclass(frozen=True)
class Job:
    arrival: float
    prompt: list[int]
    output: int
    is_short: bool


def engine_of(model: str, which: str, *, slots: int, blocks: int | None) -> LLMEngine:
    chosen: dict[str, Any] = {"scheduling_policy": "priority" if which == "stock-priority" else "fcfs"}
    if which not in STOCK:
        chosen |= {"scheduler_cls": "skipjoin.vllm.Scheduler", "additional_config": {"skipjoin": {"recipe": which}}}
    arguments = EngineArgs(
        model=model,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=slots,
        block_size=32,
        num_gpu_blocks_override=blocks,
        max_num_batched_tokens=2048,
        **chosen,
    )
    return LLMEngine.from_engine_args(arguments)


def add(engine: LLMEngine, job: Job, *, priority: int = 0) -> str:
    name = str(next(_names))
    params = SamplingParams(temperature=0, max_tokens=job.output, min_tokens=job.output, ignore_eos=True)
    engine.add_request(name, {"prompt_token_ids": job.prompt}, params, priority=priority)
    return name


def scheduler_of(engine: LLMEngine) -> Any:
    return engine.engine_core.engine_core.scheduler


def burst(engine: LLMEngine, jobs: Sequence[Job]) -> dict[str, Any]:
    """Serve requests that arrive together."""
    names = {add(engine, job): index for index, job in enumerate(jobs)}
    begin, steps, ends = time.process_time(), 0, []
    while engine.has_unfinished_requests():
        ends += [names[output.request_id] for output in engine.step() if output.finished]
        steps += 1
    seconds = time.process_time() - begin
    return {"tokens_per_s": sum(job.output for job in jobs) / seconds, "steps": steps, "ends": ends}


def measure_burst(given: Mapping[str, Any]) -> dict[str, Any]:
    """Compare stock and `fcfs`: throughput, number of steps and order of ends."""
    engines = {which: engine_of(given["model"], which, slots=_SLOTS, blocks=None) for which in ("stock", "fcfs")}
    found: dict[str, list[dict[str, Any]]] = {which: [] for which in engines}
    for engine in engines.values():
        burst(engine, mixed(given["seed"], 8))
    for turn in range(given["repeats"]):
        jobs = mixed(given["seed"] + turn, given["requests"])
        for which in list(engines)[:: -1 if turn % 2 else 1]:
            found[which].append(burst(engines[which], jobs))
    pairs = list(zip(found["fcfs"], found["stock"], strict=True))
    return {
        "stock_tokens_per_s": [round(one["tokens_per_s"], 1) for one in found["stock"]],
        "fcfs_tokens_per_s": [round(one["tokens_per_s"], 1) for one in found["fcfs"]],
        "throughput_ratio": round(
            statistics.median(one["tokens_per_s"] / two["tokens_per_s"] for one, two in pairs), 3
        ),
        "steps_ratio": round(statistics.median(one["steps"] / two["steps"] for one, two in pairs), 4),
        "same_order_of_ends": [one["ends"] == two["ends"] for one, two in pairs],
    }


@dataclass
class Lane:
    which: str
    engine: LLMEngine
    jobs: list[Job]
    now: float = 0.0
    steps: int = 0
    live: dict[str, tuple[Job, list[float]]] = field(default_factory=dict)  # times of tokens, by name
    rows: list[tuple[Job, list[float]]] = field(default_factory=list)
    first_steps: list[float] = field(default_factory=list)  # seconds of the step with each first token

    def turn(self) -> None:
        if not self.live:
            self.now = max(self.now, self.jobs[0].arrival)
        begin, base = time.process_time(), self.now
        if self.which not in STOCK:
            scheduler_of(self.engine).clock = lambda: base + time.process_time() - begin
        while self.jobs and self.jobs[0].arrival <= self.now:
            job = self.jobs.pop(0)
            # What an operator could tell `priority`: the class of the request.
            priority = 0 if self.which != "stock-priority" or job.is_short else 1
            self.live[add(self.engine, job, priority=priority)] = job, []
        outputs = self.engine.step()
        self.steps += 1
        self.now = base + time.process_time() - begin
        for output in outputs:
            if (found := self.live.get(output.request_id)) is None:
                continue
            if not found[1]:
                self.first_steps.append(self.now - base)
            found[1].append(self.now)
            if output.finished:
                self.rows.append(self.live.pop(output.request_id))

    def summary(self) -> dict[str, float]:
        normalized = [(times[-1] - job.arrival) / job.output for job, times in self.rows]
        first = sorted(times[0] - job.arrival for job, times in self.rows)
        first_of_short = sorted(times[0] - job.arrival for job, times in self.rows if job.is_short)
        longs = [times[-1] - job.arrival for job, times in self.rows if not job.is_short]
        gaps = [max((two - one for one, two in pairwise(times)), default=0.0) for _, times in self.rows]
        return {
            "normalized_latency_s": round(statistics.mean(normalized), 4),
            "ttft_p50_s": round(quantile(first, 0.5), 3),
            "ttft_p95_s": round(quantile(first, 0.95), 3),
            "short_ttft_p95_s": round(quantile(first_of_short, 0.95), 3),
            "requests_per_s": round(len(self.rows) / self.now, 3),
            "first_step_p50_s": round(quantile(sorted(self.first_steps), 0.5), 3),
            "first_step_p95_s": round(quantile(sorted(self.first_steps), 0.95), 3),
            "long_jct_mean_s": round(statistics.mean(longs), 2) if longs else 0.0,
            "long_jct_max_s": round(max(longs, default=0.0), 2),
            "longest_gap_s": round(max(gaps), 2),
            "steps": self.steps,
        }


def quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def capacity_of(engine: LLMEngine, jobs: Sequence[Job], slots: int) -> float:
    """Return the requests per second of a full batch, from a burst without its end."""
    tokens: dict[str, int] = {}
    for job in jobs:
        add(engine, job)
    begin, rate = time.process_time(), 0.0
    while engine.has_unfinished_requests():
        tokens |= {output.request_id: len(output.outputs[0].token_ids) for output in engine.step()}
        if engine.get_num_unfinished_requests() >= slots:
            rate = sum(tokens.values()) / (time.process_time() - begin)
    return rate * len(jobs) / sum(job.output for job in jobs)


def measure_load(given: Mapping[str, Any]) -> dict[str, Any]:
    """Serve the same arrivals with each scheduler, in turn."""
    schedulers, rate_of = given["schedulers"], given["load"]
    engines = {which: engine_of(given["model"], which, slots=_SLOTS, blocks=given["blocks"]) for which in schedulers}
    pool = jobs_of(given, 400)
    # Other prompts, because the prefix cache of stock would keep those of the burst.
    first = jobs_of({**given, "seed": given["seed"] + 100}, 60)
    for engine in engines.values():
        burst(engine, first[:12])
    capacity = capacity_of(engines["stock"], first[12:], _SLOTS)
    rate = rate_of * capacity
    draw, at = random.Random(given["seed"]), 0.0
    jobs: list[Job] = []
    for job in pool:
        at += draw.expovariate(rate)
        if at > given["seconds"]:
            break
        jobs.append(Job(at, job.prompt, job.output, job.is_short))
    lanes = [Lane(which, engine, list(jobs)) for which, engine in engines.items()]
    while busy := [lane for lane in lanes if lane.jobs or lane.live]:
        min(busy, key=lambda lane: lane.now).turn()
    found = {lane.which: lane.summary() for lane in lanes}
    return {"requests": len(jobs), "capacity_per_s": round(capacity, 2), "rate_per_s": round(rate, 2), **found}


def jobs_of(given: Mapping[str, Any], number: int) -> list[Job]:
    if (made := {"mixed": mixed, "prompts": prompts}.get(given["lengths"])) is not None:
        return made(given["seed"] + 1000, number)
    from skipjoin.workload.lengths import parse_lengths  # noqa: PLC0415 - only this part needs it

    lengths, draw = parse_lengths(given["lengths"]), random.Random(given["seed"] + 1000)
    found = []
    for _ in range(number):
        prompt, output = lengths.draw(draw)
        prompt, output = max(1, min(prompt, 500)), max(2, min(output, 400))
        found.append(Job(0.0, tokens(draw, prompt), output, output <= 50))
    return found


def mixed(seed: int, number: int) -> list[Job]:
    draw, found = random.Random(seed), []
    for _ in range(number):
        is_short = draw.random() < 0.8
        output = draw.randrange(16, 33) if is_short else draw.randrange(200, 301)
        found.append(Job(0.0, tokens(draw, draw.randrange(16, 128)), output, is_short))
    return found


def prompts(seed: int, number: int) -> list[Job]:
    """Draw jobs of which 3 in each 20 have long prompts: their share decides how much work a few jobs are."""
    draw, found, longs = random.Random(seed), [], set[int]()
    for index in range(number):
        if index % 20 == 0:
            longs = {index + place for place in draw.sample(range(20), 3)}
        is_short = index not in longs
        found.append(Job(0.0, tokens(draw, 64 if is_short else 1500), draw.randrange(16, 33), is_short))
    return found


def tokens(draw: random.Random, number: int) -> list[int]:
    return [draw.randrange(10, 8000) for _ in range(number)]


def measure_cost(given: Mapping[str, Any]) -> dict[str, Any]:
    """Measure `schedule` and `update_from_output` with 128 running requests and a queue, without a model."""
    model = write_model(Path(given["model"]) / "shape")
    kinds = ("stock", *given["recipes"])
    schedulers = {which: loaded(model, which, given["waiting"]) for which in kinds}
    gc.freeze()  # as vLLM does at start: a collection would count for the scheduler that happens to trigger it
    found: dict[str, list[Cost]] = {which: [] for which in kinds}
    for _ in range(given["steps"]):
        for which in kinds:
            found[which].append(step(schedulers[which]))
    # In the first half, `adaptive` fills its blocks.
    return {which: in_microseconds(rows[len(rows) // 2 :]) for which, rows in found.items()}


class Cost(NamedTuple):
    """CPU seconds of `schedule` and `update_from_output` in one step, and whether the step computed prompts."""

    schedule: float
    update: float
    has_prompts: bool


class Clock:
    """Clock that a step advances by the time that it would take."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, tokens: Collection[int]) -> None:
        prompts = [number for number in tokens if number > 1]
        self.now += START_COST.step(StepShape(decodes=len(tokens) - len(prompts), prefill=sum(prompts)))


def loaded(model: Path, which: str, waiting: int) -> Any:
    # No running request is demoted during the measurement.
    params = (("quantum_s", 100.0), ("starvation_s", 1e6)) if which == "fastserve" else ()
    setup = Setup("fcfs" if which == "stock" else which, params=params)
    config = engine_config(model, setup, seqs=128, tokens=8192, blocks=8000)
    scheduler = make_scheduler(config, cls=AsyncScheduler if which == "stock" else Scheduler)
    scheduler.clock = Clock()
    # The queued prompts are long, so all recipes but `adaptive` rank them behind the running requests. It gives them
    # their first tokens, until its blocks are full of parked requests.
    for number in range(128 + waiting):
        scheduler.clock.now += 1e-6
        scheduler.add_request(make_request(f"c{next(_names)}", [7] * (60 if number < 128 else 450), 400))
    return scheduler


def step(scheduler: Any) -> Cost:
    from vllm.v1.outputs import ModelRunnerOutput  # noqa: PLC0415 - beside its only use

    begin = time.process_time()
    output = scheduler.schedule()
    scheduled = time.process_time()
    scheduler.clock.advance(output.num_scheduled_tokens.values())
    names = list(output.num_scheduled_tokens)
    sampled = [[] if scheduler.requests[name].is_prefill_chunk else [9] for name in names]
    result = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=sampled,
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )
    updating = time.process_time()
    scheduler.update_from_output(output, result)
    return Cost(scheduled - begin, time.process_time() - updating, max(output.num_scheduled_tokens.values()) > 1)


def in_microseconds(rows: Sequence[Cost]) -> dict[str, float]:
    """Return medians over all steps and, if there are any, over those with prompts."""
    prompts = [row for row in rows if row.has_prompts]
    found = {"schedule_us": median_us(row.schedule for row in rows), "update_us": median_us(row.update for row in rows)}
    if prompts:
        found["prompt_steps"] = round(len(prompts) / len(rows), 3)
        found["prompt_schedule_us"] = median_us(row.schedule for row in prompts)
        found["prompt_update_us"] = median_us(row.update for row in prompts)
    return found


def median_us(seconds: Iterable[float]) -> int:
    return round(1e6 * statistics.median(seconds))


PARTS = {"burst": measure_burst, "load": measure_load, "cost": measure_cost}

if __name__ == "__main__":
    print(json.dumps(PARTS[sys.argv[1]](json.loads(sys.argv[2]))), flush=True)
