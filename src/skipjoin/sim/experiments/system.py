from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Literal, NamedTuple

from skipjoin.config.shared import (
    MAX_NUM_SEQS,
    BestEffortWait,
    FairBy,
    KVType,
    MaxBatchedTokens,
    MaxNumSeqs,
    Objective,
    OutputWeight,
    SwapType,
    check_swap_type,
)
from skipjoin.core.decide.scheduler import Scheduler
from skipjoin.core.foreign import ForeignScheduler
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.policy import CostModel
from skipjoin.core.policy_set import Policies
from skipjoin.core.prefixes import NamedPrefix
from skipjoin.core.step import StateSizes
from skipjoin.kv_format import SWAP_FORMATS
from skipjoin.observe.record import Record
from skipjoin.options import ConfigError, Option, Value, check
from skipjoin.policies.dispatch import DISPATCH_RULES
from skipjoin.policies.execution import decode_alone, prefill_alone, scaled_jct
from skipjoin.policies.starvation import starvation_after
from skipjoin.recipes import BEST_EFFORT_WAIT_S, OUTPUT_WEIGHT, EngineLimits, Forecasts, Settings, find
from skipjoin.recipes.registry import own
from skipjoin.sim.experiments.predictors import default_predictor, parse_predictor
from skipjoin.sim.hardware import SPLIT_NETWORK_GBPS
from skipjoin.workload.request import WorkloadRequest
from skipjoin.workload.workload import Workload

_system = partial(Option, group="System")
_workload = partial(Option, group="Workload")
_scheduling = partial(Option, group="Scheduling")
# Maximum number of replicas, each of which has a scheduler of its own.
MAX_REPLICAS = 10_000
# Fields that require prefill replicas, and their options.
_SPLIT_OPTIONS = {"network_gbps": "network_gbps", "prefill": "prefill_hardware"}


