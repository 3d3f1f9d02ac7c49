"""Engine configuration: model, memory and scheduling."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated

from skipjoin.config.shared import (
    DEPRECATED,
    MAX_NUM_SEQS,
    MEASUREMENT,
    MEMORY,
    MODEL,
    OBJECTIVES,
    PARALLELISM,
    SCHEDULING,
    BestEffortWait,
    MaxBatchedTokens,
    MaxNumSeqs,
    Objective,
    SwapType,
    check_not_one_card,
    check_swap_type,
    with_aliases,
)
from skipjoin.options import ConfigError, Knob, Value, check
from skipjoin.recipes import BEST_EFFORT_WAIT_S, DEFAULT, DEFAULT_SLO_S, absolute, check_recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Engine configuration: model, memory and scheduling.

    Each field is described by its `Knob`. None selects the default that the help gives in brackets.

    Raises:
        ConfigError: A value is out of bounds.
    """

    model: Annotated[
        str, Knob("A Hugging Face folder, a hub id, or 'tally', the built-in model.", group=MODEL, positional=True)
    ] = "tally"
    dtype: Annotated[
        str, Knob("Type of weights and KV", choices=("auto", "float32", "bfloat16", "float16"), group=MODEL)
    ] = "auto"
    device: Annotated[
        str, Knob("Where the model runs: auto, cpu, cuda, or cuda:N, one of several cards.", group=MODEL)
    ] = "auto"
    attention: Annotated[
        str,
        Knob(
            "What computes the layers, cpp on a CPU and triton or flash on a GPU",
            choices=("auto", "torch", "cpp", "triton", "flash"),
            group=MODEL,
        ),
    ] = "auto"
    load_format: Annotated[
        str,
        Knob(
            "Weights as they are, or random ones, for which a folder with config.json is enough",
            choices=("auto", "dummy"),
            group=MODEL,
        ),
    ] = "auto"
    quantization: Annotated[
        str,
        Knob(
            "Weights of products as they are, or rounded to 8 bits, which makes decoding on a CPU faster",
            choices=("none", "int8"),
            group=MODEL,
        ),
    ] = "none"
    max_model_len: Annotated[
        int | None,
        Knob("Most tokens of prompt and output together (default: the model's).", low=1, high=1 << 31, group=MODEL),
    ] = None
    generation_config: Annotated[
        str,
        Knob(
            "Sampling defaults of requests without their own: those of the model's generation_config.json, or "
            "Skipjoin's",
            choices=("auto", "none"),
            group=MODEL,
        ),
    ] = "auto"
    enforce_eager: Annotated[
        bool, Knob("Launch the kernels of decode steps one by one, without CUDA graphs.", group=MODEL)
    ] = False
    batch_invariant: Annotated[
        bool,
        Knob("On a GPU, compute a token alike whatever else is in the batch, with slower products.", group=MODEL),
    ] = False
    threads: Annotated[
        int | None,
        Knob("CPU threads of the model (default: as many as can run at once).", low=1, high=1 << 31, group=MODEL),
    ] = None
    seed: Annotated[int, Knob("From which requests without a seed draw theirs.", group=MODEL)] = 0
    recipe: Annotated[
        str,
        Knob(
            "The scheduler; `skipjoin recipes` lists all of them. FILE.py:NAME: one in a file of your own. "
            "NAME[PARAMETER=VALUE,...]: with parameters.",
            flags=("--recipe", "--scheduling-policy"),
            metavar="NAME",
            group=SCHEDULING,
        ),
    ] = DEFAULT
    recipe_params: Annotated[
        dict[str, Value],
        Knob(
            "A parameter of the recipe; may be repeated. `skipjoin recipes` lists them.",
            flags=("--set",),
            metavar="NAME=VALUE",
            group=SCHEDULING,
        ),
    ] = field(default_factory=dict)
    max_num_seqs: MaxNumSeqs = MAX_NUM_SEQS
    max_num_batched_tokens: MaxBatchedTokens = 2048
    slo_s: Objective = DEFAULT_SLO_S
    best_effort_wait_s: BestEffortWait = BEST_EFFORT_WAIT_S
    fair_output_weight: Annotated[
        float | None,
        Knob(
            "What a generated token counts where clients get equal service, which the driver of the engine tells apart "
            "(default: they are not).",
            above=0,
            high=1000,
            option=False,
        ),
    ] = None
    slo_jct_scale: Annotated[
        float | None,
        Knob(
            "Time from arrival to the last token, as so many times what the request takes alone: its prefill, and a "
            "decode step for each token that is forecast (default: none).",
            above=0,
            high=1e9,
            group=OBJECTIVES,
        ),
    ] = None
    pipeline_depth: Annotated[
        int | None,
        Knob(
            "Plans in flight; 2 decides the next step while one runs (default: 2 on a GPU, else 1, as the model needs "
            "the CPU's cores).",
            low=1,
            high=2,
            group=SCHEDULING,
        ),
    ] = None
    max_live_requests: Annotated[
        int | None,
        Knob(
            "Most requests at once, which the driver of the engine keeps to (default: any number).",
            low=1,
            high=1 << 40,
            option=False,
        ),
    ] = None
    block_size: Annotated[int, Knob("Tokens per KV block.", low=1, high=1024, group=MEMORY)] = 16
    kv_cache_gib: Annotated[
        float | None,
        Knob("Size of the KV pool (default: a share of free memory).", above=0, high=1e6, metavar="GIB", group=MEMORY),
    ] = None
    gpu_memory_utilization: Annotated[
        float, Knob("Share of GPU memory to use, weights included.", above=0, high=1, metavar="SHARE", group=MEMORY)
    ] = 0.9
    swap_space_gib: Annotated[
        float | None,
        Knob(
            "Size of the host pool that KV is swapped to; 0: none, it is recomputed (default: a share of free RAM).",
            low=0,
            high=1e6,
            flags=("--swap-space", "--kv-offloading-size"),
            metavar="GIB",
            group=MEMORY,
        ),
    ] = None
    swap_dtype: SwapType = "auto"
    enable_prefix_caching: Annotated[
        bool, Knob("Keep the KV of full blocks for later prompts that begin alike.", group=MEMORY)
    ] = True
    tensor_parallel_size: Annotated[
        int,
        Knob(
            "Ranks that share each layer.",
            low=1,
            high=1024,
            flags=("--tensor-parallel-size", "-tp"),
            metavar="RANKS",
            group=PARALLELISM,
        ),
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        Knob(
            "Stages of consecutive layers, one after the other; each has a plan of its own in flight.",
            low=1,
            high=1024,
            flags=("--pipeline-parallel-size", "-pp"),
            metavar="STAGES",
            group=PARALLELISM,
        ),
    ] = 1
    distributed_executor_backend: Annotated[
        str,
        Knob(
            "Ranks are processes that Ray places if there are several, or always",
            choices=("auto", "ray"),
            group=PARALLELISM,
        ),
    ] = "auto"
    ray_address: Annotated[
        str | None,
        Knob(
            "Ray cluster for the ranks (default: one of its own on this machine).",
            metavar="HOST:PORT",
            group=PARALLELISM,
        ),
    ] = None
    max_restarts: Annotated[
        int,
        Knob(
            "How often within ten minutes lost ranks are started anew before the engine gives up.",
            low=0,
            high=1000,
            group=PARALLELISM,
        ),
    ] = 5
    profile: Annotated[
        str,
        Knob(
            "What steps cost: measured at the first start and cached, guessed, or of `skipjoin profile --out FILE`.",
            metavar="auto|off|FILE",
            group=MEASUREMENT,
        ),
    ] = "auto"
    timeline: Annotated[
        str | None, Knob("Write a trace for Perfetto and chrome://tracing.", metavar="FILE", group=MEASUREMENT)
    ] = None
    # Deprecated aliases of `recipe_params`; to be removed.
    starvation_s: Annotated[
        float | None, Knob("As --set starvation_s=SECONDS.", metavar="SECONDS", group=DEPRECATED)
    ] = None
    starvation_bound_s: Annotated[
        float | None,
        Knob(
            "As --set starvation_bound_s=SECONDS.", flags=("--starvation-bound",), metavar="SECONDS", group=DEPRECATED
        ),
    ] = None
    quantum_s: Annotated[float | None, Knob("As --set quantum_s=SECONDS.", metavar="SECONDS", group=DEPRECATED)] = None
    oracle: Annotated[str, Knob("As --set oracle=max-tokens.", metavar="NAME", group=DEPRECATED)] = "none"

    def __post_init__(self) -> None:
        if not self.profile:
            raise ConfigError("profile must be auto, off or the file of a profile, got an empty name")
        check(self)
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {self.device!r}")
        object.__setattr__(self, "recipe", absolute(self.recipe))  # engines may run in another working folder
        check_recipe(
            self.recipe,
            self.params,
            lossless_swap=self.swap_dtype == "auto",
            fair_output_weight=self.fair_output_weight,
        )
        check_swap_type(self.swap_dtype, "swap_space_gib", self.swap_space_gib)
        self._check_ranks()

    @property
    def params(self) -> dict[str, Value]:
        """The recipe's given parameters, including those under deprecated names."""
        return with_aliases(
            self.recipe_params,
            starvation_s=self.starvation_s,
            starvation_bound_s=self.starvation_bound_s,
            quantum_s=self.quantum_s,
            oracle=None if self.oracle == "none" else self.oracle,
        )

    @property
    def ranks(self) -> int:
        """Number of ranks that each hold a part of the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def is_distributed(self) -> bool:
        """True if the model runs on ranks outside the engine's process."""
        return self.ranks > 1 or self.distributed_executor_backend == "ray"

    def plans_in_flight(self, device: str) -> int:
        """Return the maximum number of plans in flight on a `device` of kind cpu or cuda."""
        if self.pipeline_parallel_size > 1:
            return self.pipeline_parallel_size
        return self.pipeline_depth or (2 if device == "cuda" else 1)

    def _check_ranks(self) -> None:
        if self.is_distributed:
            check_not_one_card(self.device)
        if self.batch_invariant and self.tensor_parallel_size > 1:
            raise ConfigError(
                "tensor_parallel_size must be 1 with batch_invariant, since sums over ranks depend on the batch, "
                f"got {self.tensor_parallel_size}"
            )
        if self.pipeline_parallel_size > 1 and self.pipeline_depth is not None:
            raise ConfigError(
                "pipeline_depth must not be set beside pipeline_parallel_size: every stage has one plan in flight"
            )
        if self.ray_address is not None and not self.is_distributed:
            raise ConfigError(
                "ray_address is for several ranks: set tensor_parallel_size, pipeline_parallel_size or "
                "distributed_executor_backend ray"
            )
