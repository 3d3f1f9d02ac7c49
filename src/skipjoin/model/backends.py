from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from skipjoin.kv_format import CacheFormat
from skipjoin.model.attention.base import AttentionBackend
from skipjoin.model.attention.check import agrees
from skipjoin.model.attention.cpp_backend import CppAttention, check_attention
from skipjoin.model.attention.torch_backend import TorchAttention
from skipjoin.model.cuda import FLASH_MODULE, CudaFacts, cuda_facts, kernels_unusable, one_line, warn_once
from skipjoin.model.errors import ModelError
from skipjoin.model.kv_cache import AUTO
from skipjoin.model.ops.base import LayerOps
from skipjoin.model.ops.build import cpu_features, libraries, path_of, say_once, shipped
from skipjoin.model.ops.calls import CPP_DTYPES
from skipjoin.model.ops.check import check_ops, rows_are_independent
from skipjoin.model.ops.cpp_ops import CppOps, has_dtype
from skipjoin.model.ops.torch_ops import TorchOps

if TYPE_CHECKING:
    from skipjoin.model.attention.triton_backend import TritonAttention

_log = logging.getLogger(__name__)

ATTENTION_BACKENDS = ("auto", "torch", "cpp", "triton", "flash")
# FlashAttention 3 supports this compute capability only.
_FLASH_CAPABILITY = (9, 0)

Implementations = tuple[LayerOps, AttentionBackend]


def implementations(
    attention: str,
    dtype: torch.dtype,
    device: torch.device,
    lost: str | None = None,
    facts: CudaFacts | None = None,
    *,
    invariant: bool = False,
    of: CacheFormat = AUTO,
) -> Implementations:
    """Choose compiled operations on a CPU and Triton kernels on a GPU where they work, and torch elsewhere."""
    if invariant:
        if device.type != "cuda" or attention not in ("auto", "triton"):
            raise ModelError(f"batch_invariant needs device cuda and attention triton, got {device.type}, {attention}")
        attention = "triton"
    if attention not in ATTENTION_BACKENDS:
        raise ModelError(f"attention must be one of {', '.join(ATTENTION_BACKENDS)}; got {attention!r}")
    if attention == "cpp" and (device.type != "cpu" or dtype not in CPP_DTYPES):
        raise ModelError("attention cpp needs device cpu and dtype float32, bfloat16 or float16")
    if attention in ("triton", "flash") and device.type != "cuda":
        raise ModelError(f"attention {attention} needs device cuda, got {device.type}")
    if attention == "torch":
        chosen = None
    elif device.type == "cuda":
        chosen, lost = _on_cuda(attention, dtype, device, lost, cuda_facts() if facts is None else facts, of=of)
        if invariant:
            chosen = _triton(invariant=True)
    else:
        chosen = _on_cpu(attention, dtype)
    if lost is not None:
        warn_once(lost)
    ops, backend = chosen or (TorchOps(), TorchAttention())
    if backend.name == "torch" or _kind(backend) in of.readers:
        return ops, backend
    why = f"attention {backend.name} reads no KV of kv_cache_dtype {of.name}"
    if attention != "auto":
        raise ModelError(f"{why}: set attention to auto or torch")
    warn_once(f"{why}, so torch attends, which is slower")
    return ops, TorchAttention()


def _kind(backend: AttentionBackend) -> str:
    return backend.name.removesuffix("-invariant")


def _on_cuda(
    attention: str, dtype: torch.dtype, device: torch.device, lost: str | None, facts: CudaFacts, *, of: CacheFormat
) -> tuple[Implementations | None, str | None]:
    if attention == "flash" and "flash" not in of.readers:
        raise ModelError(f"attention flash reads no KV of kv_cache_dtype {of.name}: set attention to auto or triton")
    checked = of if "triton" in of.readers else AUTO
    why = kernels_unusable(facts, device.index or 0) or _triton_failure(dtype, device, checked)
    if why is None:
        chosen = _triton()
        if attention == "triton" or "flash" not in of.readers:
            return chosen, lost
        flash, not_used = _flash(attention, dtype, device, facts)
        lost = "; ".join(filter(None, (not_used, lost))) or None
        return (chosen[0], flash or chosen[1]), lost
    if attention != "auto":
        raise ModelError(f"attention {attention}: {why}")
    slower = "torch's operations are used instead, which makes decoding several times slower"
    return None, f"{why}: {slower}" + ("" if lost is None else f"; {lost}")


def _triton(*, invariant: bool = False) -> tuple[LayerOps, TritonAttention]:
    # Imported lazily: Triton is needed on a GPU only.
    from skipjoin.model.attention.triton_backend import TritonAttention  # noqa: PLC0415
    from skipjoin.model.ops.triton_ops import InvariantOps, TritonOps  # noqa: PLC0415

    return (InvariantOps if invariant else TritonOps)(), TritonAttention(invariant=invariant)


