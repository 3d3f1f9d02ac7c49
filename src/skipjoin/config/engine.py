from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated

from skipjoin.config.shared import (
    MAX_NUM_SEQS,
    BestEffortWait,
    KVType,
    MaxBatchedTokens,
    MaxNumSeqs,
    Objective,
    SwapBandwidth,
    SwapType,
    check_not_one_card,
    check_swap_bandwidth,
    check_swap_type,
    checked_adapters,
    measurement_option,
    memory_option,
    model_option,
    objective_option,
    parallelism_option,
    scheduling_option,
)
from skipjoin.options import ConfigError, Option, Value, check
from skipjoin.recipes import BEST_EFFORT_WAIT_S, DEFAULT, absolute, check_recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Engine configuration. None selects the default that the help gives in brackets."""

    model: Annotated[
        str,
        model_option("Hugging Face folder, GGUF file or hub id, or 'tally', the built-in model.", is_positional=True),
    ] = "tally"
    dtype: Annotated[
        str,
        model_option("Data type of weights and KV", choices=("auto", "float32", "bfloat16", "float16"), is_common=True),
    ] = "auto"
    device: Annotated[
        str, model_option("Device of the model: auto, cpu, cuda, or cuda:N for one of several GPUs.", is_common=True)
    ] = "auto"
    attention: Annotated[
        str,
        model_option(
            "Backend of attention and kernels: cpp is for CPUs, triton and flash are for GPUs",
            choices=("auto", "torch", "cpp", "triton", "flash"),
        ),
    ] = "auto"
    task: Annotated[
        str,
        model_option(
            "Generate text, embed texts, or score pairs of texts; auto is what the model's files are for",
            choices=("auto", "generate", "embed", "score"),
        ),
    ] = "auto"
    load_format: Annotated[
        str,
        model_option(
            "Load the model's weights, or fill it with random ones, which needs only config.json",
            choices=("auto", "dummy"),
        ),
    ] = "auto"
    quantization: Annotated[
        str,
        model_option(
            "Round the weights of linear layers to 8 bits, which speeds up decoding: int8 on a CPU, fp8 on a GPU",
            choices=("none", "int8", "fp8"),
            is_common=True,
        ),
    ] = "none"
    lora_modules: Annotated[
        dict[str, str],
        model_option(
            "Low-rank adapter in a folder that PEFT wrote, which requests choose by its name as their model; may be "
            "repeated.",
            metavar="NAME=FOLDER",
            is_common=True,
        ),
    ] = field(default_factory=dict)
    max_model_len: Annotated[
        int | None,
        model_option(
            "Maximum tokens of prompt and output together (default: the model's).", low=1, high=1 << 31, is_common=True
        ),
    ] = None
    generation_config: Annotated[
        str,
        model_option(
            "Default sampling parameters: those of the model's generation_config.json, or Skipjoin's",
            choices=("auto", "none"),
        ),
    ] = "auto"
    enforce_eager: Annotated[
        bool, model_option("Launch the kernels of decode steps one by one, without CUDA graphs.")
    ] = False
    batch_invariant: Annotated[
        bool, model_option("Make outputs on a GPU independent of the rest of the batch, with slower matrix products.")
    ] = False
    threads: Annotated[
        int | None,
        model_option(
            "CPU threads of the model (default: as many as can run at once).", low=1, high=1 << 31, is_common=True
        ),
    ] = None
    seed: Annotated[int, model_option("Seed from which requests without their own seed derive one.")] = 0
    recipe: Annotated[
        str,
        scheduling_option(
            "Scheduler: a name that `skipjoin recipes` lists, or FILE.py:NAME for one of your own. "
            "NAME[PARAMETER=VALUE,...] sets parameters.",
            flags=("--recipe", "--scheduling-policy"),
            metavar="NAME",
            is_common=True,
        ),
    ] = DEFAULT
    recipe_params: Annotated[
        dict[str, Value],
        scheduling_option(
            "Parameter of the recipe; may be repeated. `skipjoin recipes` lists them.",
            flags=("--set",),
            metavar="NAME=VALUE",
            is_common=True,
        ),
    ] = field(default_factory=dict)
    max_num_seqs: MaxNumSeqs = MAX_NUM_SEQS
    max_num_batched_tokens: MaxBatchedTokens = 2048
    slo_s: Objective = None
    best_effort_wait_s: BestEffortWait = BEST_EFFORT_WAIT_S
    fair_output_weight: Annotated[
        float | None,
        Option(
            "Weight of a generated token relative to a prompt token (default: no fairness).",
            above=0,
            high=1000,
            is_internal=True,
        ),
    ] = None
    slo_jct_scale: Annotated[
        float | None,
        objective_option(
            "Time from arrival to the last token, as a multiple of the time of the request alone: its prefill and one "
            "decode step for each predicted token (default: none).",
            above=0,
            high=1e9,
        ),
    ] = None
    pipeline_depth: Annotated[
        int | None,
        scheduling_option(
            "Plans in flight; 2 plans the next step while one runs (default: 2 on a GPU, else 1, because the model "
            "needs the CPU's cores).",
            low=1,
            high=2,
        ),
    ] = None
    max_live_requests: Annotated[
        int | None,
        Option(
            "Maximum number of unfinished requests, which the caller enforces (default: unlimited).",
            low=1,
            high=1 << 40,
            is_internal=True,
        ),
    ] = None
    learned_dir: Annotated[
        str | None,
        Option("Folder of what the recipe learns; the caller chooses it (default: not kept).", is_internal=True),
    ] = None
    otlp_traces_endpoint: Annotated[
        str | None, Option("Collector that gets the traces of requests.", is_internal=True)
    ] = None
    block_size: Annotated[int, memory_option("Tokens per KV block.", low=1, high=1024)] = 16
    kv_cache_gib: Annotated[
        float | None,
        memory_option("Size of the KV cache (default: a share of free memory).", above=0, high=1e6, is_common=True),
    ] = None
    gpu_memory_utilization: Annotated[
        float,
        memory_option(
            "Share of GPU memory to use, weights included.", above=0, high=1, metavar="SHARE", is_common=True
        ),
    ] = 0.9
    swap_space_gib: Annotated[
        float | None,
        memory_option(
            "Size of the KV cache's CPU tier; 0 disables swapping, so that evicted KV is recomputed (default: a share "
            "of free RAM).",
            low=0,
            high=1e6,
            flags=("--swap-space", "--kv-offloading-size"),
            is_common=True,
        ),
    ] = None
    kv_cache_dtype: KVType = "auto"
    swap_dtype: SwapType = "auto"
    swap_bandwidth_gbps: SwapBandwidth = None
    enable_prefix_caching: Annotated[
        bool, memory_option("Keep the KV of full blocks for later prompts with the same prefix.")
    ] = True
    state_snapshots: Annotated[
        int,
        memory_option(
            "Most states that the prefix cache keeps, for models with convolutions, linear attention or Mamba-2: their "
            "prompts use a cached prefix as far as there is one.",
            low=0,
            high=1 << 20,
        ),
    ] = 64
    tensor_parallel_size: Annotated[
        int,
        parallelism_option(
            "Ranks that share each layer.",
            low=1,
            high=1024,
            flags=("--tensor-parallel-size", "-tp"),
            metavar="RANKS",
            is_common=True,
        ),
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        parallelism_option(
            "Pipeline stages of consecutive layers; each has one plan in flight.",
            low=1,
            high=1024,
            flags=("--pipeline-parallel-size", "-pp"),
            metavar="STAGES",
        ),
    ] = 1
    distributed_executor_backend: Annotated[
        str,
        parallelism_option(
            "Start ranks as processes of this machine (auto: if there are several; mp: also a single one), or by Ray",
            choices=("auto", "mp", "ray"),
        ),
    ] = "auto"
    ray_address: Annotated[
        str | None,
        parallelism_option("Ray cluster of the ranks (default: a new one on this machine).", metavar="HOST:PORT"),
    ] = None
    max_restarts: Annotated[
        int,
        parallelism_option(
            "Maximum number of restarts of lost ranks within ten minutes before the engine fails.", low=0, high=1000
        ),
    ] = 5
    profile: Annotated[
        str,
        measurement_option(
            "Step costs: measured while the first server idles and cached, estimated, or from a file of `skipjoin "
            "profile --out FILE`.",
            metavar="auto|off|FILE",
        ),
    ] = "auto"
    timeline: Annotated[
        str | None, measurement_option("Write a trace for Perfetto or chrome://tracing.", metavar="FILE")
    ] = None

    def __post_init__(self) -> None:
        if not self.profile:
            raise ConfigError("profile must be auto, off or the file of a profile, got an empty name")
        check(self)
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {self.device!r}")
        # Engines may run in another working folder.
        object.__setattr__(self, "recipe", absolute(self.recipe))
        object.__setattr__(self, "lora_modules", checked_adapters(self.lora_modules))
        check_recipe(self.recipe, self.recipe_params, fair_output_weight=self.fair_output_weight)
        check_swap_type(self.swap_dtype, self.kv_cache_dtype, "swap_space_gib", self.swap_space_gib)
        check_swap_bandwidth(self.swap_bandwidth_gbps, "swap_space_gib", self.swap_space_gib)
        self._check_ranks()

    @property
    def ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def is_distributed(self) -> bool:
        return self.ranks > 1 or self.distributed_executor_backend != "auto"

    @property
    def is_on_ray(self) -> bool:
        return self.distributed_executor_backend == "ray" or self.ray_address is not None

    def plans_in_flight(self, device: str) -> int:
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
                "pipeline_depth must not be set together with pipeline_parallel_size: a stage has one plan in flight"
            )
        if self.ray_address is not None and not self.is_distributed:
            raise ConfigError(
                "ray_address is for several ranks: set tensor_parallel_size, pipeline_parallel_size or "
                "distributed_executor_backend ray"
            )
        if self.ray_address is not None and self.distributed_executor_backend == "mp":
            raise ConfigError("ray_address is for ranks on Ray: distributed_executor_backend must be auto or ray")
