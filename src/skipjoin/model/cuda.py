from __future__ import annotations

import functools
import importlib
import logging
import os
import re
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from skipjoin.model.errors import ModelError

_log = logging.getLogger(__name__)

# Minimum compute capability with bfloat16 and asynchronous copies, and minimum Triton version that compiles the
# kernels.
KERNEL_CAPABILITY = (8, 0)
KERNEL_TRITON = (3, 6)
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_ALLOCATOR_SETTINGS = "expandable_segments:True"
_NO_MEMORY = ("out of memory", "ALLOC_FAILED", "allocate memory", "cudaErrorMemoryAllocation")
# Module that FlashAttention 3 installs.
FLASH_MODULE = "flash_attn_interface"


@dataclass(frozen=True, slots=True)
class Card:
    name: str
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class CudaFacts:
    runtime: str = ""
    cards: tuple[Card, ...] = ()
    present: bool = False
    driver: str = ""
    why_not: str = ""
    archs: tuple[str, ...] = ()
    triton: str = ""
    triton_error: str = ""
    compiler: str = ""


@functools.cache
def cuda_facts() -> CudaFacts:
    runtime = torch.version.cuda
    if runtime is None:
        return CudaFacts()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        why_not = ""
        try:
            cards = _cards() if torch.cuda.is_available() else ()
        except RuntimeError as error:
            cards, why_not = (), one_line(error)
    if not cards:
        # torch reports an outdated driver as a warning.
        why_not = why_not or (first_line(caught[-1].message) if caught else "")
        return CudaFacts(runtime, present=_is_present(), driver=_driver(), why_not=why_not)
    version, triton_error = _triton()
    return CudaFacts(
        runtime,
        cards,
        present=True,
        driver=_driver(),
        archs=tuple(torch.cuda.get_arch_list()),
        triton=version,
        triton_error=triton_error,
        # Searched in the same way as Triton does.
        compiler=os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or "",
    )


def _cards() -> tuple[Card, ...]:
    return tuple(
        Card(torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i))
        for i in range(torch.cuda.device_count())
    )


def _is_present() -> bool:
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    return any(Path("/dev").glob("nvidia[0-9]*")) or (Path("/dev/dxg").exists() and bool(shutil.which("nvidia-smi")))


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", text)
    return found[1] if found else ""


def _triton() -> tuple[str, str]:
    try:
        return str(importlib.import_module("triton").__version__), ""
    except Exception as error:
        return "", one_line(error)


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def first_line(error: Exception | str) -> str:
    return str(error).partition("\n")[0]


def unusable(facts: CudaFacts, index: int = 0) -> str | None:
    if not facts.runtime:
        return "this torch is built without CUDA"
    if not facts.cards:
        if not facts.present:
            return "torch finds no CUDA device"
        driver = f"driver {facts.driver or 'unknown'}, torch built for CUDA {facts.runtime}"
        return f"torch cannot use the NVIDIA GPU ({driver}): {facts.why_not or 'it gives no reason'}"
    if index >= len(facts.cards):
        return f"N in cuda:N must be in [0, {len(facts.cards) - 1}], got {index}"
    card, compiled = facts.cards[index], [_capability(arch) for arch in facts.archs if _capability(arch)]
    if compiled and card.capability < min(compiled):
        need = _dotted(min(compiled))
        return f"{card.name} has compute capability {_dotted(card.capability)}, this torch needs {need}"
    return None


def _capability(arch: str) -> tuple[int, ...]:
    found = re.match(r"sm_(\d+)(\d)", arch)
    return (int(found[1]), int(found[2])) if found else ()


def _dotted(capability: tuple[int, ...]) -> str:
    return ".".join(map(str, capability))


def kernels_unusable(facts: CudaFacts, index: int = 0) -> str | None:
    card = facts.cards[index]
    if card.capability < KERNEL_CAPABILITY:
        have, need = _dotted(card.capability), _dotted(KERNEL_CAPABILITY)
        return f"{card.name} has compute capability {have}, the Triton kernels need {need}"
    if not facts.triton:
        return f"Triton cannot be imported ({facts.triton_error})"
    if _release(facts.triton) < KERNEL_TRITON:
        return f"Triton is {facts.triton}, the kernels need {_dotted(KERNEL_TRITON)}"
    if not facts.compiler:
        return "Triton needs a C compiler: install gcc or clang, or set CC"
    return None


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def choose_device(name: str, facts: CudaFacts | None = None) -> str:
    if name == "cpu":
        return name
    asked = re.fullmatch(r"cuda(?::(\d+))?", name)
    if name != "auto" and asked is None:
        raise ModelError(f"device must be auto, cpu, cuda or cuda:N; got {name!r}")
    facts = cuda_facts() if facts is None else facts
    why = unusable(facts, int(asked[1] or 0) if asked else 0)
    if why is None:
        return "cuda" if name == "auto" else name
    if asked is not None:
        raise ModelError(f"device {name}: {why}")
    if facts.runtime and facts.present:
        warn_once(f"{why}; the model runs on the CPU, which is many times slower")
    return "cpu"


def expand_segments() -> None:
    """Let the allocator grow its segments, against unusable gaps; call it before the first tensor on a GPU."""
    if any(os.environ.get(name) for name in _ALLOCATOR_VARIABLES):
        return
    os.environ[_ALLOCATOR_VARIABLES[0]] = _ALLOCATOR_SETTINGS  # for child processes
    try:
        torch._C._accelerator_setAllocatorSettings(_ALLOCATOR_SETTINGS)
    except (AttributeError, RuntimeError, ValueError) as error:
        _log.info("the allocator keeps its settings: %s", one_line(error))


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def use_device(device: torch.device) -> None:
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


@functools.cache
def warn_once(text: str) -> None:
    _log.warning("%s", text)


def check_dtype(dtype: torch.dtype, asked: bool, device: torch.device, facts: CudaFacts | None = None) -> str | None:
    """Return a warning if this device emulates the type, else None; raise `ModelError` if it was requested."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    facts = cuda_facts() if facts is None else facts
    card = facts.cards[device.index or 0]
    if card.capability >= KERNEL_CAPABILITY:
        return None
    lacks = f"{card.name} (compute capability {_dotted(card.capability)}) has no bfloat16"
    if asked:
        raise ModelError(f"dtype bfloat16: {lacks}; it has float16 and float32")
    return f"{lacks}; it is emulated, and float16 is faster"
