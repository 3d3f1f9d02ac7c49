"""The part `machine`: the card, and the ceilings that all other parts are compared with."""

from __future__ import annotations

import subprocess
from typing import Any

import torch
from common import Figures, Task, seconds_of, significant, spread

from machine import describe_machine, version_of

# Bytes of the copy, several times the size of caches, and the side of the matrices; small in a rehearsal.
_COPY_BYTES, _SIDE = {"cuda": 4 << 30, "cpu": 1 << 22}, {"cuda": 8192, "cpu": 128}


def measure(task: Task) -> Figures:
    """Measure the bandwidths of a copy and of a read, and the rate of matrix products.

    Raises:
        RuntimeError: There is no card.
    """
    figures: Figures = {"machine": describe_machine() | _card(task)}
    task.keep(figures)
    figures["copy"] = copy_bandwidth(task)
    figures["read"] = read_bandwidth(task)
    figures["matmul"] = matmul_rate(task)
    figures["ceilings"] = {
        "copy_bytes_per_s": figures["copy"]["bytes_per_s"],
        "read_bytes_per_s": figures["read"]["bytes_per_s"],
        "matmul_flop_per_s": figures["matmul"]["flop_per_s"],
    }
    return figures


def copy_bandwidth(task: Task) -> Figures:
    """Measure the bytes read and written per second of a copy in device memory."""
    size = _COPY_BYTES[task.device]
    source = torch.randint(-128, 127, (size,), dtype=torch.int8, device=task.device)
    target = torch.empty_like(source)
    times = seconds_of(task.device, lambda: target.copy_(source))
    return {"bytes": 2 * size, "ms": spread(times, 1e3), "bytes_per_s": significant(2 * size / spread(times)["median"])}


def read_bandwidth(task: Task) -> Figures:
    """Measure the bytes read per second of a sum, which writes nothing, as a decode step hardly does."""
    size = _COPY_BYTES[task.device]
    source = torch.ones(size // 4, dtype=torch.float32, device=task.device)
    times = seconds_of(task.device, source.sum)
    return {"bytes": size, "ms": spread(times, 1e3), "bytes_per_s": significant(size / spread(times)["median"])}


def matmul_rate(task: Task) -> Figures:
    """Measure the floating-point operations per second of a bfloat16 product of random matrices."""
    side = _SIDE[task.device]
    left, right = (torch.randn(side, side, device=task.device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    times = seconds_of(task.device, lambda: torch.mm(left, right, out=out))
    flop = 2 * side**3
    return {"side": side, "ms": spread(times, 1e3), "flop_per_s": significant(flop / spread(times)["median"])}


def _card(task: Task) -> dict[str, Any]:
    versions = {name: version_of(name) for name in ("triton", "numpy", "transformers", "accelerate")}
    if task.is_rehearsal:
        return {"gpu": None, "libraries": versions}
    if not torch.cuda.is_available():
        raise RuntimeError("torch finds no CUDA device; --rehearse runs all parts on the CPU")
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "libraries": versions,
    }


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
