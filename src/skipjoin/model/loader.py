"""Load a model. Reads safetensors only: nothing here unpickles."""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from skipjoin.model.attention.base import AttentionBackend
from skipjoin.model.backends import implementations
from skipjoin.model.causal_lm import CausalLM
from skipjoin.model.config import DTYPES, ModelConfig, ModelError
from skipjoin.model.cuda import check_dtype, choose_device, expand_segments, is_out_of_memory, use_device
from skipjoin.model.family import family_named
from skipjoin.model.folder import resolve_folder
from skipjoin.model.kv_cache import kv_dtype_of
from skipjoin.model.layers import Weights
from skipjoin.model.load_spec import LoadSpec
from skipjoin.model.ops.base import LayerOps
from skipjoin.model.ops.torch_ops import TorchOps
from skipjoin.model.parallel import WHOLE, Alone, Group, Shard, Unconnected
from skipjoin.model.weight_files import INDEX, explain_no_weights, read_weight_map, safetensors_files

_log = logging.getLogger(__name__)
LOAD_FORMATS = ("auto", "dummy")

# Called with (tensors loaded, tensors in the folder); a pipeline stage does not need all of them.
Progress = Callable[[int, int], None]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Stored tensor types that can be weights, and the nearest supported ones. Others are quantized, or no numbers.
_STORED = {"F64": "float32", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def read_config(folder: Path, load_format: str) -> ModelConfig:
    """Return a folder's configuration, with the type of most weights if config.json names none."""
    config = ModelConfig.from_folder(folder)
    if config.dtype_name is not None:
        return config
    return replace(config, dtype_name=_stored_dtype(folder, load_format == "dummy"))


def load_model(
    name_or_path: str | Path,
    spec: LoadSpec = LoadSpec(),
    *,
    progress: Progress | None = None,
    group: Group | None = None,
) -> CausalLM:
    """Load a model. The device becomes the calling thread's current device.

    Args:
        group: Load the shard of this group's rank; None for the whole model.

    Raises:
        ModelError: If the model cannot run.
    """
    if spec.load_format not in LOAD_FORMATS:
        raise ModelError(f"load_format must be one of {', '.join(LOAD_FORMATS)}; got {spec.load_format!r}")
    is_dummy = spec.load_format == "dummy"
    folder = resolve_folder(name_or_path, weights=not is_dummy)
    config = read_config(folder, spec.load_format)
    chosen = _choose(config, spec)
    weights: Weights = (
        RandomWeights(0, chosen.dtype, chosen.device)
        if is_dummy
        else FolderWeights(folder, config, chosen.dtype, chosen.device, progress)
    )
    try:
        return CausalLM(config, weights, **chosen._asdict(), group=group or Alone())
    except Exception as error:
        if chosen.device.type != "cuda" or not is_out_of_memory(error):
            raise
        free, total = (size / (1 << 30) for size in torch.cuda.mem_get_info(chosen.device))
        raise ModelError(
            f"the weights do not fit on device {chosen.device}: besides those loaded so far {free:.2f} of {total:.2f} "
            "GiB are free; end other programs on the GPU, choose another, or set tensor_parallel_size or "
            "pipeline_parallel_size"
        ) from error


def planned_model(config: ModelConfig, spec: LoadSpec, shard: Shard = WHOLE) -> CausalLM:
    """Return a model whose tensors have shapes but no memory, to learn its sizes. Errors as `load_model`.

    Its weights take no more bytes than those of the loaded model, which may be padded.
    """
    chosen = _choose(config, spec)
    weights = ShapesOnly(torch.int8 if spec.quantization == "int8" else chosen.dtype)
    return CausalLM(config, weights, **(chosen._asdict() | {"ops": TorchOps()}), group=Unconnected(shard))


def random_model(
    config: Mapping[str, Any] | ModelConfig,
    seed: int = 0,
    dtype: str = "float32",
    *,
    group: Group | None = None,
    **options: Any,
) -> CausalLM:
    """Return a model with random weights; `options` are fields of `LoadSpec`."""
    if not isinstance(config, ModelConfig):
        config = ModelConfig.from_dict(config)
    chosen = _choose(config, LoadSpec(dtype=dtype, **options))
    weights = RandomWeights(seed, chosen.dtype, chosen.device)
    return CausalLM(config, weights, **chosen._asdict(), group=group or Alone())


def _dtype(name: str, config: ModelConfig) -> torch.dtype:
    name = config.dtype_name or "float32" if name == "auto" else name
    if name not in _DTYPES:
        raise ModelError(f"dtype must be auto, {', '.join(DTYPES)}; got {name!r}")
    return _DTYPES[name]


class _Choice(NamedTuple):
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    ops: LayerOps
    attention: AttentionBackend


def _choose(config: ModelConfig, spec: LoadSpec) -> _Choice:
    dtype, device = _dtype(spec.dtype, config), torch.device(choose_device(spec.device))
    kv_dtype = kv_dtype_of(spec.kv_cache_dtype, dtype, config)
    if device.type == "cuda":
        expand_segments()
        use_device(device)
    lost = check_dtype(dtype, spec.dtype != "auto", device)
    ops, backend = implementations(
        spec.attention,
        dtype,
        device,
        lost,
        invariant=spec.batch_invariant,
        quantization=spec.quantization,
        kv_dtype=kv_dtype,
    )
    return _Choice(dtype, kv_dtype, device, ops, backend)


def _stored_dtype(folder: Path, is_dummy: bool) -> str:
    """Return the type of most elements of the weight files, of which only headers are read."""
    elements: Counter[str] = Counter()
    try:
        files = _WeightFiles(folder)
        for name in files.where:
            tensor = files.opened(name)
            elements[_STORED.get(tensor.get_dtype(), "")] += math.prod(tensor.get_shape())
    except ModelError as error:
        if not is_dummy:
            raise
        _log.info("config.json has no dtype, and %s: the random weights are float32", error)
        return "float32"
    return max(DTYPES, key=lambda name: elements[name])


class _WeightFiles:
    """A folder's safetensors files, opened as needed.

    Attributes:
        where: File of each tensor.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        self.where = self._locate()

    def opened(self, name: str) -> Any:
        with self._errors(name):
            return self._open(self.where[name]).get_slice(name)

    def read(self, name: str, wanted: tuple[slice, ...] | None) -> torch.Tensor:
        """Return a part of a tensor, or the whole tensor without `wanted`."""
        with self._errors(name):
            file = self._open(self.where[name])
            tensor: torch.Tensor = (
                file.get_tensor(name) if wanted is None else file.get_slice(name)[wanted].contiguous()
            )
        return tensor

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{self._folder / self.where[name]} cannot be read: {error}") from error

    def _open(self, file: str) -> Any:
        if file not in self._files:
            self._files[file] = safe_open(self._folder / file, framework="pt")
        return self._files[file]

    def _locate(self) -> dict[str, str]:
        index = self._folder / INDEX
        if index.is_file():
            return read_weight_map(index)
        files = safetensors_files(self._folder)
        if not files:
            explain_no_weights(self._folder)
        try:
            return {name: file.name for file in files for name in self._open(file.name).keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ModelError(f"the weights in {self._folder} cannot be read: {error}") from error


class ShapesOnly:
    """Tensors without memory."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def take(self, name: str, *shape: int, rows: range | None = None, columns: range | None = None) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=self._dtype, device="meta")
        wanted = _wanted(shape, rows, columns)
        return tensor if wanted is None else tensor[wanted].contiguous()


class FolderWeights:
    """Tensors of a folder's safetensors files."""

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
    ) -> None:
        self._folder, self._dtype, self._device = folder, dtype, device
        self._prefix = family_named(config.family).prefix
        self._progress = progress
        self._taken = 0
        self._files = _WeightFiles(folder)

    def take(self, name: str, *shape: int, rows: range | None = None, columns: range | None = None) -> torch.Tensor:
        where = self._files.where
        known = name if name in where else name.removeprefix(self._prefix)
        if known not in where:
            raise ModelError(f"{self._folder} has no tensor {name!r}")
        stored = self._files.opened(known)
        if stored.get_dtype() not in _STORED:
            raise ModelError(
                f"{self._folder}: {name} has type {stored.get_dtype()}; supported are {', '.join(_STORED)}"
            )
        found = tuple(stored.get_shape())
        if found != shape:
            raise ModelError(f"{self._folder}: {name} has shape {found}, but config.json implies {shape}")
        tensor = self._files.read(known, _wanted(shape, rows, columns))
        self._taken += 1
        if self._progress is not None:
            self._progress(self._taken, len(where))
        return tensor.to(device=self._device, dtype=self._dtype)


