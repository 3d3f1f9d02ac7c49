"""Measure the cost of a scheduling decision with 128 decoding requests and a queue of up to 100,000.

No model runs: every plan is answered immediately with fixed tokens. `decide` is the time of `Scheduler.schedule` and
`Scheduler.commit`. `engine` is the time of `EngineCore.start_step`, `finish_step` and `take_events`, which adds tokens,
stop conditions and events. Each figure is the median CPU time over the steps of a run, and the record has the median
and the range over the repeats. Recipes are measured in turn.

- `slots`: the queue waits because the batch is full (128 slots).
- `memory`: the queue waits because the KV pool is full (256 slots, no free blocks).
- `prefix`: one request waits for memory and finds the KV of the first 30,000 tokens of its prompt in the cache.
- `swapping`: OPT-13B on a simulated A100 with 11 GiB of KV and 128 GiB of CPU memory, ShareGPT lengths, 5.5 requests
  per second for 100 s. The rate exceeds the capacity, so KV is swapped in most steps.
- `overload`: OPT-13B on a simulated A100 with 12 GiB of KV and blocks of 32 tokens; 3,000 or 100,000 requests with
  ShareGPT lengths at once, for 30 s. Forecasts have the noise of EconoServe's evaluation. Decisions are in CPU time.

Queued prompts are long, so every recipe ranks them behind the running requests and the state does not change. For
`adaptive` and `bros`, which prefer first tokens in time, they have missed their TTFT objective.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from skipjoin.core.decide.scheduler import Scheduler
from skipjoin.core.engine import EngineCore
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.prefixes import ContentPrefix
from skipjoin.core.request import DEFAULT_OPTIONS, Request, RequestOptions, Target
from skipjoin.core.step import StepPlan, StepResult
from skipjoin.observe.record import preempted
from skipjoin.policies.cost import LinearCost
from skipjoin.recipes import Settings, build
from skipjoin.recipes.registry import own
from skipjoin.sim.experiments.cell import Cell, Extent
from skipjoin.sim.experiments.machines import Machine
from skipjoin.sim.experiments.simulation import run
from skipjoin.workload.workload import synthetic

sys.path.insert(0, str(Path(__file__).parents[2]))
import harness
from papers.econoserve.setting import SHAREGPT, SLO, variants
from papers.econoserve.setting import system as of_evaluation
from papers.recipes import SPELLED

LIMITS = ("slots", "memory", "prefix", "swapping", "overload")
RUNNING = 128
WAITING = (0, 100, 1_000, 10_000, 100_000)
BLOCK_SIZE = 16
PREFIX = 30_000  # tokens
STEPS = 200  # in a longer run fastserve would demote the running requests behind the queue
OVERLOAD, OVERLOAD_S = (3_000, 100_000), 30.0
OVERLOADED = ("adaptive", "alise", "bros", "econoserve", "fastserve", "fcfs", "sarathi")
SWAPPING = ("adaptive", "alise", "fastserve", "fastserve-reactive", "mlfq", "srpt")
MISSED = RequestOptions(target=Target(ttft_s=1e-6))
COST = LinearCost(floor=0.02, prefill_token=1e-4, decode=1e-4, context_token=1e-7)


def engine_with(recipe: str, waiting: int, limit: str) -> EngineCore:
    """Return an engine with RUNNING decoding requests and `waiting` queued ones that `limit` blocks."""
    slots = RUNNING if limit == "slots" else 2 * RUNNING
    settings = Settings(COST, max_seqs=slots, max_tokens=8192)
    name = SPELLED[recipe]
    policies = build(name, settings, own(name, {"starvation_s": 1e9, "oracle": "max-tokens"}))
    cached = PREFIX if limit == "prefix" else 0
    # 24 blocks each are enough for 128 + STEPS tokens, and leave too few for a waiting prompt.
    core = EngineCore(Scheduler(policies, KVLedger(RUNNING * 24 + cached // BLOCK_SIZE, 0, BLOCK_SIZE)))
    if cached:
        core.add(Request(-1, 0.0, range(cached), 1, prefix=ContentPrefix(BLOCK_SIZE)), 0.0)
        while core.requests:
            answer(core, core.start_step(0.0), 0.0)
    for number in range(RUNNING):
        core.add(Request(number, 0.0, range(128), STEPS + 50), 0.0)
    while any(request.progress.output == [] for request in core.requests.values()):
        answer(core, core.start_step(0.0), 0.0)
    options = MISSED if recipe in ("adaptive", "bros") else DEFAULT_OPTIONS
    for number in range(RUNNING, RUNNING + waiting):
        prefix = ContentPrefix(BLOCK_SIZE) if cached else None
        core.add(Request(number, 1.0, range(cached + 40_000), 1500, options=options, prefix=prefix), 1.0)
    core.take_events()
    return core


def answer(core: EngineCore, plan: StepPlan | None, now: float) -> None:
    """Finish a plan with token 7 for every sampled row."""
    assert plan is not None
    core.finish_step(StepResult(plan, [7 if piece.samples else None for piece in plan.slices], 0.02), now)


def measure(recipe: str, waiting: int, limit: str) -> dict[str, float]:
    """Return the median microseconds per step of the decision and of the whole engine core."""
    core = engine_with(recipe, waiting, limit)
    scheduler = core.scheduler
    decide, engine = [], []
    commit_seconds = 0.0
    inner = scheduler.commit

    def timed_commit(result: StepResult, now: float) -> set[Request]:
        nonlocal commit_seconds
        start = time.thread_time()
        lost = inner(result, now)
        commit_seconds = time.thread_time() - start
        return lost

    scheduler.commit = timed_commit  # type: ignore[method-assign]
    now = 1.0
    for _ in range(STEPS):
        now += 0.02
        t0 = time.thread_time()
        plan = core.start_step(now)
        t1 = time.thread_time()
        assert plan is not None
        assert len(plan.slices) == RUNNING
        result = StepResult(plan, [7] * RUNNING, 0.02)
        t2 = time.thread_time()
        core.finish_step(result, now)
        core.take_events()
        t3 = time.thread_time()
        decide.append(t1 - t0 + commit_seconds)
        engine.append(t1 - t0 + t3 - t2)
    return {"decide_us": statistics.median(decide) * 1e6, "engine_us": statistics.median(engine) * 1e6}


def timed_run(cell: Cell) -> tuple[dict[str, Any], list[float]]:
    """Return the record of a simulation and the seconds of each decision."""
    schedule, commit = Scheduler.schedule, Scheduler.commit
    seconds: list[float] = []

    def timed_schedule(self: Scheduler, now: float) -> StepPlan | None:
        start = time.thread_time()
        plan = schedule(self, now)
        if plan is not None:
            seconds.append(time.thread_time() - start)
        return plan

    def timed_commit(self: Scheduler, result: StepResult, now: float) -> set[Request]:
        start = time.thread_time()
        lost = commit(self, result, now)
        seconds[-1] += time.thread_time() - start
        return lost

    Scheduler.schedule, Scheduler.commit = timed_schedule, timed_commit  # type: ignore[method-assign]
    try:
        return run(cell), seconds
    finally:
        Scheduler.schedule, Scheduler.commit = schedule, commit  # type: ignore[method-assign]


def measure_swapping(recipe: str) -> dict[str, float]:
    """Return the microseconds per decision while KV is swapped, and the load of the run."""
    (system,) = Machine(model="opt-13b", hardware="a100-40gb", kv_gib=11.0, swap_gib=128.0).systems(SPELLED[recipe])
    cell = Cell(system, synthetic("sharegpt", "poisson"), Extent(5.5, 100.0, 0))
    record, seconds = timed_run(cell)
    return {
        "decide_us": statistics.median(seconds) * 1e6,
        "decide_p95_us": statistics.quantiles(seconds, n=20)[-1] * 1e6,
        "batch_mean": record["batch_mean"],
        "preemptions_per_step": preempted(record) / record["steps"],
        "step_ms": record["duration_s"] / record["steps"] * 1e3,
    }


def measure_overload(recipe: str, waiting: int) -> dict[str, float]:
    """Return the microseconds per decision in the middle and on average, and the load of the run."""
    system = of_evaluation(variants(recipe)[0], SHAREGPT)
    cell = Cell(system, synthetic("sharegpt", "poisson"), Extent(1e6, None, 0, waiting, OVERLOAD_S), SLO)
    record, seconds = timed_run(cell)
    return {
        "decide_us": statistics.median(seconds) * 1e6,
        "decide_mean_us": statistics.fmean(seconds) * 1e6,
        "batch_mean": record["batch_mean"],
        "throughput_tps": record["throughput_tps"],
    }


def main() -> None:
    parser = harness.parser(__doc__, repeats=5)
    parser.add_argument("--recipes", nargs="*", default=sorted(SPELLED))
    parser.add_argument(
        "--limits", nargs="*", default=LIMITS, choices=LIMITS, help="what limits the steps (default: all)"
    )
    args = parser.parse_args()
    gc.freeze()
    record = harness.new_record(steps=STEPS, rows=[])
    # There is no steady state under mlfq: queued prompts enter the first queue and displace running requests.
    steady = [recipe for recipe in args.recipes if recipe != "mlfq"]
    queues = [*itertools.product(("slots", "memory"), WAITING), ("prefix", 1)]
    for limit, waiting in (queue for queue in queues if queue[0] in args.limits):
        runs: dict[str, list[dict[str, float]]] = {recipe: [] for recipe in steady}
        for turn in range(args.repeats if waiting < 50_000 else 2):
            for recipe in harness.in_turn(runs, turn):
                runs[recipe].append(measure(recipe, waiting, limit))
        for recipe, found in runs.items():
            row = {"recipe": recipe, "limit": limit, "running": RUNNING, "waiting": waiting}
            record["rows"].append(row | harness.spreads(found, 2))
            harness.show(record["rows"][-1])
    for recipe in (recipe for recipe in args.recipes if recipe in SWAPPING and "swapping" in args.limits):
        swapping = [measure_swapping(recipe) for _ in range(args.repeats)]
        record["rows"].append({"recipe": recipe, "limit": "swapping"} | harness.spreads(swapping, 2))
        harness.show(record["rows"][-1])
    for waiting in OVERLOAD if "overload" in args.limits else ():
        mine = [recipe for recipe in args.recipes if recipe in OVERLOADED]
        # In turn, so that a drift of the machine affects all recipes.
        turns = [(recipe, measure_overload(recipe, waiting)) for _ in range(args.repeats) for recipe in mine]
        for recipe in mine:
            row = {"recipe": recipe, "limit": "overload", "waiting": waiting}
            record["rows"].append(row | harness.spreads([found for name, found in turns if name == recipe], 2))
            harness.show(record["rows"][-1])
    harness.write_record(record, args.out)


if __name__ == "__main__":
    main()
