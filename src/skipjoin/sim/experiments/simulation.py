"""One simulated run. Only executors, declared oracles and `max_tokens` "exact" know the true output lengths."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from typing import NamedTuple

from skipjoin.core.engine import EngineCore
from skipjoin.core.events import Event
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.policy import CostModel
from skipjoin.core.request import Request, ServiceClass
from skipjoin.core.step import StepResult, StepShape
from skipjoin.exec.simulated import SimulatedExecutor, exactly, none
from skipjoin.observe.decisions import DecisionTimes
from skipjoin.observe.forecasts import ForecastLog
from skipjoin.observe.programs import ProgramFacts, ProgramLog
from skipjoin.observe.record import Record, add_usage, rounded, summarize, summarize_programs
from skipjoin.observe.requests import Kind, RequestFacts, RequestLog
from skipjoin.observe.usage import EngineUsage
from skipjoin.policies.cost import TrackedCost
from skipjoin.policies.dispatch import Dispatch, make_dispatch
from skipjoin.policies.eviction import KeepKv
from skipjoin.policies.execution import ExecutionTime
from skipjoin.policies.forward import saturating_tokens
from skipjoin.recipes import build, find, located_errors
from skipjoin.sim.closed import ClosedStream
from skipjoin.sim.driver import Arrivals, Dispatched, Replica, Traffic, simulate_traffic
from skipjoin.sim.experiments.cell import Cell
from skipjoin.sim.experiments.predictors import Predictions
from skipjoin.sim.experiments.split import Handovers, SplitFigures
from skipjoin.sim.experiments.submissions import END, Submissions
from skipjoin.sim.experiments.system import System
from skipjoin.sim.split import Network, SplitTraffic
from skipjoin.system.garbage import without_garbage_collection
from skipjoin.version import VERSION

# Any but `END`.
_TOKEN = 0


def make_replica(system: System, lengths: Sequence[int], *, together: bool, keeps_kv: bool, seed: str) -> Replica:
    """Build a replica.

    Decode-only steps are simulated `together` if that does not change the result. One that `keeps_kv` swaps all evicted
    KV, because it cannot compute prompts.
    """
    cost = TrackedCost(system.cost) if system.step_noise else None
    policies = build(system.recipe, replace(system.settings, cost=cost or system.cost), system.own_params)
    if keeps_kv:
        policies = replace(policies, eviction=KeepKv())
    kv = KVLedger(system.kv_blocks, system.cpu_blocks, system.block_size, states=system.states)
    core = EngineCore(system.scheduler(policies, kv, receives_kv=keeps_kv))
    executor = SimulatedExecutor(
        system.cost,
        _sampler(lengths),
        system.stage_shares or system.stages,
        alike=_alike(lengths) if together else none,
        jitter=exactly if cost is None else _jitter(system.step_noise, seed),
        block_size=system.block_size,
    )
    if cost is None:
        return Replica(core, executor, decision_s=system.decision_s)
    return Replica(core, executor, decision_s=system.decision_s, on_result=partial(_learn, cost))


def _learn(cost: TrackedCost, result: StepResult) -> None:
    if result.plan.slices:
        cost.learn(StepShape.of(result.plan.slices), result.seconds - result.moving)


def _jitter(noise: float, seed: str) -> Callable[[], float]:
    rng = random.Random(seed)
    return lambda: rng.lognormvariate(-noise * noise / 2, noise)


def _sampler(lengths: Sequence[int]) -> Callable[[Request, int], int]:
    def sample(request: Request, position: int) -> int:
        return END if position + 1 - len(request.prompt) >= lengths[request.id] else _TOKEN

    return sample


def _alike(lengths: Sequence[int]) -> Callable[[Request], int]:
    return lambda request: lengths[request.id] - len(request.progress.output) - 1


# Number of requests between progress reports.
_REPORT_AFTER = 64


def _ignore(events: list[Event]) -> None:
    pass


class ShardResult(NamedTuple):
    end_s: float
    facts: list[RequestFacts]
    rejected: list[Kind]
    usages: list[EngineUsage]
    decisions: list[DecisionTimes]
    forecasts: ForecastLog | None
    split: SplitFigures | None
    programs: Sequence[ProgramFacts]


class Run:
    """Run of a cell: shards that can be simulated separately, and the record.

    Requests belong to the shard of their replica (prefill replica, if any), which is assigned round robin.
    """

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.jobs = cell.jobs()
        self._jct = cell.jct_for(self.jobs)
        self._slo = cell.slo_for(self.jobs)
        taken = [number for number, job in enumerate(self.jobs) if cell.system.takes(job)]
        self._taken = sorted(taken, key=lambda number: self.jobs[number].at)

    def shard(
        self,
        shard: int,
        *,
        on_share: Callable[[float], None] = lambda share: None,
        on_events: Callable[[list[Event]], None] = _ignore,
    ) -> ShardResult:
        cell, system = self.cell, self.cell.system
        predictor, jct = cell.predictor(self.jobs), self._jct
        submissions = Submissions(system, self.jobs, self._slo, predictor)
        lengths = submissions.lengths
        (prefills, others), taken = self._counts(shard), self._dealt(shard)
        machines = [*[system.prefill_system] * prefills, *[system] * others]
        watch = _Watch(machines, len(taken), len(self.jobs), on_share, on_events)
        dispatch = _dispatch(system, system, others, lambda request: lengths[request.id])
        predictions = None if predictor is None else Predictions(dispatch, predictor, jct=jct)
        handovers = watch.handovers = Handovers(watch.logs, prefills, predictions) if prefills else None
        # Load-aware dispatch rules and timelines need each token at its time.
        together = dispatch.ignores_tokens and on_events is _ignore
        replicas = [
            make_replica(
                machine,
                lengths,
                together=together and not system.step_noise,
                keeps_kv=0 < prefills <= number,
                seed=f"{cell.extent.seed} {shard} {number}",
            )
            for number, machine in enumerate(machines)
        ]
        # A run creates no reference cycles.
        with without_garbage_collection(), located_errors():
            arrivals = submissions.arrivals(taken, self._closed(shard, submissions))
            if handovers is None:
                traffic: Traffic = Dispatched(arrivals, predictions or dispatch)
            else:
                traffic = self._split_traffic(replicas, arrivals, dispatch, handovers)
            end = simulate_traffic(replicas, traffic, on_events=watch.observe, until=cell.extent.until_s)
        facts = watch.facts(end)
        for fact in facts:
            fact.stream, fact.output_limit = submissions.jobs[fact.id].stream, lengths[fact.id]
            if jct is not None and fact.service is ServiceClass.REAL_TIME:
                fact.target = fact.target._replace(jct_s=jct(lengths[fact.id]))
        for replica, usage in enumerate(watch.usages):
            usage.close(keeps_series=shard == replica == 0)  # a record has only the series of the first replica
        decisions = [replica.decisions for replica in replicas]
        forecasts = None if predictions is None else predictions.log
        split = None if handovers is None else handovers.figures
        programs = list(watch.programs.programs.values())
        return ShardResult(end, facts, submissions.rejected, watch.usages, decisions, forecasts, split, programs)

    def record(self, shards: Sequence[ShardResult]) -> Record:
        cell, system = self.cell, self.cell.system
        facts = [fact for shard in shards for fact in shard.facts]
        rejected = [job.kind for job in self.jobs if not system.takes(job)]
        rejected += [kind for shard in shards for kind in shard.rejected]
        end = max(shard.end_s for shard in shards)
        figures = summarize(facts, now=end, rejected=rejected, slo=self._slo, window_s=cell.window_s)
        record = _settings_of(cell) | figures
        if programs := [program for shard in shards for program in shard.programs]:
            record["programs"] = summarize_programs(programs)
        forecasts = [shard.forecasts for shard in shards if shard.forecasts is not None]
        if forecasts:
            record["prediction"] = {
                "predictor": system.predictor_for(cell.workload),
                **ForecastLog.of(forecasts).summary(),
                "execution": _execution(system.cost),
            }
        prefill, others = self._usages(shards)
        target_tokens = saturating_tokens(system.cost, system.max_num_batched_tokens)
        add_usage(record, prefill + others, target_tokens=target_tokens)
        if prefill:
            split = SplitFigures.of(shard.split for shard in shards if shard.split is not None)
            record |= split.describe(system, prefill, others)
        times = DecisionTimes.summary(decision for shard in shards for decision in shard.decisions)
        record["decision_ms"] = {name: value and rounded(value) for name, value in times.items()}
        record["version"] = VERSION
        return record

    def requests(self, shards: Sequence[ShardResult]) -> Iterator[Record]:
        """Yield a line per accepted request in order of their ends, then the rejected ones of the workload."""
        for facts in (facts for shard in shards for facts in shard.facts):
            yield {
                "stream": facts.stream,
                "service": facts.service.value,
                "priority": self.jobs[facts.id].priority if facts.id < len(self.jobs) else None,
                "due_s": facts.arrival,
                "sent_s": facts.arrival,
                "started_s": facts.started,
                "first_token_s": facts.first_token,
                "last_token_s": facts.last_token,
                "ended_s": facts.ended,
                "prompt_tokens": facts.prompt_tokens,
                "output_tokens": facts.output_tokens,
                "output_limit": facts.output_limit,
                "preemptions": facts.preemptions,
                "error": None if facts.is_complete else facts.reason or "unfinished",
            }
        for job in self.jobs:
            if not self.cell.system.takes(job):
                yield {
                    "stream": job.stream,
                    "service": job.service.value,
                    "priority": job.priority,
                    "due_s": job.at,
                    "prompt_tokens": job.prompt_tokens,
                    "output_limit": job.output_tokens,
                    "error": "rejected",
                }

    def _split_traffic(
        self, replicas: Sequence[Replica], arrivals: Arrivals, decode: Dispatch, handovers: Handovers
    ) -> SplitTraffic:
        system, prefills = self.cell.system, handovers.prefill_replicas
        return SplitTraffic(
            replicas,
            prefills,
            arrivals,
            prefill=_dispatch(system, system.prefill_system, prefills, lambda request: 1),
            decode=decode,
            network=Network(system.network_bytes_per_s),
            token_bytes=system.token_bytes,
            watcher=handovers,
        )

    def _closed(self, shard: int, submissions: Submissions) -> Iterator[ClosedStream]:
        extent, shards = self.cell.extent, self.cell.shards
        for index, closed in enumerate(self.cell.workload.closed):
            if size := len(range(shard, closed.size, shards)):
                jobs = islice(closed.jobs(extent.seed, index), shard, None, shards)
                yield submissions.closed_stream(closed, jobs, size, extent.duration_s)

    def _usages(self, shards: Sequence[ShardResult]) -> tuple[list[EngineUsage], list[EngineUsage]]:
        system, count = self.cell.system, len(shards)
        prefill = [shards[number % count].usages[number // count] for number in range(system.prefill_replicas)]
        others = [
            shards[number % count].usages[self._counts(number % count)[0] + number // count]
            for number in range(system.decode_replicas)
        ]
        return prefill, others

    def _counts(self, shard: int) -> tuple[int, int]:
        system, shards = self.cell.system, self.cell.shards
        return len(range(shard, system.prefill_replicas, shards)), len(range(shard, system.decode_replicas, shards))

    def _dealt(self, shard: int) -> list[int]:
        system, shards = self.cell.system, self.cell.shards
        replicas = system.prefill_replicas or system.replicas
        return [number for turn, number in enumerate(self._taken) if turn % replicas % shards == shard]


def run(
    cell: Cell,
    *,
    on_share: Callable[[float], None] = lambda share: None,
    on_events: Callable[[list[Event]], None] = _ignore,
    on_requests: Callable[[Iterator[Record]], None] | None = None,
) -> Record:
    whole, count = Run(cell), cell.shards

    def simulated(shard: int) -> ShardResult:
        def report(share: float) -> None:
            on_share((shard + share) / count)

        return whole.shard(shard, on_share=report, on_events=_ignore if shard else on_events)

    shards = [simulated(shard) for shard in range(count)]
    if on_requests is not None:
        on_requests(whole.requests(shards))
    return whole.record(shards)


class _Watch:
    def __init__(
        self,
        machines: Sequence[System],
        requests: int,
        first_closed: int,
        on_share: Callable[[float], None],
        on_events: Callable[[list[Event]], None],
    ) -> None:
        self._requests = requests
        self._first_closed = first_closed
        self._on_share = on_share
        self._on_events = on_events
        self._ended: list[RequestFacts] = []
        self._reported = self._others = 0
        self.handovers: Handovers | None = None
        self.programs = ProgramLog(machines[0].block_size)
        self.logs = [RequestLog(self._end) for _ in machines]
        self.usages = [
            EngineUsage(device_blocks=machine.kv_blocks, block_size=machine.block_size, block_bytes=machine.moved_bytes)
            for machine in machines
        ]

    def observe(self, replica: int, events: list[Event]) -> None:
        self.logs[replica].observe(events)
        self.usages[replica].observe(events)
        self.programs.observe(events)
        if self.handovers is not None:
            self.handovers.observe(replica, events)
        if replica == 0:
            self._on_events(events)
        if len(self._ended) - self._reported >= _REPORT_AFTER:
            self._reported = len(self._ended)
            self._on_share((self._reported - self._others) / max(1, self._requests))

    def facts(self, end: float) -> list[RequestFacts]:
        """Return all requests, those unfinished at `end` last. No events may be observed afterward."""
        in_transit = [] if self.handovers is None else self.handovers.live(end)
        return [*self._ended, *in_transit, *(request for log in self.logs for request in log.live(end))]

    def _end(self, facts: RequestFacts) -> None:
        if self.handovers is None or not self.handovers.takes(facts):
            self._ended.append(facts)
            self._others += facts.id >= self._first_closed


def _settings_of(cell: Cell) -> Record:
    system, extent = cell.system, cell.extent
    recipe = find(system.recipe)
    return {
        "recipe": recipe.name,
        "recipe_params": asdict(recipe.resolve(system.settings, system.own_params)),
        "model": system.model,
        "hardware": system.hardware,
        "driver": "simulator",
        "workload": cell.workload.describe(extent.rate_rps, extent.duration_s, extent.seed, extent.limit),
        "settings": system.describe(),
        "basis": {"profile": None} if system.basis is None else system.basis._asdict(),
    }


def _execution(cost: CostModel) -> Record:
    time = ExecutionTime(cost)
    names = ("t0_s", "alpha_s", "beta_s", "r2_prefill", "r2_decode")
    values = (time.t0, time.alpha, time.beta, *time.quality)
    return {name: rounded(value) for name, value in zip(names, values, strict=True)}


def _dispatch(system: System, machine: System, replicas: int, lengths: Callable[[Request], int]) -> Dispatch:
    return make_dispatch(
        system.dispatch, replicas, machine.cost, lengths, blocks=machine.cache_blocks, block_size=machine.block_size
    )