def _wanted(shape: tuple[int, ...], rows: range | None, columns: range | None) -> tuple[slice, ...] | None:
    parts = [range(size) if part is None else part for part, size in zip((rows, columns), shape, strict=False)]
    if all(len(part) == size for part, size in zip(parts, shape, strict=False)):
        return None
    return tuple(slice(part.start, part.stop) for part in parts)


class RandomWeights:
    """Random tensors that depend only on the seed, the name and the kind of device, so that ranks agree."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self._seed = seed
        self._dtype, self._device = dtype, device

    def take(self, name: str, *shape: int, rows: range | None = None, columns: range | None = None) -> torch.Tensor:
        digest = hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=4).digest()
        generator = torch.Generator(self._device).manual_seed(int.from_bytes(digest, "little"))
        # A GPU generates in the weights' type, since float32 would need twice the memory of the largest tensor.
        drawn_as = torch.float32 if self._device.type == "cpu" else self._dtype
        drawn = torch.randn(shape, generator=generator, device=self._device, dtype=drawn_as).mul_(0.02)
        if "norm" in name and name.endswith("weight"):
            drawn += 1
        if (wanted := _wanted(shape, rows, columns)) is not None:
            drawn = drawn[wanted].contiguous()
        return drawn.to(device=self._device, dtype=self._dtype)
