"""One simulated run: from a system, a workload and a seed to a record.

How long an output gets is known to the simulated executor alone, to declared oracles, and to `max_tokens` "exact".
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Annotated, Literal

from skipjoin.bench.predictors import Foreseeing, Predictor, default_predictor, parse_predictor
from skipjoin.bench.workload import Workload, WorkloadRequest
from skipjoin.config import ConfigError, MaxBatchedTokens, MaxNumSeqs, Objective, SwapType, check_swap_type
from skipjoin.core.engine import EngineCore
from skipjoin.core.events import Event
from skipjoin.core.kv import KVLedger
from skipjoin.core.policy import CostModel
from skipjoin.core.request import Request, RequestOptions
from skipjoin.core.scheduler import Scheduler
from skipjoin.core.step import StepShape
from skipjoin.exec.simulated import SimulatedExecutor
from skipjoin.knobs import Knob, Value, check
from skipjoin.observe.record import NO_SLO, Record, Slo, add_usage, rounded, summarize
from skipjoin.observe.requests import RequestFacts, RequestLog
from skipjoin.observe.usage import EngineUsage
from skipjoin.policies.dispatch import DISPATCH_RULES, make_dispatch
from skipjoin.policies.execution import ExecutionTime
from skipjoin.policies.starvation import starvation_after
from skipjoin.recipes import DEFAULT_SLO_S, EngineLimits, Forecasts, Settings, build, find, own
from skipjoin.sim.driver import Replica, simulate_cluster
from skipjoin.version import VERSION

# Only lengths of tokens matter: _END ends a request at its true length where it requested more.
_TOKEN, _END = 0, 1
_STOP = frozenset([_END])
# Progress is reported after so many requests.
_REPORT_AFTER = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """The simulated system: a recipe on a machine.

    recipe_params: parameters of recipes, of which this one takes those that it has. model, hardware: names for the
    record. cost: of steps and transfers. stages: of a pipeline; stage_shares: of each in the computing of a step, empty
    where all are equal. kv_blocks, host_blocks: of each replica on either tier, of block_size tokens, with block_bytes
    and host_block_bytes (None: as many); swap_dtype says why, for the record.
    max_model_len: most tokens of prompt and output. decision_s: host time of each decision.
    """

    recipe: str
    model: str
    hardware: str
    cost: CostModel
    kv_blocks: Annotated[int, Knob("KV blocks on the device.", low=1)]
    block_bytes: int
    max_model_len: int
    recipe_params: Mapping[str, Value] = field(default_factory=dict)
    block_size: Annotated[int, Knob("Tokens per KV block.", low=1)] = 16
    host_blocks: Annotated[int, Knob("KV blocks on the host.", low=0)] = 0
    host_block_bytes: int | None = None
    swap_dtype: SwapType = "auto"
    max_num_seqs: MaxNumSeqs = 256
    max_num_batched_tokens: MaxBatchedTokens = 2048
    slo_s: Objective = DEFAULT_SLO_S
    max_tokens: Annotated[
        int | Literal["room", "exact"],
        Knob(
            "What requests ask for: the room that the context leaves, exactly what they will generate (this tells "
            "policies the true lengths), or N tokens, and more where they will generate more.",
            low=1,
            metavar="room|exact|N",
            group="Workload",
        ),
    ] = "room"
    predictor: Annotated[
        str | None,
        Knob(
            "What foresees output lengths for recipes that read forecasts: a forecaster that learns (learnt, alise, "
            "prior, ...), or the truth with an error: oracle, noise:SIGMA, regress:CORRELATION, shuffled, "
            "constant:TOKENS, column:NAME of the trace (default: learnt if the trace has texts, otherwise prior).",
            metavar="NAME",
            group="Workload",
        ),
    ] = None
    stages: int = 1
    stage_shares: tuple[float, ...] = ()
    decision_s: Annotated[float, Knob("Host time of each decision.", low=0, high=1e6)] = 0.0
    replicas: Annotated[int, Knob("Copies of the system behind one dispatcher.", low=1, group="System")] = 1
    dispatch: Annotated[
        str,
        Knob(
            "Which copy gets a request (least-work learns the lengths of outputs)",
            choices=tuple(DISPATCH_RULES),
            group="System",
        ),
    ] = "round-robin"

    def __post_init__(self) -> None:
        check(self)
        if len(self.stage_shares) not in (0, self.stages):
            raise ConfigError(f"stage_shares must be empty or {self.stages}, got {len(self.stage_shares)}")
        check_swap_type(self.swap_dtype, "host_blocks", self.host_blocks)
        find(self.recipe).build(self.settings, self.own_params)
        if self.predictor is not None:
            parse_predictor(self.predictor)

    def predictor_for(self, workload: Workload) -> str | None:
        """What foresees lengths in a run of this workload; None: the recipe reads no forecasts."""
        match find(self.recipe).forecasts:
            case Forecasts.NONE:
                return None
            case Forecasts.TRUE:
                return "oracle"
            case Forecasts.LEARNT:
                return self.predictor or default_predictor(workload)

    @property
    def moved_bytes(self) -> int:
        """Of a KV block on the host, and on the link to it."""
        return self.block_bytes if self.host_block_bytes is None else self.host_block_bytes

    @property
    def settings(self) -> Settings:
        """What the recipe is built from."""
        limits = EngineLimits(
            requests=None,
            max_len=self.max_model_len,
            device_blocks=self.kv_blocks,
            host_blocks=self.host_blocks,
            block_size=self.block_size,
            depth=self.stages,
        )
        return Settings(
            self.cost,
            self.max_num_seqs,
            self.max_num_batched_tokens,
            slo_s=self.slo_s,
            has_true_forecasts=True,
            stages=self.stages,
            lossless_swap=self.swap_dtype == "auto",
            limits=limits,
        )

    @property
    def own_params(self) -> dict[str, Value]:
        """Of `recipe_params`, those that this recipe has."""
        return own(self.recipe, self.recipe_params)

    def describe(self) -> Record:
        """The record's settings: everything that affects the figures apart from the workload."""
        return {
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "block_size": self.block_size,
            "kv_blocks": self.kv_blocks,
            "kv_gib": round(self.kv_blocks * self.block_bytes / 2**30, 3),
            "host_blocks": self.host_blocks,
            "swap_gib": round(self.host_blocks * self.moved_bytes / 2**30, 3),
            "swap_dtype": self.swap_dtype,
            "max_model_len": self.max_model_len,
            # In every record since the first one, whatever the recipe.
            "starvation_s": self.recipe_params.get("starvation_s", starvation_after(self.slo_s)),
            "max_tokens": self.max_tokens,
            "stages": self.stages,
            "stage_shares": [round(share, 4) for share in self.stage_shares] or None,
            "decision_s": self.decision_s,
            "replicas": self.replicas,
            "dispatch": self.dispatch if self.replicas > 1 else None,
        }

    def light_load(self, jobs: Sequence[WorkloadRequest]) -> tuple[float, float]:
        """Seconds of a prefill and of a decode step of the mean lengths without other requests."""
        prompt = max(1, round(sum(job.prompt_tokens for job in jobs) / max(1, len(jobs))))
        output = sum(job.output_tokens for job in jobs) / max(1, len(jobs))
        prefill = StepShape(prefill=prompt, attention=prompt * (prompt + 1) // 2)
        return self.cost.step(prefill), self.cost.step(StepShape(decodes=1, context=round(prompt + output / 2)))


@dataclass(frozen=True, slots=True)
class Extent:
    """How much of a workload runs, as in `Workload.draw`. until_s: when to stop, even if requests are left."""

    rate_rps: float | None
    duration_s: float | None
    seed: int
    limit: int | None = None
    until_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Cell:
    """One run: a system, a workload and its extent.

    slo: objectives; slo_scale: instead, this many times the light-load prefill and decode step (FastServe section 6.2).
    """

    system: System
    workload: Workload
    extent: Extent
    slo: Slo = NO_SLO
    slo_scale: float | None = None

    def jobs(self) -> list[WorkloadRequest]:
        """The requests of the run. Raises `ConfigError` for a workload that cannot be drawn."""
        extent = self.extent
        return self.workload.draw(extent.rate_rps, extent.duration_s, extent.seed, extent.limit)

    def check(self) -> None:
        """Raise `ConfigError` for a run without requests."""
        jobs = self.jobs()
        if not jobs:
            raise ConfigError(
                f"no request arrives within {self.extent.duration_s} s at {self.extent.rate_rps} requests per second"
            )
        self.predictor(jobs)

    def slo_for(self, jobs: Sequence[WorkloadRequest]) -> Slo:
        """The objectives, for the run of these jobs."""
        if self.slo_scale is None:
            return self.slo
        prefill_s, decode_s = self.system.light_load(jobs)
        return Slo(ttft_s=self.slo_scale * prefill_s, tpot_s=self.slo_scale * decode_s)

    def predictor(self, jobs: Sequence[WorkloadRequest]) -> Predictor | None:
        """What foresees the lengths of these jobs, the run's. Raises `ConfigError` for a workload that lacks what the
        predictor reads."""
        name = self.system.predictor_for(self.workload)
        return None if name is None else parse_predictor(name).make(self.workload, jobs, self.extent.seed)


def run(
    cell: Cell,
    *,
    on_share: Callable[[float], None] = lambda share: None,
    on_events: Callable[[list[Event]], None] = lambda events: None,
) -> Record:
    """Simulate a cell and return its record.

    on_share: called from time to time with the share of requests that have ended. on_events: called with the events of
    the first replica. Raises `ConfigError` for a workload that cannot be drawn.
    """
    system, jobs = cell.system, cell.jobs()
    lengths = [job.output_tokens for job in jobs]
    taken = [number for number, job in enumerate(jobs) if _most_output(system, job) >= job.output_tokens]
    watch = _Watch(system, len(taken), on_share, on_events)
    dispatch = make_dispatch(system.dispatch, system.replicas, system.cost, lambda request: lengths[request.id])
    predictor = cell.predictor(jobs)
    foreseeing = None if predictor is None else Foreseeing(dispatch, predictor)
    replicas = [_replica(system, lengths) for _ in range(system.replicas)]
    with _without_garbage_collection():
        # A generator, so that ended requests take no memory for their tokens.
        requests = (_request(system, number, jobs[number]) for number in taken)
        end = simulate_cluster(
            replicas, requests, foreseeing or dispatch, on_events=watch.observe, until=cell.extent.until_s
        )
    facts = watch.facts(end)
    for one in facts:
        one.stream, one.output_limit = jobs[one.id].stream, lengths[one.id]
    rejected = [job.stream for job in jobs if _most_output(system, job) < job.output_tokens]
    record = _settings_of(cell) | summarize(facts, now=end, rejected=rejected, slo=cell.slo_for(jobs))
    if foreseeing is not None:
        record["prediction"] = {
            "predictor": system.predictor_for(cell.workload),
            **foreseeing.log.summary(),
            "execution": _execution(system.cost),
        }
    add_usage(record, watch.usages)
    record["version"] = VERSION
    return record


class _Watch:
    """Collects what a record needs from the events of a run."""

    def __init__(
        self,
        system: System,
        requests: int,
        on_share: Callable[[float], None],
        on_events: Callable[[list[Event]], None],
    ) -> None:
        """requests: how many there are in all. on_share, on_events: see `run`."""
        self._requests = requests
        self._on_share = on_share
        self._on_events = on_events
        self._ended: list[RequestFacts] = []
        self._reported = 0
        self._logs = [RequestLog(self._ended.append) for _ in range(system.replicas)]
        self.usages = [
            EngineUsage(device_blocks=system.kv_blocks, block_size=system.block_size, block_bytes=system.moved_bytes)
            for _ in self._logs
        ]

    def observe(self, replica: int, events: list[Event]) -> None:
        """Take the events of one instant on a replica."""
        self._logs[replica].observe(events)
        self.usages[replica].observe(events)
        if replica == 0:
            self._on_events(events)
        if len(self._ended) - self._reported >= _REPORT_AFTER:
            self._reported = len(self._ended)
            self._on_share(self._reported / self._requests)

    def facts(self, end: float) -> list[RequestFacts]:
        """All requests, those that had not ended at `end` last. Nothing may be observed afterwards."""
        return self._ended + [one for log in self._logs for one in log.live(end)]


def _settings_of(cell: Cell) -> Record:
    """What the figures of a record are of."""
    system, extent = cell.system, cell.extent
    return {
        "recipe": system.recipe,
        "recipe_params": asdict(find(system.recipe).resolve(system.settings, system.own_params)),
        "model": system.model,
        "hardware": system.hardware,
        "driver": "simulator",
        "workload": cell.workload.describe(extent.rate_rps, extent.duration_s, extent.seed, extent.limit),
        "settings": system.describe(),
    }


def _execution(cost: CostModel) -> Record:
    """The linear model of a request's execution time, and how well it fits (ALISE section 3.1)."""
    time = ExecutionTime(cost)
    names = ("t0_s", "alpha_s", "beta_s", "r2_prefill", "r2_decode")
    values = (time.t0, time.alpha, time.beta, *time.quality)
    return {name: rounded(value) for name, value in zip(names, values, strict=True)}


def _replica(system: System, lengths: Sequence[int]) -> Replica:
    policies = build(system.recipe, system.settings, system.own_params)
    kv = KVLedger(system.kv_blocks, system.host_blocks, system.block_size)
    core = EngineCore(Scheduler(policies, kv, depth=system.stages))
    executor = SimulatedExecutor(system.cost, _sampler(lengths), system.stage_shares or system.stages)
    return Replica(core, executor, decision_s=system.decision_s)


def _sampler(lengths: Sequence[int]) -> Callable[[Request, int], int]:
    """What generates tokens. lengths: of the outputs, by the id of the request."""

    def sample(request: Request, position: int) -> int:
        return _END if position + 1 - len(request.prompt) >= lengths[request.id] else _TOKEN

    return sample


def _most_output(system: System, job: WorkloadRequest) -> int:
    """The room for a job's output: a server would reject one that requests more."""
    return min(system.max_model_len, system.kv_blocks * system.block_size) - job.prompt_tokens


def _request(system: System, number: int, job: WorkloadRequest) -> Request:
    return Request(
        number,
        job.at,
        range(job.prompt_tokens),
        _max_tokens(system, job),
        stop_tokens=_STOP,
        options=RequestOptions(priority=job.priority),
    )


def _max_tokens(system: System, job: WorkloadRequest) -> int:
    """What a job asks for."""
    match system.max_tokens:
        case "room":
            return _most_output(system, job)
        case "exact":
            return job.output_tokens
        case number:
            return min(max(job.output_tokens, number), _most_output(system, job))


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """A run makes millions of small values and no cycles; garbage collection would take a third of its time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
