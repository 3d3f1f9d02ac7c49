"""What a user may set, as frozen values. Read by cli, server, llm and the assembly; core and policies never see it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

METRICS_COMPAT = ("none", "vllm")
ORACLES = ("none", "max-tokens")
# The recipes that promote who starves, and whose KV makes way for the promoted.
BOUNDED_RECIPES = ("fastserve", "fastserve-reactive", "fastserve-recompute", "mlfq")
# Seconds per output token that users accept: FastServe's objective of the normalized latency.
DEFAULT_SLO_S = 0.3


class ConfigError(ValueError):
    """A setting outside its bounds. The text names the setting and the bound."""


def unknown(field: str, got: str, known: Iterable[str]) -> ConfigError:
    """What to raise for a name that is not one of `known`: it tells the nearest of them, or all, in their order."""
    names = list(known)
    near = difflib.get_close_matches(got.strip().lower(), names, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"choose from {', '.join(names)}"
    return ConfigError(f"{field}: there is no {got!r}; {hint}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The engine: model, memory, scheduling. Raises `ConfigError` on a value outside its bounds.

    model: a Hugging Face folder or hub id; "tally" is the built-in model. dtype: auto, float32, bfloat16, float16.
    device: auto, cpu, cuda. load_format: "auto" reads the folder's weights; "dummy" draws random ones, so that a folder
    with a config.json is enough to measure with. attention: auto, torch, cpp, triton: what computes the layers.
    max_model_len: most tokens of prompt and output together; None: what the model holds. block_size: tokens per KV
    block. kv_cache_gib: size of the KV pool; None: a share of what is free. gpu_memory_utilization: that share on CUDA,
    weights included.
    swap_space_gib: size of the host pool, to which KV is swapped; 0: none, KV is computed again; None: a share of
    the RAM that is free.
    recipe: which scheduler. max_num_seqs, max_num_batched_tokens: most requests and tokens in a step.
    slo_s: seconds per output token that users accept.
    quantum_s: what the first queue of `fastserve` grants a request; None: the shortest iteration. oracle: where recipes
    that need true output lengths have them from: "max-tokens" where every request runs to its max_tokens.
    starvation_s: how long `fastserve` lets a request wait before it promotes it; None: what follows from `slo_s`.
    starvation_bound_s: no request goes longer without running, from its arrival, or the end of a step that ran it, to
    the end of the next one that does; None: no bound. max_live_requests: most requests at once, which whoever drives
    the engine keeps to, and which a bound needs; None: any number.
    pipeline_depth: plans in flight; 2 decides the next step while one runs, and queues it behind that one on a GPU;
    None: 2 on a GPU, 1 on a CPU, whose cores the model needs.
    enforce_eager: launch a decode step's kernels one by one, rather than as a recorded CUDA graph.
    tensor_parallel_size, pipeline_parallel_size: ranks that share each layer, and stages of consecutive layers; their
    product is the number of ranks, and each stage has a plan of its own in flight.
    distributed_executor_backend: "ray" runs ranks as processes that Ray places; "auto" does so if there are several.
    ray_address: host:port of the cluster to place them on; None: one of our own on this machine.
    max_restarts: how often within ten minutes all ranks are started anew, after one was lost, before the engine gives
    up.
    threads: CPU threads of the model; None: all. seed: from which requests without a seed draw theirs.
    timeline: file to which a trace of who ran when is written, for Perfetto and chrome://tracing.
    profile: what steps cost: "auto" takes the cached profile of this model on this machine, or measures one at first;
    "off" starts from a guess; anything else is the file of a profile.
    """

    model: str = "tally"
    dtype: str = "auto"
    device: str = "auto"
    attention: str = "auto"
    load_format: str = "auto"
    max_model_len: int | None = None
    block_size: int = 16
    kv_cache_gib: float | None = None
    gpu_memory_utilization: float = 0.9
    swap_space_gib: float | None = None
    recipe: str = "fastserve"
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    slo_s: float = DEFAULT_SLO_S
    quantum_s: float | None = None
    oracle: str = "none"
    starvation_s: float | None = None
    starvation_bound_s: float | None = None
    max_live_requests: int | None = None
    pipeline_depth: int | None = None
    enforce_eager: bool = False
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    distributed_executor_backend: str = "auto"
    ray_address: str | None = None
    max_restarts: int = 5
    threads: int | None = None
    seed: int = 0
    timeline: str | None = None
    profile: str = "auto"

    def __post_init__(self) -> None:
        if not self.profile:
            raise ConfigError("profile must be auto, off or the file of a profile, got an empty name")
        for name, low, high in (
            ("block_size", 1, 1024),
            ("max_num_seqs", 1, 65536),
            ("max_num_batched_tokens", 1, 1 << 20),
            ("tensor_parallel_size", 1, 1024),
            ("pipeline_parallel_size", 1, 1024),
            ("max_restarts", 0, 1000),
        ):
            _check(name, getattr(self, name), low, high)
        for name, high in (
            ("max_model_len", 1 << 31),
            ("threads", 1 << 31),
            ("max_live_requests", 1 << 40),
            ("pipeline_depth", 2),
        ):
            if (value := getattr(self, name)) is not None:
                _check(name, value, 1, high)
        check_slo(self.slo_s, self.starvation_s)
        self._check_starvation_bound()
        self._check_oracle()
        if self.quantum_s is not None:
            check_above_zero("quantum_s", self.quantum_s, 1e6)
        check_swap_space("swap_space_gib", self.swap_space_gib)
        for name, most in (("kv_cache_gib", 1e6), ("gpu_memory_utilization", 1.0)):
            if (share := getattr(self, name)) is not None:
                check_above_zero(name, share, most)
        for name, allowed in (
            ("dtype", ("auto", "float32", "bfloat16", "float16")),
            ("device", ("auto", "cpu", "cuda")),
            ("load_format", ("auto", "dummy")),
            ("distributed_executor_backend", ("auto", "ray")),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        self._check_ranks()

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

    def _check_oracle(self) -> None:
        if self.oracle not in ORACLES:
            raise ConfigError(f"oracle must be one of {', '.join(ORACLES)}, got {self.oracle!r}")
        if self.recipe == "srpt" and self.oracle == "none":
            raise ConfigError(
                "recipe srpt needs true output lengths: set oracle to max-tokens if every request runs to max_tokens"
            )

    def _check_starvation_bound(self) -> None:
        if self.starvation_bound_s is None:
            return
        check_above_zero("starvation_bound_s", self.starvation_bound_s, 1e9)
        if self.starvation_s is not None:
            raise ConfigError("starvation_s must not be set beside starvation_bound_s, from which it follows")
        if self.quantum_s is not None:
            raise ConfigError("quantum_s must not be set beside starvation_bound_s, which holds for the usual quanta")
        if self.recipe == "fastserve-defer":
            raise ConfigError("starvation_bound_s cannot be kept by recipe fastserve-defer: newcomers wait for memory")
        if self.recipe not in BOUNDED_RECIPES:
            raise ConfigError(
                f"starvation_bound_s needs recipe {', '.join(BOUNDED_RECIPES)}: "
                f"{self.recipe!r} does not promote who starves"
            )


def check_above_zero(name: str, value: float, most: float) -> None:
    """Refuse a value that is not in (0, most]."""
    if not 0 < value <= most:
        raise ConfigError(f"{name} must be in (0, {most:g}], got {value}")


def check_slo(slo_s: float, starvation_s: float | None) -> None:
    """Refuse an objective, or a starvation threshold of its own, that is outside its bounds; both in seconds."""
    check_above_zero("slo_s", slo_s, 1e6)
    if starvation_s is not None:
        check_above_zero("starvation_s", starvation_s, 1e9)


def check_swap_space(name: str, gib: float | None) -> None:
    """Refuse a size of the host pool that no machine has. None, which leaves the choice to us, passes."""
    if gib is not None and not 0 <= gib <= 1e6:
        raise ConfigError(f"{name} must be in [0, 1e+06], got {gib}")


def _check(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} must be in [{low}, {high}], got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP server around an engine. Raises `ConfigError` on a value outside its bounds.

    api_keys: any of them opens every route but health; empty: no key is asked for.
    served_model_name: what clients call the model; None: the model's own name.
    chat_template: a file with a Jinja template to use instead of the model's own.
    max_queued_requests, max_queued_tokens: requests in the server, waiting or running, and the prompt tokens of
    those that wait; beyond either a request is refused with 429.
    default_deadline_s: seconds after which a request without a deadline of its own is given up; None: never.
    shutdown_timeout_s: how long running requests may take to finish after SIGTERM.
    max_body_bytes, max_header_bytes: larger requests are refused.
    metrics_compat: "vllm" tells metrics under vLLM's names, too.
    replicas: engines behind this server.
    enable_debug_routes: whether GET /debug/requests is served.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    served_model_name: str | None = None
    chat_template: str | None = None
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1 << 20
    default_deadline_s: float | None = None
    shutdown_timeout_s: float = 30.0
    max_body_bytes: int = 4 << 20
    max_header_bytes: int = 64 << 10
    metrics_compat: str = "none"
    replicas: int = 1
    enable_debug_routes: bool = False

    def __post_init__(self) -> None:
        _check("port", self.port, 0, 65535)
        _check("replicas", self.replicas, 1, 4096)
        for name in ("max_queued_requests", "max_queued_tokens", "max_body_bytes", "max_header_bytes"):
            _check(name, getattr(self, name), 1, 1 << 40)
        if self.metrics_compat not in METRICS_COMPAT:
            raise ConfigError(f"metrics_compat must be one of {', '.join(METRICS_COMPAT)}, got {self.metrics_compat!r}")
        if any(not key for key in self.api_keys):
            raise ConfigError("api_key must not be empty")
        for name in ("default_deadline_s", "shutdown_timeout_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1e9:
                raise ConfigError(f"{name} must be in (0, 1e9), got {value}")
