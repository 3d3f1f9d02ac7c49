"""What a user may set, as frozen values. Read by cli, server, llm and engine; core and policies never see it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, NamedTuple
from urllib.parse import urlsplit

from skipjoin.access import AccessConfig
from skipjoin.knobs import ConfigError, Knob, Value, check, settings_of, unknown
from skipjoin.recipes import BEST_EFFORT_WAIT_S, DEFAULT, DEFAULT_SLO_S, OUTPUT_WEIGHT, absolute, check_recipe

__all__ = [
    "DEPRECATED",
    "HANG_LIMITS",
    "MAX_NUM_SEQS",
    "BestEffortWait",
    "ConfigError",
    "EngineConfig",
    "FairBy",
    "ForecastConfig",
    "HangLimits",
    "MaxBatchedTokens",
    "MaxNumSeqs",
    "Objective",
    "OutputWeight",
    "ServerConfig",
    "SwapType",
    "base_url",
    "check_swap_type",
    "unknown",
    "with_aliases",
]

METRICS_COMPAT = ("none", "vllm")
# Groups of the help, in its order.
MODEL, SCHEDULING, MEMORY, PARALLELISM = "Model", "Scheduling", "Memory", "Parallelism"
MEASUREMENT, DEPRECATED = "Measurement", "Deprecated aliases"
SERVER, LIMITS, FORECASTS, BATCHES = "HTTP server", "Limits", "Forecasts", "Files and batches"
OBJECTIVES = "Objectives of requests without their own"
ASKED = "Objectives that requests may ask for"
# A week: a longer deadline, or objective, is none.
MAX_DEADLINE_MS = 7 * 86_400_000
# Requests of service_tier priority have half of the default objectives: they wait for each other only, and a default
# objective allows for waiting, too.
PRIORITY_SHARE = 0.5
# The `batch_dir` of a server without batches.
NOWHERE = "none"
LOG_LEVELS, LOG_FORMATS = ("debug", "info", "warning", "error"), ("text", "json")
FORECASTERS = ("learnt", "alise", "prior", "none")

# Fields of an engine that a simulated system has, too, and the default of one.
MAX_NUM_SEQS = 256
MaxNumSeqs = Annotated[int, Knob("Most requests in a step.", low=1, high=65536, group=SCHEDULING)]
MaxBatchedTokens = Annotated[int, Knob("Most tokens in a step.", low=1, high=1 << 20, group=SCHEDULING)]
Objective = Annotated[
    float,
    Knob(
        "Seconds per output token that users accept: recipes take their parameters from it. It is no objective of a "
        "request.",
        above=0,
        high=1e6,
        flags=("--slo",),
        metavar="SECONDS",
        group=SCHEDULING,
    ),
]
BestEffortWait = Annotated[
    float,
    Knob(
        "Time after which the oldest best-effort request is served as a real-time one, until it ends; one at a time.",
        above=0,
        high=1e9,
        metavar="SECONDS",
        group=SCHEDULING,
    ),
]
# How clients share the service: see `docs/scheduling.md`.
FairBy = Annotated[
    str,
    Knob("Between which clients the service is shared out evenly", choices=("none", "key"), group=SCHEDULING),
]
OutputWeight = Annotated[
    float,
    Knob(
        "With --fair-by key: what a generated token counts, where one of a prompt counts 1.",
        above=0,
        high=1000,
        group=SCHEDULING,
    ),
]
SwapType = Annotated[
    str,
    Knob(
        "KV on the host: as on the device, or rounded to 8 bits, which makes room for 1.6 to 1.8 times as much; "
        "outputs of requests that were swapped may then differ",
        choices=("auto", "int8"),
        group=MEMORY,
    ),
]


def base_url(field: str, given: str) -> str:
    """The URL of an OpenAI-compatible server, which may be given with /v1, without it. Raises `ConfigError` for a text
    that is none. field: the setting that it is for."""
    try:
        parts = urlsplit(given)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise ConfigError(f"{field} must be like http://127.0.0.1:8000, got {given!r}")
    return given.rstrip("/").removesuffix("/v1")


def check_swap_type(swap_dtype: str, field: str, size: float | None) -> None:
    """Raise `ConfigError` for KV that is rounded on the host where there is no host pool. field: the setting of the
    pool's size, and `size` its value; None: a default."""
    if swap_dtype == "int8" and size == 0:
        raise ConfigError(f"swap_dtype int8 is for KV on the host: {field} must be above 0, got {size:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The engine: model, memory, scheduling. Raises `ConfigError` on a value outside its bounds.

    Each field says what it is: `Knob`. None where a default is given in brackets stands for that.
    """

    model: Annotated[
        str, Knob("A Hugging Face folder, a hub id, or 'tally', the built-in model.", group=MODEL, positional=True)
    ] = "tally"
    dtype: Annotated[
        str, Knob("Type of weights and KV", choices=("auto", "float32", "bfloat16", "float16"), group=MODEL)
    ] = "auto"
    device: Annotated[str, Knob("Where the model runs", choices=("auto", "cpu", "cuda"), group=MODEL)] = "auto"
    attention: Annotated[
        str,
        Knob(
            "What computes the layers, cpp on a CPU and triton on a GPU",
            choices=("auto", "torch", "cpp", "triton"),
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
    threads: Annotated[
        int | None, Knob("CPU threads of the model (default: all).", low=1, high=1 << 31, group=MODEL)
    ] = None
    seed: Annotated[int, Knob("From which requests without a seed draw theirs.", group=MODEL)] = 0
    recipe: Annotated[
        str,
        Knob(
            "The scheduler; `skipjoin recipes` lists all of them. FILE.py:NAME: one in a file of your own.",
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
    # Parameters of recipes as they were given before there was `recipe_params`; to be removed.
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
        object.__setattr__(self, "recipe", absolute(self.recipe))  # engines may have another working folder
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
        """The recipe's parameters that are given, under their new names or as deprecated aliases."""
        return with_aliases(
            self.recipe_params,
            starvation_s=self.starvation_s,
            starvation_bound_s=self.starvation_bound_s,
            quantum_s=self.quantum_s,
            oracle=None if self.oracle == "none" else self.oracle,
        )

    @property
    def ranks(self) -> int:
        """Processes, or threads of one, that have a part of the model each."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def is_distributed(self) -> bool:
        """Whether the model runs on ranks of their own, outside of the engine's process."""
        return self.ranks > 1 or self.distributed_executor_backend == "ray"

    def plans_in_flight(self, device: str) -> int:
        """At most: one per stage, or what `pipeline_depth` says of a single one. device: cpu or cuda."""
        if self.pipeline_parallel_size > 1:
            return self.pipeline_parallel_size
        return self.pipeline_depth or (2 if device == "cuda" else 1)

    def _check_ranks(self) -> None:
        if self.pipeline_parallel_size > 1 and self.pipeline_depth is not None:
            raise ConfigError(
                "pipeline_depth must not be set beside pipeline_parallel_size: every stage has one plan in flight"
            )
        if self.ray_address is not None and not self.is_distributed:
            raise ConfigError(
                "ray_address is for several ranks: set tensor_parallel_size, pipeline_parallel_size or "
                "distributed_executor_backend ray"
            )


def with_aliases(given: dict[str, Value], **aliases: Value | None) -> dict[str, Value]:
    """Parameters of a recipe and those that were given by their old names; None: not given.

    Raises `ConfigError` for one that is given both ways.
    """
    old = {name: value for name, value in aliases.items() if value is not None}
    if twice := next((name for name in old if name in given), None):
        raise ConfigError(f"{twice} is given twice, as a parameter of the recipe and by its old name")
    return given | old


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastConfig:
    """How output lengths are forecast. Raises `ConfigError` on a value outside its bounds."""

    forecaster: Annotated[
        str | None,
        Knob(
            "What forecasts how long outputs get (default: learnt if forecasts are read, else none)",
            choices=FORECASTERS,
            group=FORECASTS,
        ),
    ] = None
    forecast_encoder: Annotated[
        str,
        Knob(
            "What prompts are compared by: their hashed tokens, the model's embeddings of them, or a Hugging Face "
            "encoder in a folder.",
            metavar="hashed|embeddings|FOLDER",
            group=FORECASTS,
        ),
    ] = "hashed"
    forecast_dir: Annotated[
        str | None,
        Knob(
            "Where what was learnt is kept; none: it ends with the process (default: in the user's cache folder).",
            metavar="DIR",
            group=FORECASTS,
        ),
    ] = None
    forecast_entries: Annotated[
        int,
        Knob("Most past requests that forecasts are made from.", low=1, high=10_000_000, group=FORECASTS),
    ] = 10_000
    forecast_max_age_s: Annotated[
        float,
        Knob("Age from which a past request is forgotten.", above=0, high=1e12, metavar="SECONDS", group=FORECASTS),
    ] = 30 * 86400.0

    def __post_init__(self) -> None:
        check(self)
        for name in ("forecast_encoder", "forecast_dir"):
            if getattr(self, name) == "":
                raise ConfigError(f"{name} must not be empty")
        if self.forecaster in ("prior", "none") and self.forecast_encoder != "hashed":
            raise ConfigError(
                f"forecast_encoder must be hashed with forecaster {self.forecaster}, which compares no prompts, "
                f"got {self.forecast_encoder!r}"
            )


class HangLimits(NamedTuple):
    """When an engine process hangs, in seconds. step_s: a step takes longer. hang_s: it gives no sign of life for so
    long, and is killed."""

    step_s: float = 600.0
    hang_s: float = 30.0


HANG_LIMITS = HangLimits()


def _objective(what: str, default: str = "none", group: str = OBJECTIVES) -> Knob:
    """A soft objective, or a bound of one. default: what stands for none, for the help."""
    return Knob(f"{what} (default: {default}).", above=0, high=MAX_DEADLINE_MS, metavar="MILLISECONDS", group=group)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(AccessConfig):
    """The HTTP server around an engine. Raises `ConfigError` on a value outside its bounds.

    max_queued_requests, max_queued_tokens: beyond either a request is refused with 429.
    """

    host: Annotated[str, Knob("Address to listen on.", group=SERVER)] = "127.0.0.1"
    port: Annotated[int, Knob("Port to listen on; 0 picks a free one.", low=0, high=65535, group=SERVER)] = 8000
    served_model_name: Annotated[
        str | None, Knob("What clients call the model (default: its own name).", metavar="NAME", group=SERVER)
    ] = None
    chat_template: Annotated[
        str | None, Knob("Jinja chat template to use instead of the model's own.", metavar="FILE", group=SERVER)
    ] = None
    max_queued_requests: Annotated[
        int,
        Knob(
            "Most requests in the server, waiting and running; more are refused with 429.",
            low=1,
            high=1 << 40,
            flags=("--max-num-queued-reqs",),
            metavar="REQUESTS",
            group=LIMITS,
        ),
    ] = 1024
    max_queued_tokens: Annotated[
        int,
        Knob(
            "Most prompt tokens of requests that wait; more are refused with 429.",
            low=1,
            high=1 << 40,
            flags=("--max-num-queued-tokens",),
            metavar="TOKENS",
            group=LIMITS,
        ),
    ] = 1 << 20
    default_deadline_s: Annotated[
        float | None,
        Knob(
            "Time until a request without a deadline is given up (default: never).",
            above=0,
            high=1e9,
            metavar="SECONDS",
            group=LIMITS,
        ),
    ] = None
    priority_range: Annotated[
        str | None,
        Knob(
            "Numbers that clients may set as the priority of a request, besides 0; lower is earlier (default: only 0).",
            metavar="LOW:HIGH",
            group=LIMITS,
        ),
    ] = None
    priority_tier: Annotated[
        str,
        Knob(
            "Which clients may ask for service_tier priority, whose requests displace those of the other tiers",
            choices=("none", "all"),
            group=LIMITS,
        ),
    ] = "none"
    fair_by: FairBy = "none"
    fair_output_weight: OutputWeight = OUTPUT_WEIGHT
    slo_ttft_ms: Annotated[float | None, _objective("Time to the first token")] = None
    slo_tpot_ms: Annotated[float | None, _objective("Time per token after the first")] = None
    slo_jct_ms: Annotated[float | None, _objective("Time from arrival to the last token")] = None
    priority_ttft_ms: Annotated[
        float | None, _objective("Time to the first token with service_tier priority", "half of --slo-ttft-ms")
    ] = None
    priority_tpot_ms: Annotated[
        float | None,
        _objective("Time per token after the first with service_tier priority", "half of --slo-tpot-ms"),
    ] = None
    min_slo_ttft_ms: Annotated[
        float | None, _objective("Least time to the first token that a request may ask for", "any above 0", ASKED)
    ] = None
    max_slo_ttft_ms: Annotated[
        float | None, _objective("Largest time to the first token that a request may ask for", "a week", ASKED)
    ] = None
    min_slo_tpot_ms: Annotated[
        float | None,
        _objective("Least time per token after the first that a request may ask for", "any above 0", ASKED),
    ] = None
    max_slo_tpot_ms: Annotated[
        float | None,
        _objective("Largest time per token after the first that a request may ask for", "a week", ASKED),
    ] = None
    shutdown_timeout_s: Annotated[
        float,
        Knob(
            "Time that running requests get after SIGTERM.",
            above=0,
            high=1e9,
            flags=("--shutdown-timeout",),
            metavar="SECONDS",
            group=LIMITS,
        ),
    ] = 30.0
    step_timeout_s: Annotated[
        float,
        Knob(
            "Longest time of a step; an engine that computes one for longer hangs (--hang-timeout).",
            above=0,
            high=1e9,
            flags=("--step-timeout",),
            metavar="SECONDS",
            group=LIMITS,
        ),
    ] = HANG_LIMITS.step_s
    hang_timeout_s: Annotated[
        float,
        Knob(
            "Time without a sign of life of an engine process after which it prints its stacks and is killed.",
            low=1,
            high=1e9,
            flags=("--hang-timeout",),
            metavar="SECONDS",
            group=LIMITS,
        ),
    ] = HANG_LIMITS.hang_s
    max_body_bytes: Annotated[
        int, Knob("Largest body of a request.", low=1, high=1 << 40, metavar="BYTES", group=LIMITS)
    ] = 4 << 20
    max_header_bytes: Annotated[
        int, Knob("Largest headers of a request.", low=1, high=1 << 40, metavar="BYTES", group=LIMITS)
    ] = 64 << 10
    max_connections: Annotated[
        int,
        Knob(
            "Most connections at once; one more closes an idle one. The limit of open files may allow fewer.",
            low=1,
            high=1 << 20,
            metavar="CONNECTIONS",
            group=LIMITS,
        ),
    ] = 4096
    write_timeout_s: Annotated[
        float,
        Knob(
            "Time after which a client that does not read its answer is disconnected.",
            above=0,
            high=1e9,
            metavar="SECONDS",
            group=LIMITS,
        ),
    ] = 60.0
    max_prompt_scores: Annotated[
        int,
        Knob(
            "Most log-probabilities of prompts in one answer: tokens, times 1 + logprobs, times n.",
            low=1,
            high=1 << 30,
            metavar="SCORES",
            group=LIMITS,
        ),
    ] = 1 << 18
    forecast_url: Annotated[
        str | None,
        Knob(
            "OpenAI-compatible server whose model is asked how long each output gets, such as http://127.0.0.1:9000; "
            "nothing waits for its answers.",
            metavar="URL",
            group=FORECASTS,
        ),
    ] = None
    forecast_model: Annotated[
        str | None, Knob("Model to ask there (default: the one that it serves).", metavar="NAME", group=FORECASTS)
    ] = None
    forecast_timeout_s: Annotated[
        float,
        Knob(
            "Time after which such an answer is not waited for any more.",
            above=0,
            high=600,
            metavar="SECONDS",
            group=FORECASTS,
        ),
    ] = 5.0
    metrics_compat: Annotated[
        str, Knob("Tell metrics under other names, too", choices=METRICS_COMPAT, group=MEASUREMENT)
    ] = "none"
    replicas: Annotated[
        int,
        Knob(
            "Engines behind this server, by Ray Serve; each has the model, and the KV pool, of its own.",
            low=1,
            high=4096,
            group=PARALLELISM,
        ),
    ] = 1
    log_level: Annotated[
        str,
        Knob(
            "What the log has at least; info: a line for each request, but for those that only look",
            choices=LOG_LEVELS,
            group=SERVER,
        ),
    ] = "info"
    log_format: Annotated[str, Knob("Form of the log's lines", choices=LOG_FORMATS, group=SERVER)] = "text"
    enable_debug_routes: Annotated[
        bool, Knob("Serve GET /debug/requests, the state of every live request.", group=SERVER)
    ] = False
    batch_dir: Annotated[
        str | None,
        Knob(
            "Folder of uploaded files and batches; none: this server has no batches (default: in the user's cache "
            "folder).",
            metavar="DIR",
            group=BATCHES,
        ),
    ] = None
    batch_db: Annotated[
        str | None,
        Knob(
            "PostgreSQL database of the batches, which several servers may share if they share the folder, too "
            "(default: SQLite in the folder).",
            metavar="postgresql://...",
            group=BATCHES,
        ),
    ] = None
    batch_inflight: Annotated[
        int | None,
        Knob(
            "Most sequences of batches in the engine, waiting and running (default: twice --max-num-seqs, for each "
            "replica).",
            low=1,
            high=1 << 20,
            metavar="SEQUENCES",
            group=BATCHES,
        ),
    ] = None
    batch_max_lines: Annotated[
        int, Knob("Most lines of a batch.", low=1, high=10_000_000, metavar="LINES", group=BATCHES)
    ] = 50_000
    batch_max_file_bytes: Annotated[
        int, Knob("Largest file that is uploaded.", low=1, high=1 << 40, metavar="BYTES", group=BATCHES)
    ] = 200_000_000
    batch_max_line_bytes: Annotated[
        int, Knob("Longest line of a batch.", low=1, high=1 << 30, metavar="BYTES", group=BATCHES)
    ] = 4 << 20
    batch_max_bytes_per_key: Annotated[
        int,
        Knob(
            "Most bytes of files that one key has; uploads beyond are refused with 429.",
            low=1,
            high=1 << 50,
            metavar="BYTES",
            group=BATCHES,
        ),
    ] = 10_000_000_000
    batch_max_active_per_key: Annotated[
        int,
        Knob(
            "Most unfinished batches that one key has; more are refused with 429.",
            low=1,
            high=1 << 30,
            metavar="BATCHES",
            group=BATCHES,
        ),
    ] = 100

    def __post_init__(self) -> None:
        check(self)
        self.check_access()
        if self.fair_by == "key" and not (self.api_keys or self.api_key_file):
            raise ConfigError("fair_by key needs API keys, which tell clients apart: set api_keys or api_key_file")
        _ = self.priorities
        for name in ("priority_ttft_ms", "priority_tpot_ms"):
            if getattr(self, name) is not None and self.priority_tier == "none":
                raise ConfigError(f"{name} is for requests of service_tier priority: set priority_tier all")
        for name in ("ttft", "tpot"):
            self._check_order(f"priority_{name}_ms", f"slo_{name}_ms")
            self._check_order(f"min_slo_{name}_ms", f"max_slo_{name}_ms")
        if self.forecast_url is not None:
            base_url("forecast_url", self.forecast_url)
        else:
            self._check_unasked("forecast_model", "forecast_timeout_s")
        self._check_batches()

    @property
    def hang_limits(self) -> HangLimits:
        """When an engine of this server hangs."""
        return HangLimits(self.step_timeout_s, self.hang_timeout_s)

    @property
    def priorities(self) -> tuple[int, int]:
        """The lowest and the highest priority that clients may set, besides 0. Raises `ConfigError`."""
        if self.priority_range is None:
            return 0, 0
        try:
            low, high = map(int, self.priority_range.split(":"))
        except ValueError:
            raise ConfigError(f"priority_range must be two integers, LOW:HIGH, got {self.priority_range!r}") from None
        if not -(1 << 63) <= low <= high < 1 << 63:
            raise ConfigError(
                f"priority_range must be LOW:HIGH of 64 bits, LOW at most HIGH, got {self.priority_range!r}"
            )
        return low, high

    def default_ms(self, name: str, *, is_urgent: bool) -> float | None:
        """The objective of requests that bring none, in milliseconds; None: they have none. name: ttft, tpot or jct.
        is_urgent: with service_tier priority."""
        default: float | None = getattr(self, f"slo_{name}_ms")
        if not is_urgent or name == "jct":
            return default
        own: float | None = getattr(self, f"priority_{name}_ms")
        return own if own is not None or default is None else default * PRIORITY_SHARE

    def asked_bounds_ms(self, name: str) -> tuple[float | None, float]:
        """The least objective that a request may ask for, None for any above 0, and the largest. name: as above."""
        if name == "jct":
            return None, MAX_DEADLINE_MS
        return getattr(self, f"min_slo_{name}_ms"), getattr(self, f"max_slo_{name}_ms") or MAX_DEADLINE_MS

    def _check_order(self, smaller: str, larger: str) -> None:
        low, high = getattr(self, smaller), getattr(self, larger)
        if low is not None and high is not None and low > high:
            raise ConfigError(f"{smaller} must be at most {larger}, which is {high:g}, got {low:g}")

    def _check_unasked(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) != settings_of(type(self))[name].default:
                raise ConfigError(f"{name} is for another server that forecasts: set forecast_url")

    @property
    def has_batches(self) -> bool:
        """Whether there is a place for files and batches."""
        return self.batch_dir != NOWHERE

    def _check_batches(self) -> None:
        if self.batch_dir == "":
            raise ConfigError("batch_dir must not be empty")
        if self.batch_db is None:
            return
        if not self.batch_db.startswith(("postgresql://", "postgres://")):
            # Only its beginning is shown: the rest may have a password.
            scheme, separator, _ = self.batch_db.partition("://")
            got = repr(scheme + separator) if separator else "a text without ://"
            raise ConfigError(f"batch_db must be like postgresql://user@host/name, got {got}")
        if not self.has_batches:
            raise ConfigError("batch_db must not be set where batch_dir is none: the files need a folder")
