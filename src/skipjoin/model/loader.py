from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from skipjoin.kv_format import CacheFormat
from skipjoin.model.attention.base import AttentionBackend
from skipjoin.model.backends import implementations
from skipjoin.model.causal_lm import CausalLM
from skipjoin.model.config import ModelConfig
from skipjoin.model.config_fields import DTYPES
from skipjoin.model.cuda import check_dtype, choose_device, expand_segments, is_out_of_memory, use_device
from skipjoin.model.errors import ModelError
from skipjoin.model.family import family_named
from skipjoin.model.folder import resolve_folder
from skipjoin.model.gguf.file import forget_headers
from skipjoin.model.kv_cache import cache_format_of
from skipjoin.model.large_pages import return_freed_memory
from skipjoin.model.load_spec import LoadSpec
from skipjoin.model.ops.base import LayerOps
from skipjoin.model.ops.torch_ops import TorchOps
from skipjoin.model.parallel import WHOLE, Group, Shard
from skipjoin.model.pooling_files import pooling_of
from skipjoin.model.safetensors_weights import has_own_output
from skipjoin.model.weight_files import ModelFiles, Progress, Source
from skipjoin.model.weight_format import WeightFormat, format_of

_log = logging.getLogger(__name__)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def read_config(files: ModelFiles, spec: LoadSpec) -> ModelConfig:
    config = ModelConfig.from_folder(files.folder)
    config = replace(config, pooling=pooling_of(files, config, spec.task))
    if config.tie_embeddings and files.has_weights and files.names("*.safetensors"):
        config = replace(config, tie_embeddings=not has_own_output(files.folder, family_named(config.family)))
    if config.dtype_name is not None:
        return config
    stored = format_of(files, replace(spec, quantization="none"))
    return replace(config, dtype_name=stored.dtype_name(files))


def load_model(
    name_or_path: str | Path,
    spec: LoadSpec = LoadSpec(),
    *,
    progress: Progress | None = None,
    group: Group | None = None,
) -> CausalLM:
    """Load a model, or this rank's shard, and make its device the calling thread's current one."""
    has_weights = spec.load_format != "dummy"
    files = ModelFiles.of(resolve_folder(name_or_path, weights=has_weights), has_weights=has_weights)
    config, stored = read_config(files, spec), format_of(files, spec)
    chosen = _choose(config, spec, stored)
    _log_limits(files, config)
    try:
        source = Source(files, spec, config, chosen.dtype, chosen.device, progress, reads_codes=chosen.ops.reads_codes)
        model = CausalLM(config, stored.open(source), **chosen._asdict(), group=group or Group())
        forget_headers()
        return_freed_memory()
        return model
    except Exception as error:
        if chosen.device.type != "cuda" or not is_out_of_memory(error):
            raise
        free, total = (size / (1 << 30) for size in torch.cuda.mem_get_info(chosen.device))
        raise ModelError(
            f"the weights do not fit on device {chosen.device}: besides those loaded so far {free:.2f} of {total:.2f} "
            "GiB are free; end other programs on the GPU, choose another, or set tensor_parallel_size or "
            "pipeline_parallel_size"
        ) from error


def _log_limits(files: ModelFiles, config: ModelConfig) -> None:
    if not files.config.keys().isdisjoint(("text_config", "thinker_config")):
        _log.info("%s: the language model of %s is served, without its other inputs", files.folder, config.architecture)
    stated = files.config.get("max_position_embeddings", 0)
    if config.rope is not None and config.rope.scaling == "longrope" and config.max_positions < stated:
        _log.info(
            "%s: the context ends at %d tokens, from which on LongRoPE has other factors; without short_factor in "
            "config.json, these are used for all tokens, and it ends at %d",
            *(files.folder, config.max_positions, stated),
        )


def planned_model(files: ModelFiles, config: ModelConfig, spec: LoadSpec, shard: Shard = WHOLE) -> CausalLM:
    """Return a model without memory, to learn its sizes: the loaded one is no smaller."""
    stored = format_of(files, spec)
    chosen = _choose(config, spec, stored)
    source = Source(files, spec, config, chosen.dtype, chosen.device, reads_codes=chosen.ops.reads_codes)
    weights = stored.plan(source)
    return CausalLM(config, weights, **(chosen._asdict() | {"ops": TorchOps()}), group=Group(shard))


def random_model(
    config: Mapping[str, Any] | ModelConfig,
    seed: int = 0,
    dtype: str = "float32",
    *,
    group: Group | None = None,
    **options: Any,
) -> CausalLM:
    if not isinstance(config, ModelConfig):
        config = ModelConfig.from_dict(config)
    spec = LoadSpec(dtype=dtype, load_format="dummy", **options)
    files = ModelFiles(Path(), {}, has_weights=False)
    stored = format_of(files, spec)
    chosen = _choose(config, spec, stored)
    weights = stored.open(Source(files, spec, config, chosen.dtype, chosen.device, seed=seed))
    return CausalLM(config, weights, **chosen._asdict(), group=group or Group())


def _dtype(name: str, config: ModelConfig) -> torch.dtype:
    name = config.dtype_name or "float32" if name == "auto" else name
    if name not in _DTYPES:
        raise ModelError(f"dtype must be auto, {', '.join(DTYPES)}; got {name!r}")
    return _DTYPES[name]


class _Choice(NamedTuple):
    dtype: torch.dtype
    kv_format: CacheFormat
    device: torch.device
    ops: LayerOps
    attention: AttentionBackend


def _choose(config: ModelConfig, spec: LoadSpec, stored: WeightFormat) -> _Choice:
    dtype, device = _dtype(spec.dtype, config), torch.device(choose_device(spec.device))
    kv_format = cache_format_of(spec.kv_cache_dtype, config)
    if device.type == "cuda":
        expand_segments()
        use_device(device)
    lost = check_dtype(dtype, spec.dtype != "auto", device)
    ops, backend = implementations(spec.attention, dtype, device, lost, invariant=spec.batch_invariant, of=kv_format)
    stored.check_ops(ops, f"device {device.type}, attention {backend.name}")
    return _Choice(dtype, kv_format, device, ops, backend)
