"""Chooses a model's layer operations and attention back end: the fastest that works here, or the requested one."""

from __future__ import annotations

import ctypes
import functools
import logging
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from skipjoin.model.attention.base import AttentionBackend
from skipjoin.model.attention.cpp_backend import CppAttention, check_attention
from skipjoin.model.attention.torch_backend import TorchAttention
from skipjoin.model.config import ModelError
from skipjoin.model.cuda import CudaFacts, cuda_facts, kernels_unusable, one_line, warn_once
from skipjoin.model.ops.base import LayerOps
from skipjoin.model.ops.build import load_library
from skipjoin.model.ops.check import check_ops
from skipjoin.model.ops.cpp_ops import CPP_DTYPES, CppOps
from skipjoin.model.ops.torch_ops import TorchOps

if TYPE_CHECKING:
    from skipjoin.model.attention.triton_backend import TritonAttention

_log = logging.getLogger(__name__)

ATTENTION_BACKENDS = ("auto", "torch", "cpp", "triton")

Implementations = tuple[LayerOps, AttentionBackend]


def implementations(
    attention: str, dtype: torch.dtype, device: torch.device, lost: str | None = None, facts: CudaFacts | None = None
) -> Implementations:
    """Compiled ones on a CPU that supports them, Triton's on a GPU that can run them, torch's elsewhere.

    lost: a known loss of speed, for inclusion in the one warning. facts: of CUDA; None: of this process. Raises
    `ModelError` if the requested back end cannot run.
    """
    if attention not in ATTENTION_BACKENDS:
        raise ModelError(f"attention must be one of {', '.join(ATTENTION_BACKENDS)}; got {attention!r}")
    if attention == "cpp" and (device.type != "cpu" or dtype not in CPP_DTYPES):
        raise ModelError("attention cpp needs device cpu and dtype float32 or bfloat16")
    if attention == "triton" and device.type != "cuda":
        raise ModelError(f"attention triton needs device cuda, got {device.type}")
    if attention == "torch":
        chosen = None
    elif device.type == "cuda":
        chosen, lost = _on_cuda(attention, dtype, device, lost, cuda_facts() if facts is None else facts)
    else:
        chosen = _on_cpu(attention, dtype)
    if lost is not None:
        warn_once(lost)
    return chosen or (TorchOps(), TorchAttention())


def _on_cuda(
    attention: str, dtype: torch.dtype, device: torch.device, lost: str | None, facts: CudaFacts
) -> tuple[Implementations | None, str | None]:
    """Triton's; or None and a description of the loss of speed."""
    why = kernels_unusable(facts, device.index or 0) or _triton_failure(dtype, device)
    if why is None:
        return _triton(), lost
    if attention == "triton":
        raise ModelError(f"attention triton: {why}")
    slower = "torch's operations are used instead, which makes decoding several times slower"
    return None, f"{why}: {slower}" + ("" if lost is None else f"; {lost}")


def _triton() -> tuple[LayerOps, TritonAttention]:
    # Triton is imported only for a GPU.
    from skipjoin.model.attention.triton_backend import TritonAttention  # noqa: PLC0415
    from skipjoin.model.ops.triton_ops import TritonOps  # noqa: PLC0415

    return TritonOps(), TritonAttention()


@functools.cache
def _triton_failure(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the Triton kernels cannot be used; None: they can. Compiles and tests them once per type and device, which
    may take seconds."""
    try:
        from skipjoin.model.attention.triton_backend import check_triton_attention  # noqa: PLC0415

        ops, backend = _triton()
        # Kernels are launched on the current device.
        current = nullcontext() if device.index is None else torch.cuda.device(device)
        with current, torch.inference_mode():
            if check_ops(ops, dtype, device) and check_triton_attention(backend, dtype, device):
                return None
    except Exception as error:  # any error of the compiler or the driver
        return f"the Triton kernels cannot run ({one_line(error)})"
    return "the Triton kernels fail their self-test"


def _on_cpu(attention: str, dtype: torch.dtype) -> Implementations | None:
    """The compiled implementations, or None."""
    library = _compiled(dtype) if dtype in CPP_DTYPES else None
    if library is not None:
        return CppOps(library, dtype), CppAttention(library)
    if attention == "cpp":
        raise ModelError("attention cpp needs a C++ compiler and a CPU with AVX-512 BF16; see the previous warning")
    return None


@functools.cache
def _compiled(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The compiled operations, tested once per type; None if they cannot be built or fail the test."""
    library = load_library()
    if library is None:
        return None
    if check_ops(CppOps(library, dtype), dtype) and check_attention(CppAttention(library), dtype):
        return library
    _log.warning("the compiled CPU operations fail their self-test; the slower torch operations are used instead")
    return None
