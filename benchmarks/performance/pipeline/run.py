"""Measure the throughput and bubbles of a two-stage pipeline, and the simulator's accuracy for it.

PP 2 over two processes of one thread each runs the same requests as one process of one thread, all present at the
start. The model is a random-weight Llama of 24 layers and width 512. `long` prompts fill several plans; `short` ones
would all fit one plan. `even` balances the plans of the stages (`EvenStages`), with prompts cut to fit (`fastserve`) or
whole (`fcfs`). `greedy` is the same system without balancing: every plan takes all requests that can run. One process
runs `fastserve`. Before each pair the PP 2 executor is profiled, and the simulator runs the same requests on that
profile.

`bubbles` is the share of the stages' time in which they were idle. `speed` is the duration of the steps relative to the
profile. `others` is the share of the machine's time that other programs used; runs with too much of it are repeated a
few times. Rows that FILE already has are kept and counted. Targets: PP 2 at 1.5 times the throughput of one process,
and simulated throughput and bubbles within 20 % of the measured ones.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from executors import BLOCK_SIZE, DEVICE_BLOCKS, SHAPE, local, pipeline

import harness
from random_model import prompt_of, scratch_model
from skipjoin.config.profile import Profile, ProfileKey
from skipjoin.core.decide.scheduler import Scheduler
from skipjoin.core.engine import EngineCore
from skipjoin.core.events import Computed
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.policy import CostModel
from skipjoin.core.request import Request
from skipjoin.core.step import StepShape
from skipjoin.engine.profiling.cases import Limits
from skipjoin.engine.profiling.profiler import Effort, measure_profile
from skipjoin.exec.base import Executor
from skipjoin.exec.rank_spec import ModelExecutor
from skipjoin.exec.sampling import Sampling
from skipjoin.exec.simulated import SimulatedExecutor
from skipjoin.model.config import ModelConfig
from skipjoin.observe.stages import StageUse
from skipjoin.policies.best_effort import LimitedBestEffort
from skipjoin.policies.cost import LinearCost
from skipjoin.policies.stages import EvenStages
from skipjoin.recipes import Settings, build
from skipjoin.sampling import SamplingParams
from skipjoin.sim.driver import Replica, simulate

STAGES, MAX_SEQS, MAX_TOKENS = 2, 256, 512
# A run is repeated, up to TRIES times, if other programs use more than this share of the machine's time.
MAX_OTHERS, TRIES = 0.03, 4
# Number of requests, and ranges of their prompts and outputs in tokens.
LOADS = {"long": (48, (16, 256), (8, 48)), "short": (64, (4, 8), (16, 48))}
MAX_REQUESTS, MAX_LENGTH = 64, 304
SYSTEMS = [f"{recipe} {how}" for recipe in ("fastserve", "fcfs") for how in ("even", "greedy")]
# A cost model for runs whose times do not matter.
WARM = LinearCost(floor=1e-3, prefill_token=1e-3, decode=1e-3)
T = TypeVar("T")
FIELDS = ("tokens_per_s", "bubbles")


def requests(load: str) -> list[Request]:
    draw, made = random.Random(0), []
    count, prompts, outputs = LOADS[load]
    for number in range(count):
        length, tokens = draw.randint(*prompts), draw.randint(*outputs)
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        made.append(Request(number, 0.0, prompt_of(number, length), tokens, sampling=Sampling(params, 0, ())))
    return made


def core_of(system: str, cost: CostModel, stages: int) -> EngineCore:
    """Return the engine core of a system. One process schedules the next step while one runs, as a server may."""
    recipe, how = system.split()
    policies = build(recipe, Settings(cost, MAX_SEQS, MAX_TOKENS, stages=stages))
    batcher = policies.batcher
    if how == "greedy" and isinstance(batcher, LimitedBestEffort) and isinstance(batcher.batcher, EvenStages):
        policies = replace(policies, batcher=batcher.batcher.batcher)
    kv = KVLedger(DEVICE_BLOCKS, 0, BLOCK_SIZE)
    return EngineCore(Scheduler(policies, kv, depth=2, overlap=stages == 1))


def serve(core: EngineCore, executor: Executor, load: list[Request], cost: CostModel) -> dict[str, float]:
    """Run all requests to their end and return the figures; `cost` is the reference of `speed`."""
    use, flying, steps = StageUse(), deque[Any](), 0
    taken = expected = 0.0
    core.on_finished = executor.on_finished
    begin = time.perf_counter()
    for request in load:
        core.add(request, 0.0)
    while core.requests or flying:
        while (plan := core.start_step(time.perf_counter())) is not None:
            flying.append(executor.submit(plan, time.perf_counter()))
        result = flying.popleft().result()
        core.finish_step(result, time.perf_counter())
        use.observe(core.take_events())
        steps += 1
        taken += result.seconds
        expected += cost.step(StepShape.of(result.plan.slices))
    return outcome(load, time.perf_counter() - begin, use, steps) | {"speed": round(taken / expected, 4)}


def predict(core: EngineCore, profile: Profile, load: list[Request]) -> dict[str, float]:
    use, steps = StageUse(), 0

    def observe(events: list[Any]) -> None:
        nonlocal steps
        use.observe(events)
        steps += sum(isinstance(event, Computed) for event in events)

    executor = SimulatedExecutor(profile.cost, stages=profile.stage_shares)
    end = simulate(Replica(core, executor, decision_s=profile.host_s), load, on_events=observe)
    return outcome(load, end, use, steps)


def undisturbed(run: Callable[[], T]) -> tuple[T, float]:
    """Return the result of the first quiet run, or the last, and the share of the machine that others used."""
    for _ in range(TRIES):
        begin, before = time.perf_counter(), _busy_s()
        found = run()
        seconds, (all_s, own_s) = time.perf_counter() - begin, _busy_s()
        others = max(0.0, (all_s - before[0]) - (own_s - before[1])) / (seconds * (os.cpu_count() or 1))
        if others <= MAX_OTHERS:
            break
    return found, round(others, 4)


def _busy_s() -> tuple[float, float]:
    """Return the CPU seconds of all programs, and of this one with its ranks."""
    this = psutil.Process()
    own = [one.cpu_times() for one in (this, *this.children(recursive=True))]
    every = psutil.cpu_times()
    return every.user + every.nice + every.system, sum(one.user + one.system for one in own)


def outcome(load: list[Request], seconds: float, use: StageUse, steps: int) -> dict[str, float]:
    """Return the figures of a run; `tokens_per_s` counts prompts and outputs."""
    tokens = sum(request.progress.known for request in load)
    return {
        "seconds": round(seconds, 3),
        "tokens_per_s": round(tokens / seconds, 2),
        "bubbles": round(sum(use.idle) / max(sum(use.busy) + sum(use.idle), 1e-12), 4),
        "steps": steps,
    }


def host_seconds(executor: Executor, cost: CostModel) -> float:
    """Return the median time that scheduling and messages add to a step of a single batch."""
    core, times = core_of("fcfs greedy", cost, 1), []
    for request in requests("short")[: MAX_REQUESTS // STAGES]:
        core.add(request, 0.0)
    for _ in range(16):
        begin = time.perf_counter()
        plan = core.scheduler.schedule(begin)
        assert plan is not None
        result = executor.submit(plan, begin).result()
        core.finish_step(result, begin)
        times.append(time.perf_counter() - begin - result.seconds)
    return statistics.median(times)


def profile_of(executor: ModelExecutor, config: ModelConfig, dtype: str, seconds: float) -> Profile:
    host_s = host_seconds(executor, WARM)
    key = ProfileKey("random", "-", "cpu", "-", 1, dtype, "auto", "auto", "-", "-", 1, STAGES, "-")
    limits = Limits(MAX_TOKENS, MAX_REQUESTS, MAX_LENGTH, DEVICE_BLOCKS * BLOCK_SIZE)
    return measure_profile(
        executor, config, key, limits, Effort(seconds, 0.02), host_s=host_s, on_progress=lambda what, share: None
    )


def pair(number: int, profile: Profile, executors: dict[int, Executor]) -> dict[str, Any]:
    """Run everything once; `executors` are keyed by their number of stages."""
    cost, row = profile.cost, {"pair": number, "shares": [round(share, 3) for share in profile.stage_shares]}
    row |= {"fit_error": round(profile.errors.median, 4), "host_s": round(profile.host_s, 5)}
    for load in LOADS:
        order = [("one process", 1), *((system, STAGES) for system in SYSTEMS)]
        for system, stages in harness.in_turn(order, number):

            def once(system: str = system, stages: int = stages, load: str = load) -> dict[str, float]:
                core = core_of(system if stages > 1 else SYSTEMS[0], cost, stages)
                return serve(core, executors[stages], requests(load), cost)

            measured, others = undisturbed(once)
            row[f"{load} {system}"] = {"measured": measured | {"others": others}}
        alone = row[f"{load} one process"]["measured"]["tokens_per_s"]
        for system in SYSTEMS:
            found = row[f"{load} {system}"]
            found["predicted"] = predict(core_of(system, cost, STAGES), profile, requests(load))
            found["speedup"] = round(found["measured"]["tokens_per_s"] / alone, 3)
    return row


spread = partial(harness.spread, digits=4)


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for load in LOADS:
        alone = [row[f"{load} one process"]["measured"]["tokens_per_s"] for row in rows]
        summary[f"{load} one process"] = {"tokens_per_s": spread(alone)}
        for name in (f"{load} {system}" for system in SYSTEMS):
            chosen = [row[name] for row in rows]
            line = summary[name] = {"speedup": spread([one["speedup"] for one in chosen])}
            for field in FIELDS:
                measured = [one["measured"][field] for one in chosen]
                predicted = [one["predicted"][field] for one in chosen]
                line[field], line[f"{field} predicted"] = spread(measured), spread(predicted)
                line[f"{field} error"] = spread(
                    [said / real - 1 for said, real in zip(predicted, measured, strict=True)]
                )
    return summary


def main() -> None:
    parser = harness.parser(__doc__, pairs=3)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--profile-seconds", type=float, default=20.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()
    settings = {"stages": STAGES, "max_num_seqs": MAX_SEQS, "max_num_batched_tokens": MAX_TOKENS}
    settings |= {"requests": LOADS, "dtype": args.dtype, "model": SHAPE}
    record = harness.new_record(settings=settings, rows=harness.read_record(args.out).get("rows", []))
    with scratch_model(getattr(torch, args.dtype), **SHAPE) as folder:
        config = ModelConfig.from_folder(folder)
        ranks, single = pipeline(folder, args.dtype, STAGES), local(folder, args.dtype)
        for executor, stages in ((ranks, STAGES), (single, 1)):
            serve(core_of(SYSTEMS[0], WARM, stages), executor, requests("short"), WARM)
        for number in range(len(record["rows"]), len(record["rows"]) + args.pairs):
            profile, others = undisturbed(lambda: profile_of(ranks, config, args.dtype, args.profile_seconds))
            record["rows"].append(pair(number, profile, {1: single, STAGES: ranks}) | {"others": others})
            harness.show(record["rows"][-1])
        single.close()
        ranks.close()
    record["summary"] = summarize(record["rows"])
    harness.show(record["summary"])
    harness.write_record(record, args.out)


if __name__ == "__main__":
    main()
