"""What the commands share: options with one name, help text and default everywhere, and how bad input is told."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from skipjoin.config import ORACLES, ConfigError, EngineConfig, ServerConfig
from skipjoin.model.config import ModelError
from skipjoin.profile import read_profile
from skipjoin.recipes import RECIPES
from skipjoin.sampling import ParameterError

Model = Annotated[str, typer.Argument(help="A Hugging Face folder, a hub id, or 'tally', the built-in model.")]
Recipe = Annotated[
    str, typer.Option("--recipe", "--scheduling-policy", help=f"Scheduler: {', '.join(sorted(RECIPES))}.")
]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
LoadFormat = Annotated[
    str, typer.Option(help="auto reads the weights; dummy draws random ones, of which no file is needed.")
]
Attention = Annotated[str, typer.Option(help="Attention back end: auto, torch, cpp (CPU) or triton (CUDA).")]
MaxModelLen = Annotated[int | None, typer.Option(help="Most tokens of prompt and output (default: the model's).")]
MaxNumSeqs = Annotated[int, typer.Option(help="Most requests in a step.")]
MaxBatchedTokens = Annotated[int, typer.Option("--max-num-batched-tokens", help="Most tokens in a step.")]
BlockSize = Annotated[int, typer.Option(help="Tokens per KV block.")]
KvCacheGib = Annotated[float | None, typer.Option(help="Size of the KV pool in GiB (default: a share of free memory).")]
SwapSpace = Annotated[
    float | None,
    typer.Option(
        "--swap-space",
        "--kv-offloading-size",
        metavar="GIB",
        help="Size of the host pool that KV is swapped to; 0: none (default: a share of free RAM).",
    ),
]
GpuShare = Annotated[float, typer.Option("--gpu-memory-utilization", help="Share of GPU memory to use.")]
Objective = Annotated[float, typer.Option("--slo", help="Seconds per output token that users accept.")]
Starvation = Annotated[
    float | None,
    typer.Option("--starvation-s", help="fastserve: seconds without running until a promotion (default: 100 x --slo)."),
]
StarvationBound = Annotated[
    float | None,
    typer.Option(
        "--starvation-bound",
        metavar="SECONDS",
        help="fastserve: no request goes longer without running; instead of --starvation-s (default: no bound).",
    ),
]
Quantum = Annotated[
    float | None,
    typer.Option(
        "--quantum-s", help="fastserve: what the first queue grants, in seconds (default: the shortest step)."
    ),
]
Oracle = Annotated[
    str,
    typer.Option(help=f"True output lengths for recipes that need them: {', '.join(ORACLES)}."),
]
Depth = Annotated[
    int | None,
    typer.Option(
        "--pipeline-depth",
        help="Plans in flight; 2 decides the next step while one runs (default: 2 on a GPU, else 1).",
    ),
]
EnforceEager = Annotated[
    bool, typer.Option("--enforce-eager", help="Launch the kernels of decode steps one by one, without CUDA graphs.")
]
TensorParallel = Annotated[int, typer.Option("--tensor-parallel-size", "-tp", help="Ranks that share each layer.")]
PipelineParallel = Annotated[
    int, typer.Option("--pipeline-parallel-size", "-pp", help="Stages of consecutive layers, one after the other.")
]
Backend = Annotated[
    str,
    typer.Option(help="auto, or ray: ranks are processes that Ray places, as they are anyway if there are several."),
]
RayAddress = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Ray cluster for the ranks (default: one of its own on this machine)."),
]
MaxRestarts = Annotated[
    int, typer.Option(help="How often within ten minutes lost ranks are started anew before the engine gives up.")
]
Profile = Annotated[
    str,
    typer.Option(
        metavar="auto|off|FILE",
        help="What steps cost: measured at the first start and cached, guessed, or of `skipjoin profile --out FILE`.",
    ),
]
Threads = Annotated[int | None, typer.Option(help="CPU threads of the model (default: all).")]
Seed = Annotated[int, typer.Option(help="From which requests without a seed draw theirs.")]

ENGINE = EngineConfig()
SERVER = ServerConfig()
BAD_INPUT = 2


def check_profile_file(profile: str) -> None:
    """Read the file of a --profile before anything slow begins. Raises `ConfigError`."""
    if profile not in ("auto", "off"):
        read_profile(Path(profile))


@contextmanager
def plain_errors() -> Iterator[None]:
    """Bad input is one line on stderr and exit code 2, not a traceback."""
    try:
        yield
    except (ConfigError, ModelError, ParameterError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(BAD_INPUT) from error
