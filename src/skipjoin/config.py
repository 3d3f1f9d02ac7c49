"""What a user may set, as frozen values. Read by cli, server, llm and engine; core and policies never see it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated
from urllib.parse import urlsplit

from skipjoin.knobs import ConfigError, Knob, Value, check, settings_of, unknown
from skipjoin.recipes import DEFAULT, DEFAULT_SLO_S, check_recipe

__all__ = [
    "DEPRECATED",
    "ConfigError",
    "EngineConfig",
    "ForecastConfig",
    "MaxBatchedTokens",
    "MaxNumSeqs",
    "Objective",
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
SERVER, LIMITS, FORECASTS = "HTTP server", "Limits", "Forecasts"
OBJECTIVES = "Objectives of requests without their own"
# A week: a longer deadline, or objective, is none.
MAX_DEADLINE_MS = 7 * 86_400_000
FORECASTERS = ("learnt", "alise", "prior", "none")

# Fields of an engine that a simulated system has, too.
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
        str, Knob("What computes the layers: auto, torch, cpp (CPU) or triton (CUDA).", group=MODEL)
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
            "The scheduler; `skipjoin recipes` lists all of them.",
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
    max_num_seqs: MaxNumSeqs = 128
    max_num_batched_tokens: MaxBatchedTokens = 2048
    slo_s: Objective = DEFAULT_SLO_S
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
        check_recipe(self.recipe, self.params, lossless_swap=self.swap_dtype == "auto")
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


def _objective(what: str) -> Knob:
    """A soft objective of requests that bring none of their own."""
    return Knob(f"{what} (default: none).", above=0, high=MAX_DEADLINE_MS, metavar="MILLISECONDS", group=OBJECTIVES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP server around an engine. Raises `ConfigError` on a value outside its bounds.

    api_keys: any of them opens every route but health; empty: no key is asked for. max_queued_requests,
    max_queued_tokens: beyond either a request is refused with 429.
    """

    host: Annotated[str, Knob("Address to listen on.", group=SERVER)] = "127.0.0.1"
    port: Annotated[int, Knob("Port to listen on; 0 picks a free one.", low=0, high=65535, group=SERVER)] = 8000
    api_keys: Annotated[
        tuple[str, ...],
        Knob(
            "Key that clients must send; may be repeated (default: none is asked for).",
            flags=("--api-key",),
            envvar="SKIPJOIN_API_KEY",
            metavar="KEY",
            group=SERVER,
        ),
    ] = ()
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
    slo_ttft_ms: Annotated[float | None, _objective("Time to the first token")] = None
    slo_tpot_ms: Annotated[float | None, _objective("Time per token after the first")] = None
    slo_jct_ms: Annotated[float | None, _objective("Time from arrival to the last token")] = None
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
    max_body_bytes: Annotated[
        int, Knob("Largest body of a request.", low=1, high=1 << 40, metavar="BYTES", group=LIMITS)
    ] = 4 << 20
    max_header_bytes: Annotated[
        int, Knob("Largest headers of a request.", low=1, high=1 << 40, metavar="BYTES", group=LIMITS)
    ] = 64 << 10
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
    enable_debug_routes: Annotated[
        bool, Knob("Serve GET /debug/requests, the state of every live request.", group=SERVER)
    ] = False

    def __post_init__(self) -> None:
        check(self)
        if any(not key for key in self.api_keys):
            raise ConfigError("api_key must not be empty")
        if self.forecast_url is not None:
            base_url("forecast_url", self.forecast_url)
        else:
            self._check_unasked("forecast_model", "forecast_timeout_s")

    def _check_unasked(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) != settings_of(type(self))[name].default:
                raise ConfigError(f"{name} is for another server that forecasts: set forecast_url")
