from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any
from urllib.parse import urlsplit

from skipjoin.kv_format import CACHE_FORMATS, SWAP_FORMATS
from skipjoin.options import ConfigError, Option

# Options by their groups, in the order of the help.
model_option = partial(Option, group="Model")
scheduling_option = partial(Option, group="Scheduling")
memory_option = partial(Option, group="Memory")
parallelism_option = partial(Option, group="Parallelism")
measurement_option = partial(Option, group="Measurement")
server_option = partial(Option, group="HTTP server")
limit_option = partial(Option, group="Limits")
forecast_option = partial(Option, group="Forecasts")
batch_option = partial(Option, group="Files and batches")
objective_option = partial(Option, group="Objectives of requests without their own")

MAX_ADAPTER_NAME = 256
# Fields shared with simulated systems, and a default.
MAX_NUM_SEQS = 256
MaxNumSeqs = Annotated[
    int, scheduling_option("Maximum number of requests in a step.", low=1, high=65536, is_common=True)
]
MaxBatchedTokens = Annotated[
    int, scheduling_option("Maximum number of tokens in a step.", low=1, high=1 << 20, is_common=True)
]
Objective = Annotated[
    float | None,
    scheduling_option(
        "Acceptable time per output token, from which recipes derive their parameters. It is not an objective of a "
        "request (default: derived from step times, about ten of the shortest).",
        above=0,
        high=1e6,
        flags=("--slo",),
        metavar="SECONDS",
    ),
]
BestEffortWait = Annotated[
    float,
    scheduling_option(
        "Time after which the oldest best-effort request is served as a real-time one until it finishes, one at a "
        "time.",
        above=0,
        high=1e9,
        metavar="SECONDS",
    ),
]
# See `docs/scheduling.md`.
FairBy = Annotated[
    str, scheduling_option("Clients between which the service is shared fairly", choices=("none", "key"))
]
OutputWeight = Annotated[
    float,
    scheduling_option("Weight of a generated token relative to a prompt token, with --fair-by.", above=0, high=1000),
]
KVType = Annotated[
    str,
    memory_option(
        "Type of the KV cache: that of the model, or 8-bit codes with a scale per token and head, in both tiers",
        choices=CACHE_FORMATS,
    ),
]
SwapType = Annotated[
    str,
    memory_option(
        "Type of swapped-out KV: unchanged, or rounded to 8 bits, which fits 1.6 to 1.8 times as much but may change "
        "outputs of swapped requests",
        choices=SWAP_FORMATS,
    ),
]


SwapBandwidth = Annotated[
    float | None,
    memory_option(
        "Limit of the bandwidth of swaps in Gb/s, per rank and direction, for machines that share a bus (default: "
        "none).",
        above=0,
        high=1e6,
        flags=("--swap-bandwidth-gbps",),
        metavar="GBPS",
    ),
]


def bytes_per_s(gbps: float | None) -> float | None:
    return None if gbps is None else gbps * 1e9 / 8


def base_url(field: str, given: str) -> str:
    try:
        parts = urlsplit(given)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise ConfigError(f"{field} must be like http://127.0.0.1:8000, got {given!r}")
    return given.rstrip("/").removesuffix("/v1")


def check_swap_type(swap_dtype: str, kv_cache_dtype: str, field: str, size: float | None) -> None:
    if SWAP_FORMATS[swap_dtype].is_exact:
        return
    if CACHE_FORMATS[kv_cache_dtype].is_rounded:
        raise ConfigError(
            f"swap_dtype must be auto with kv_cache_dtype {kv_cache_dtype}, whose KV moves to CPU memory as it is, got "
            f"{swap_dtype}"
        )
    if size == 0:
        raise ConfigError(f"swap_dtype {swap_dtype} is for KV in CPU memory: {field} must be above 0, got {size:g}")


def check_swap_bandwidth(gbps: float | None, field: str, size: float | None) -> None:
    if gbps is not None and size == 0:
        raise ConfigError(f"swap_bandwidth_gbps is for KV in CPU memory: {field} must be above 0, got {size:g}")


def check_not_one_card(device: str) -> None:
    if ":" in device:
        raise ConfigError(f"device must be auto, cpu or cuda where Ray places ranks or replicas on cards, got {device}")


def checked_adapters(given: Any) -> dict[str, str]:
    if not isinstance(given, Mapping):
        raise ConfigError(f"lora_modules must map names of adapters to folders, got {given!r}")
    for name, folder in given.items():
        if not is_adapter_name(name) or not isinstance(folder, str) or not folder:
            raise ConfigError(
                f"lora_modules must be like sql=adapters/sql, with a name of 1 to {MAX_ADAPTER_NAME} printable "
                f"characters, got {name!r:.300}={folder!r:.300}"
            )
    return {name: os.path.abspath(folder) for name, folder in given.items()}


def is_adapter_name(name: Any) -> bool:
    return isinstance(name, str) and 1 <= len(name) <= MAX_ADAPTER_NAME and name.isprintable() and name == name.strip()