class ProfileBasis(NamedTuple):
    """Profile behind simulated costs, and its relative errors on shapes that it was not fitted to."""

    profile: str
    date: str
    error_median: float
    error_p95: float


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Simulated system: a recipe on a machine."""

    recipe: str
    model: str
    hardware: str
    cost: CostModel
    kv_blocks: Annotated[int, Option("KV blocks of the device tier.", low=1)]
    block_bytes: int
    max_model_len: int
    recipe_params: Mapping[str, Value] = field(default_factory=dict)  # of any recipes; others than its own are ignored
    block_size: Annotated[int, Option("Tokens per KV block.", low=1)] = 16
    cpu_blocks: Annotated[int, Option("KV blocks of the CPU tier.", low=0)] = 0
    cpu_block_bytes: int | None = None  # None if it is that of the device
    kv_cache_dtype: KVType = "auto"
    swap_dtype: SwapType = "auto"
    max_num_seqs: MaxNumSeqs = MAX_NUM_SEQS
    max_num_batched_tokens: MaxBatchedTokens = 2048
    slo_s: Objective = None
    best_effort_wait_s: BestEffortWait = BEST_EFFORT_WAIT_S
    fair_by: FairBy = "none"
    fair_output_weight: OutputWeight = OUTPUT_WEIGHT
    max_tokens: Annotated[
        int | Literal["room", "exact"],
        _workload(
            "max_tokens of requests: the rest of the context, the exact output length (which reveals it to policies), "
            "or N, raised to the output length if that is longer.",
            low=1,
            metavar="room|exact|N",
        ),
    ] = "room"
    predictor: Annotated[
        str | None,
        _workload(
            "Forecasts for recipes that read them: a forecaster that learns (learned, alise, prior, or state:DIR of "
            "`skipjoin predict train`), or the true length with an error: oracle, noise:SIGMA, regress:CORRELATION, "
            "shuffled, constant:TOKENS, column:NAME of the trace (default: learned if the trace has texts, otherwise "
            "prior).",
            metavar="NAME",
        ),
    ] = None
    enable_prefix_caching: Annotated[
        bool,
        _scheduling(
            "Reuse the KV of common prefixes, which the workload defines by hash_ids of a trace or by a prefix.",
            flags=("--enable-prefix-caching/--no-enable-prefix-caching",),
        ),
    ] = True
    states: StateSizes | None = None
    stages: int = 1
    stage_shares: tuple[float, ...] = ()  # of each stage in a step's computation; empty if all are equal
    pipeline_depth: Annotated[
        int,
        _scheduling(
            "Plans in flight of a single stage, as in the server: 2 plans the next step while one runs, the server's "
            "default on a GPU. It takes longer to simulate.",
            low=1,
            high=2,
        ),
    ] = 1
    decision_s: Annotated[float, Option("CPU time of each scheduling decision.", low=0, high=1e6)] = 0.0
    step_noise: Annotated[
        float,
        _system(
            "How much steps vary around their modeled times, which policies see: standard deviation of the logarithm.",
            low=0,
            high=2,
        ),
    ] = 0.0
    replicas: Annotated[
        int, _system("Number of replicas behind one dispatcher.", low=1, high=MAX_REPLICAS, is_common=True)
    ] = 1
    dispatch: Annotated[
        str,
        _system(
            "Dispatch of requests to replicas; prefix-aware, as in the server, and least-work learn output lengths",
            choices=tuple(DISPATCH_RULES),
        ),
    ] = "round-robin"
    prefill_replicas: Annotated[
        int,
        _system(
            "Number of replicas that only prefill, as in DistServe. The others generate all tokens after the first. "
            "0 lets every replica do both.",
            low=0,
        ),
    ] = 0
    network_gbps: Annotated[
        float | None,
        _system(
            "Bandwidth of each replica's link in either direction, with --prefill-replicas "
            f"(default: {SPLIT_NETWORK_GBPS:g}).",
            above=0,
            high=1e6,
        ),
    ] = None
    basis: ProfileBasis | None = None  # None if the costs are computed from a data sheet
    prefill: System | None = None  # system of the prefill replicas, of which only the machine matters

    def __post_init__(self) -> None:
        check(self)
        if len(self.stage_shares) not in (0, self.stages):
            raise ConfigError(f"stage_shares must be empty or {self.stages}, got {len(self.stage_shares)}")
        check_swap_type(self.swap_dtype, self.kv_cache_dtype, "cpu_blocks", self.cpu_blocks)
        if self.stages > 1 and self.pipeline_depth > 1:
            raise ConfigError("pipeline_depth must be 1 with several stages: every stage has one plan in flight")
        self._check_split()
        find(self.recipe).build(self.settings, self.own_params)
        if self.predictor is not None:
            parse_predictor(self.predictor)

    def _check_split(self) -> None:
        for name in ("network_gbps", "prefill"):
            if not self.prefill_replicas and getattr(self, name) is not None:
                raise ConfigError(f"{_SPLIT_OPTIONS[name]} needs prefill_replicas")
        if not self.prefill_replicas:
            return
        if self.prefill_replicas >= self.replicas:
            raise ConfigError(f"prefill_replicas must be below replicas, {self.replicas}, got {self.prefill_replicas}")
        if not self.cpu_blocks:
            raise ConfigError(
                "prefill_replicas needs a CPU pool (swap_gib), to which decode replicas move what they evict"
            )
        prefill = self.prefill_system
        if (prefill.block_size, prefill.block_bytes) != (self.block_size, self.block_bytes):
            raise ConfigError(
                "prefill_hardware must have the KV blocks of hardware: "
                f"{self.block_size} tokens in {self.block_bytes} bytes, "
                f"not {prefill.block_size} in {prefill.block_bytes}"
            )

    @property
    def prefill_system(self) -> System:
        return self if self.prefill is None else self.prefill

    @property
    def decode_replicas(self) -> int:
        return self.replicas - self.prefill_replicas

    @property
    def network_bytes_per_s(self) -> float:
        return (SPLIT_NETWORK_GBPS if self.network_gbps is None else self.network_gbps) * 1e9 / 8

    @property
    def token_bytes(self) -> float:
        return self.block_bytes / self.block_size

    @property
    def cache_blocks(self) -> int:
        """Blocks per replica that can cache prefixes. CPU blocks cache only exact copies."""
        return self.kv_blocks + (self.cpu_blocks if SWAP_FORMATS[self.swap_dtype].is_exact else 0)

    def predictor_for(self, workload: Workload) -> str | None:
        match find(self.recipe).forecasts:
            case Forecasts.NONE:
                return None
            case Forecasts.TRUE:
                return "oracle"
            case Forecasts.LEARNED:
                return self.predictor or default_predictor(workload)

    @property
    def depth(self) -> int:
        return max(self.stages, self.pipeline_depth)

    def scheduler(self, policies: Policies, kv: KVLedger, *, receives_kv: bool) -> Scheduler:
        make = ForeignScheduler if receives_kv else Scheduler
        return make(policies, kv, depth=self.depth, overlap=self.pipeline_depth > 1)

    @property
    def moved_bytes(self) -> int:
        return self.block_bytes if self.cpu_block_bytes is None else self.cpu_block_bytes

    @property
    def settings(self) -> Settings:
        limits = EngineLimits(
            requests=None,
            max_len=self.max_model_len,
            device_blocks=self.kv_blocks,
            cpu_blocks=self.cpu_blocks,
            block_size=self.block_size,
            depth=self.depth,
        )
        return Settings(
            self.cost,
            self.max_num_seqs,
            self.max_num_batched_tokens,
            slo_s=self.slo_s,
            best_effort_wait_s=self.best_effort_wait_s,
            fair_output_weight=None if self.fair_by == "none" else self.fair_output_weight,
            has_true_forecasts=True,
            stages=self.stages,
            limits=limits,
        )

    @property
    def own_params(self) -> dict[str, Value]:
        return own(self.recipe, self.recipe_params)

    def describe(self) -> Record:
        given = {**self.recipe_params, **find(self.recipe).fixed}
        return {
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "block_size": self.block_size,
            "kv_blocks": self.kv_blocks,
            "kv_gib": round(self.kv_blocks * self.block_bytes / 2**30, 3),
            "cpu_blocks": self.cpu_blocks,
            "swap_gib": round(self.cpu_blocks * self.moved_bytes / 2**30, 3),
            "swap_dtype": self.swap_dtype,
            "max_model_len": self.max_model_len,
            # Always present, for compatibility with earlier records.
            "starvation_s": given.get("starvation_s", starvation_after(self.cost, self.slo_s)),
            "max_tokens": self.max_tokens,
            "stages": self.stages,
            "stage_shares": [round(share, 4) for share in self.stage_shares] or None,
            "decision_s": self.decision_s,
            "replicas": self.replicas,
            "dispatch": self.dispatch if self.replicas > 1 else None,
            **({} if self.states is None else {"states": self.states._asdict()}),
            **({"pipeline_depth": self.pipeline_depth} if self.pipeline_depth > 1 else {}),
            **({} if self.kv_cache_dtype == "auto" else {"kv_cache_dtype": self.kv_cache_dtype}),
            **({"step_noise": self.step_noise} if self.step_noise else {}),
            **({} if self.enable_prefix_caching else {"enable_prefix_caching": False}),
            **(self._describe_split() if self.prefill_replicas else {}),
            **(
                {}
                if self.fair_by == "none"
                else {name: getattr(self, name) for name in ("fair_by", "fair_output_weight")}
            ),
        }

    def _describe_split(self) -> Record:
        prefill = self.prefill_system
        return {
            "prefill_replicas": self.prefill_replicas,
            "prefill_hardware": prefill.hardware,
            "prefill_kv_blocks": prefill.kv_blocks,
            "network_gbps": self.network_bytes_per_s * 8 / 1e9,
        }

    def light_load(self, jobs: Sequence[WorkloadRequest]) -> tuple[float, float]:
        prompt = _mean_prompt(jobs)
        output = sum(job.output_tokens for job in jobs) / max(1, len(jobs))
        return prefill_alone(self.cost, prompt), decode_alone(self.cost, round(prompt + output / 2))

    def scaled_jct(self, jobs: Sequence[WorkloadRequest], scale: float) -> Callable[[float], float]:
        return scaled_jct(self.cost, scale, _mean_prompt(jobs))

    def max_output(self, job: WorkloadRequest) -> int:
        room = min(self.max_model_len, self.kv_blocks * self.block_size) - job.prompt_tokens
        # A prefill replica needs room for the prompt and the first token.
        return room if job.prompt_tokens < self.prefill_system.kv_blocks * self.block_size else 0

    def check_parts(self, job: WorkloadRequest) -> None:
        if job.parts is not None and self.enable_prefix_caching:
            job.parts.check(self.block_size)

    def prefix_of(self, job: WorkloadRequest) -> NamedPrefix | None:
        if job.parts is None or not self.enable_prefix_caching:
            return None
        return job.parts.prefix(self.block_size)

    def takes(self, job: WorkloadRequest) -> bool:
        return self.max_output(job) >= job.output_tokens

    def max_tokens_of(self, job: WorkloadRequest) -> int:
        match self.max_tokens:
            case "room":
                return self.max_output(job)
            case "exact":
                return job.output_tokens
            case number:
                return min(max(job.output_tokens, number), self.max_output(job))


def _mean_prompt(jobs: Sequence[WorkloadRequest]) -> int:
    return max(1, round(sum(job.prompt_tokens for job in jobs) / max(1, len(jobs))))
