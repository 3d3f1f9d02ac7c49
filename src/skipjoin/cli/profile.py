from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from skipjoin.cli.options import Section, Values, takes
from skipjoin.cli.progress import Bars, stage_bars
from skipjoin.cli.tables import Table
from skipjoin.config import ConfigError, EngineConfig
from skipjoin.config.profile import Profile, Transfer, cache_path, check_writable, write_profile
from skipjoin.kv_format import SWAP_FORMATS, types_text
from skipjoin.system.folders import why_untrusted

if TYPE_CHECKING:
    from skipjoin.engine.profiling.profiler import Effort


# Engine fields that affect the measurement.
_MEASURED = (
    "model",
    "dtype",
    "device",
    "attention",
    "load_format",
    "quantization",
    "threads",
    "max_model_len",
    "enforce_eager",
    "batch_invariant",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "kv_cache_gib",
    "kv_cache_dtype",
    "swap_dtype",
    "gpu_memory_utilization",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "distributed_executor_backend",
    "ray_address",
)


@takes(engine=Section(EngineConfig, _MEASURED))
def profile(
    *,
    seconds: Annotated[float, typer.Option(help="Maximum time to measure; a quiet machine needs less.")] = 60.0,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the profile here (default: the user's cache).")
    ] = None,
    engine: Values,
) -> None:
    """Measure the cost of steps and transfers of MODEL on this machine, for the server and the simulator."""
    from skipjoin.engine.profiling.calibration import fit  # noqa: PLC0415
    from skipjoin.engine.profiling.profiler import THOROUGH_PRECISION, Effort  # noqa: PLC0415

    if not 1 <= seconds <= 1e5:
        raise ConfigError(f"seconds must be in [1, 100000], got {seconds}")
    if out is not None:
        check_writable(out)
    # Transfers are measured between separate pools. Only the conversion of KV requires the engine's CPU pool.
    space = 0 if SWAP_FORMATS[engine["swap_dtype"]].is_exact else None
    found = _measure(EngineConfig(**engine, swap_space_gib=space), Effort(seconds, THOROUGH_PRECISION))
    path = out or cache_path(found.key)
    if out is None and (why := why_untrusted(path)) is not None:
        raise ConfigError(f"the profile is not written: {why}; or name a file with --out")
    _print(found)
    write_profile(found, path)
    print(f"profile: {path}")
    if found.is_poor:
        print(f"warning: {fit(found)}; measure again on a quiet machine or with more --seconds", file=sys.stderr)


def _measure(config: EngineConfig, effort: Effort) -> Profile:
    from skipjoin.engine.profiling.startup import profile_model  # noqa: PLC0415

    with Bars() as bars:
        return profile_model(config, effort, stage_bars(bars))


def _print(found: Profile) -> None:
    key, cost, errors = found.key, found.cost, found.errors
    types = types_text(key.dtype, key.kv_cache_dtype)
    parallel = "" if key.tp == key.pp == 1 else f", tp {key.tp}, pp {key.pp}"
    table = Table(
        title=f"{key.model}, {types}, {key.attention} attention on {key.operators}{parallel}\n{key.device}",
        show_header=False,
    )
    rows = [
        ("every step", f"{cost.floor * 1e3:.3f} ms"),
        ("reading the weights", _weights(cost.weights)),
        ("prefill", f"{cost.prefill_token * 1e6:.2f} us per token"),
        ("attention of prefill", f"{cost.attention_pair * 1e9:.3f} ns per query-key pair"),
        ("decode", f"{cost.decode * 1e6:.2f} us per request"),
        ("context of decodes", f"{cost.context_token * 1e9:.1f} ns per token"),
        ("the engine, between steps", f"{found.host_s * 1e3:.3f} ms"),
        ("KV out, device to host", _rate(found.transfer_out, found.kv_bytes_per_block)),
        ("KV in, host to device", _rate(found.transfer_in, found.kv_bytes_per_block)),
    ]
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    shapes = f"{errors.held_out} shapes that it was not fitted to" if errors.held_out else "the shapes it was fitted to"
    print(f"error on {shapes}: median {errors.median:.1%}, P95 {errors.p95:.1%} ({errors.fitted} shapes fitted)")


def _weights(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms, or its tokens if they take longer" if seconds else "part of every step"


def _rate(transfer: Transfer, block_bytes: int) -> str:
    each = f"{transfer.floor * 1e6:.0f} us each"
    return f"{block_bytes / transfer.block / 1e9:.2f} GB/s, {each}" if transfer.block else each