def _flash(
    attention: str, dtype: torch.dtype, device: torch.device, facts: CudaFacts
) -> tuple[AttentionBackend | None, str | None]:
    card = facts.cards[device.index or 0]
    if card.capability != _FLASH_CAPABILITY:
        why: str | None = f"{card.name} has compute capability {'.'.join(map(str, card.capability))}, it is for 9.0"
    elif attention == "auto" and importlib.util.find_spec(FLASH_MODULE) is None:
        return None, None
    else:
        why = _flash_failure(dtype, device)
    if why is None:
        from skipjoin.model.attention.flash_backend import FlashAttention  # noqa: PLC0415

        return FlashAttention(), None
    if attention == "flash":
        raise ModelError(f"attention flash: FlashAttention 3 cannot be used: {why}")
    if card.capability != _FLASH_CAPABILITY:
        return None, None
    return None, f"FlashAttention 3 cannot be used ({why}): Triton's attention is slower where contexts differ much"


@functools.cache
def _flash_failure(dtype: torch.dtype, device: torch.device) -> str | None:
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it has no {str(dtype).removeprefix('torch.')}"
    try:
        from skipjoin.model.attention.flash_backend import FlashAttention  # noqa: PLC0415

        current = nullcontext() if device.index is None else torch.cuda.device(device)
        with current, torch.inference_mode():
            if agrees(FlashAttention(), dtype, device, plain=True):
                return None
    except Exception as error:  # a broken library may raise anything
        return one_line(error)
    return "it fails its self-test"


@functools.cache
def _triton_failure(dtype: torch.dtype, device: torch.device, of: CacheFormat) -> str | None:
    try:
        from skipjoin.model.attention.triton_backend import check_triton_attention  # noqa: PLC0415

        ops, backend = _triton()
        # Kernels are launched on the current device.
        current = nullcontext() if device.index is None else torch.cuda.device(device)
        with current, torch.inference_mode():
            if check_ops(ops, dtype, device) and check_triton_attention(backend, dtype, device, of):
                return None
    except Exception as error:  # any error of the compiler or the driver
        return f"the Triton kernels cannot run ({one_line(error)})"
    return "the Triton kernels fail their self-test"


def _on_cpu(attention: str, dtype: torch.dtype) -> Implementations | None:
    library = _compiled(dtype) if dtype in CPP_DTYPES else None
    if library is not None:
        ops, slower = CppOps(library, dtype), _slower(path_of(library))
        path, _, has_floats = ops.path.partition(", ")
        floats = (
            ": products of few rows use float32, in which this CPU is faster than in bfloat16" if has_floats else ""
        )
        say_once(f"CPU operations: {path}{floats}{slower}", logging.WARNING if slower else logging.INFO)
        return ops, CppAttention(library)
    say_once(f"CPU operations: torch{_slower(None)}")
    if attention == "cpp":
        raise ModelError(f"attention cpp cannot run {dtype} here; see the previous warning")
    return None


@functools.cache
def _compiled(dtype: torch.dtype) -> ctypes.CDLL | None:
    failed = None
    for library in libraries():
        if not has_dtype(library, dtype):
            continue
        if _passes(library, dtype):
            if failed is not None:
                path = path_of(library)
                _log.warning("the compiled CPU operations for %s fail their self-test; those for %s run", failed, path)
            return library
        failed = failed or path_of(library)
    if failed is not None:
        _log.warning("the compiled CPU operations fail their self-test; the slower torch operations are used instead")
    return None


def _passes(library: ctypes.CDLL, dtype: torch.dtype) -> bool:
    each_way = (CppOps(library, dtype, way=way) for way in CppOps(library, dtype).ways())
    is_right = all(check_ops(ops, dtype) and rows_are_independent(ops, dtype) for ops in each_way)
    return is_right and check_attention(CppAttention(library), dtype)


# Flags of /proc/cpuinfo, fastest first.
_FEATURES = (
    ("amx_bf16", "AMX", "amx"),
    ("avx512_bf16", "AVX-512 BF16", "avx512-bf16"),
    ("avx512bw", "AVX-512", "avx512"),
    ("avx2", "AVX2", "avx2"),
    ("asimd", "NEON", "neon"),
)


def _slower(path: str | None) -> str:
    if path is None:
        return " (a C++ compiler makes them several times faster: install g++ or clang++, or set CXX)"
    for feature, name, its_path in _FEATURES:
        if path == its_path:
            break
        if feature in cpu_features():
            whys = [] if shipped() else ["the compiler does not know it"]
            whys += ["the system refuses it (a seccomp filter, a small signal stack)"] if name == "AMX" else []
            whys = whys or ["its library fails"]
            return f": this CPU has {name}, which is faster, but {', or '.join(whys)}"
    return ""
