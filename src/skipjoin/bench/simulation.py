"""One simulated run: a system, a workload and a seed in, a record out."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from skipjoin.bench.workload import Workload, WorkloadRequest
from skipjoin.config import DEFAULT_SLO_S, ConfigError
from skipjoin.core.engine import EngineCore
from skipjoin.core.events import Event
from skipjoin.core.kv import KVLedger
from skipjoin.core.policy import CostModel
from skipjoin.core.request import Request, RequestOptions
from skipjoin.core.scheduler import Scheduler
from skipjoin.core.step import StepShape
from skipjoin.exec.simulated import SimulatedExecutor
from skipjoin.observe.record import NO_SLO, Record, Slo, add_usage, summarize
from skipjoin.observe.requests import RequestFacts, RequestLog
from skipjoin.observe.usage import EngineUsage
from skipjoin.policies.dispatch import DISPATCH_RULES, make_dispatch
from skipjoin.policies.starvation import starvation_after
from skipjoin.recipes import Settings, build
from skipjoin.sim.driver import Replica, simulate_cluster
from skipjoin.version import VERSION

# Lengths are all that matters of tokens: one ends a request at its true length, where it asked for more.
_TOKEN, _END = 0, 1
_STOP = frozenset([_END])


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """What is simulated: a recipe on a machine.

    model, hardware: names for the record. cost: of steps and transfers. stages: of a pipeline; stage_shares: of each in
    the computing of a step, empty where all are equal.
    kv_blocks, host_blocks: of each replica on either tier, of block_size tokens and block_bytes.
    max_model_len: most tokens of prompt and output.
    max_tokens: what requests ask for; None: just what they will generate, as load clients do.
    decision_s: host time of each decision. replicas, dispatch: a cluster and its rule.
    """

    recipe: str
    model: str
    hardware: str
    cost: CostModel
    kv_blocks: int
    block_bytes: int
    max_model_len: int
    block_size: int = 16
    host_blocks: int = 0
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    starvation_s: float = starvation_after(DEFAULT_SLO_S)
    max_tokens: int | None = None
    stages: int = 1
    stage_shares: tuple[float, ...] = ()
    decision_s: float = 0.0
    replicas: int = 1
    dispatch: str = "round-robin"

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "replicas", "block_size", "kv_blocks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.dispatch not in DISPATCH_RULES:
            raise ConfigError(f"dispatch must be one of {', '.join(DISPATCH_RULES)}, got {self.dispatch!r}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if len(self.stage_shares) not in (0, self.stages):
            raise ConfigError(f"stage_shares must be empty or {self.stages}, got {len(self.stage_shares)}")
        if self.host_blocks < 0:
            raise ConfigError(f"host_blocks must be at least 0, got {self.host_blocks}")
        if not 0 < self.starvation_s < math.inf:
            raise ConfigError(f"starvation_s must be above 0 seconds, got {self.starvation_s}")
        if not 0 <= self.decision_s < math.inf:
            raise ConfigError(f"decision_s must be at least 0 seconds, got {self.decision_s}")

    def describe(self) -> Record:
        """The record's settings: all that decides the figures and is not the workload."""
        return {
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "block_size": self.block_size,
            "kv_blocks": self.kv_blocks,
            "kv_gib": round(self.kv_blocks * self.block_bytes / 2**30, 3),
            "host_blocks": self.host_blocks,
            "swap_gib": round(self.host_blocks * self.block_bytes / 2**30, 3),
            "max_model_len": self.max_model_len,
            "starvation_s": self.starvation_s,
            "max_tokens": self.max_tokens,
            "stages": self.stages,
            "stage_shares": [round(share, 4) for share in self.stage_shares] or None,
            "decision_s": self.decision_s,
            "replicas": self.replicas,
            "dispatch": self.dispatch if self.replicas > 1 else None,
        }

    def light_load(self, jobs: Sequence[WorkloadRequest]) -> tuple[float, float]:
        """Seconds of a prefill and of a decode step of the mean lengths when nobody else is there."""
        prompt = max(1, round(sum(job.prompt_tokens for job in jobs) / max(1, len(jobs))))
        output = sum(job.output_tokens for job in jobs) / max(1, len(jobs))
        prefill = StepShape(prefill=prompt, attention=prompt * (prompt + 1) // 2)
        return self.cost.step(prefill), self.cost.step(StepShape(decodes=1, context=round(prompt + output / 2)))


@dataclass(frozen=True, slots=True)
class Extent:
    """How much of a workload runs, as in `Workload.draw`. until_s: when to stop, finished or not."""

    rate_rps: float | None
    duration_s: float | None
    seed: int
    limit: int | None = None
    until_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Cell:
    """One run: a system, a workload and how much of it.

    slo: objectives; slo_scale: instead, this many times the light-load prefill and decode step (FastServe section
    6.2).
    """

    system: System
    workload: Workload
    extent: Extent
    slo: Slo = NO_SLO
    slo_scale: float | None = None

    def jobs(self) -> list[WorkloadRequest]:
        """What the run is asked to do. Raises `ConfigError` for a workload that cannot be drawn."""
        extent = self.extent
        return self.workload.draw(extent.rate_rps, extent.duration_s, extent.seed, extent.limit)

    def check(self) -> None:
        """Raises `ConfigError` for a run that has nothing to do."""
        if not self.jobs():
            raise ConfigError(
                f"no request arrives within {self.extent.duration_s} s at {self.extent.rate_rps} requests per second"
            )


class TrueLengths:
    """The oracle: the output lengths that the workload will have. A request carries its own as `sampling`."""

    def predict(self, request: Request) -> int:
        length: int = request.sampling  # type: ignore[assignment]
        return length


def run(
    cell: Cell,
    *,
    on_share: Callable[[float], None] = lambda share: None,
    on_events: Callable[[list[Event]], None] = lambda events: None,
) -> Record:
    """Simulate, and say what came of it.

    on_share: called now and then with the share of requests that are over. on_events: what happens on the first
    replica. Raises `ConfigError` for a workload that cannot be drawn.
    """
    system, extent, slo = cell.system, cell.extent, cell.slo
    jobs = cell.jobs()
    if cell.slo_scale is not None:
        prefill_s, decode_s = system.light_load(jobs)
        slo = Slo(ttft_s=cell.slo_scale * prefill_s, tpot_s=cell.slo_scale * decode_s)
    taken = [(number, job) for number, job in enumerate(jobs) if _room(system, job) >= job.output_tokens]
    rejected = [job.stream for job in jobs if _room(system, job) < job.output_tokens]
    ended: list[RequestFacts] = []
    logs = [RequestLog(ended.append) for _ in range(system.replicas)]
    usages = [
        EngineUsage(device_blocks=system.kv_blocks, block_size=system.block_size, block_bytes=system.block_bytes)
        for _ in logs
    ]
    told = 0

    def observe(replica: int, events: list[Event]) -> None:
        nonlocal told
        logs[replica].observe(events)
        usages[replica].observe(events)
        if replica == 0:
            on_events(events)
        if len(ended) - told >= 64:
            told = len(ended)
            on_share(told / len(taken))

    replicas = [_replica(system) for _ in logs]
    dispatch = make_dispatch(system.dispatch, system.replicas, system.cost, TrueLengths())
    with _without_garbage_collection():
        # Made on the way: the tokens of requests that are over need no memory.
        requests = (_request(system, number, job) for number, job in taken)
        end = simulate_cluster(replicas, requests, dispatch, on_events=observe, until=extent.until_s)
    facts = ended + [one for log in logs for one in log.live(end)]
    for one in facts:
        one.stream = jobs[one.id].stream
    record: Record = {
        "recipe": system.recipe,
        "model": system.model,
        "hardware": system.hardware,
        "driver": "simulator",
        "workload": cell.workload.describe(extent.rate_rps, extent.duration_s, extent.seed, extent.limit),
        "settings": system.describe(),
        **summarize(facts, now=end, rejected=rejected, slo=slo),
    }
    add_usage(record, usages)
    record["version"] = VERSION
    return record


def _replica(system: System) -> Replica:
    settings = Settings(
        system.cost,
        system.max_num_seqs,
        system.max_num_batched_tokens,
        system.starvation_s,
        predictor=TrueLengths(),
        stages=system.stages,
    )
    kv = KVLedger(system.kv_blocks, system.host_blocks, system.block_size)
    core = EngineCore(Scheduler(build(system.recipe, settings), kv, depth=system.stages))
    executor = SimulatedExecutor(system.cost, _sample, system.stage_shares or system.stages)
    return Replica(core, executor, decision_s=system.decision_s)


def _room(system: System, job: WorkloadRequest) -> int:
    """Most tokens that a job can generate; a server would refuse one that wants more."""
    return min(system.max_model_len, system.kv_blocks * system.block_size) - job.prompt_tokens


def _request(system: System, number: int, job: WorkloadRequest) -> Request:
    asked = job.output_tokens if system.max_tokens is None else max(job.output_tokens, system.max_tokens)
    return Request(
        number,
        job.at,
        range(job.prompt_tokens),
        min(asked, _room(system, job)),
        stop_tokens=_STOP,
        options=RequestOptions(priority=job.priority),
        sampling=job.output_tokens,
    )


def _sample(request: Request, position: int) -> int:
    return _END if position + 1 - len(request.prompt) >= request.sampling else _TOKEN  # type: ignore[operator]


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """A run makes millions of small values and no cycles; looking for some would take a third of its time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
