from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from skipjoin.model.errors import ModelError
from skipjoin.model.gguf.file import is_gguf, read_gguf
from skipjoin.model.load_spec import LoadSpec
from skipjoin.model.plugins import PluginError, load_plugins
from skipjoin.model.settings_files import read_json
from skipjoin.model.weight_files import INDEX, ModelFiles, Source, read_weight_map, safetensors_files

if TYPE_CHECKING:
    from skipjoin.model.ops.base import LayerOps
    from skipjoin.model.weights import PlannedWeights, Weights

_log = logging.getLogger(__name__)
# Entry points of this group name the class of a format.
ENTRY_POINTS = "skipjoin.weight_formats"
# Types that a model runs in, of types in GGUF files. Others have fewer bits than bfloat16.
_GGUF_DTYPES = {"F32": "float32", "F16": "float16"}
# Values of quant_method in config.json.
_METHODS = ("compressed-tensors", "awq", "gptq", "bitsandbytes", "modelopt", "mlx", "fp8", "mxfp4")
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class WeightFormat(ABC):
    """How weights are stored, in files or in products. `weight_format` registers a class.

    Attributes:
        patterns: Files that hold the weights, which are downloaded from the hub.
        load_format: Value of the option for which this format may be chosen; None for all. Likewise `quantization`.
    """

    name: str
    patterns: Sequence[str] = ("*.safetensors",)
    load_format: str | None = "auto"
    quantization: str = "none"

    @abstractmethod
    def matches(self, files: ModelFiles) -> bool: ...

    @abstractmethod
    def open(self, source: Source) -> Weights: ...

    def check(self, files: ModelFiles) -> None:  # noqa: B027 (most formats need none)
        """Raise `ModelError` for what names and indexes of the files show to be wrong."""

    def check_ops(self, ops: LayerOps, where: str) -> None:  # noqa: B027 (most formats need none)
        ...

    def dtype_name(self, files: ModelFiles) -> str:
        """Return the type of activations if neither config.json nor the user names one."""
        return "float32"

    def matrix_bytes(self, source: Source, name: str, outputs: int, inputs: int) -> int | None:
        """Return a matrix's minimum bytes, to check the memory before loading; None if it has no codes."""
        return None

    def product_bytes(self, source: Source, outputs: int, inputs: int) -> int | None:
        """Return the same for a product of a tensor that was taken."""
        return None

    def plan(self, source: Source) -> PlannedWeights:
        from skipjoin.model.weights import PlannedWeights  # noqa: PLC0415

        return PlannedWeights(source.dtype, partial(self.matrix_bytes, source), partial(self.product_bytes, source))


_formats: dict[str, WeightFormat] = {}
FormatT = TypeVar("FormatT", bound=type[WeightFormat])


def weight_format(cls: FormatT) -> FormatT:
    _formats[cls.name] = cls()
    return cls


def format_of(files: ModelFiles, spec: LoadSpec) -> WeightFormat:
    for field in ("load_format", "quantization"):
        known = dict.fromkeys(getattr(form, field) for form in _formats.values())
        names = [name for name in known if name is not None]
        if (asked := getattr(spec, field)) not in names:
            raise ModelError(f"{field} must be one of {', '.join(names)}; got {asked!r}")
    found = _find(files, spec)
    if found is None:
        try:
            load_plugins(
                ENTRY_POINTS,
                lambda loaded: any(type(form) is loaded for form in _formats.values()),
                "a class with the decorator skipjoin.model.weight_format.weight_format",
            )
        except PluginError as error:
            raise ModelError(str(error)) from error
        found = _find(files, spec)
    if found is None:
        raise ModelError(why_refused(files) or f"{files.folder} has no .safetensors file")
    if files.has_weights:
        found.check(files)
    return found


def weight_patterns() -> list[str]:
    return [*dict.fromkeys(pattern for form in _formats.values() for pattern in form.patterns)]


def _find(files: ModelFiles, spec: LoadSpec) -> WeightFormat | None:
    for form in _formats.values():
        is_asked = form.load_format in (None, spec.load_format) and form.quantization == spec.quantization
        if is_asked and form.matches(files):
            return form
    return None


# -- formats ----------------------------------------------------------------------------------------------------------


@weight_format
class Gguf(WeightFormat):
    name = "gguf"
    patterns = ()  # of many files in a repository, one is wanted

    def matches(self, files: ModelFiles) -> bool:
        return is_gguf(files.folder)

    def open(self, source: Source) -> Weights:
        from skipjoin.model.gguf.weights import GgufWeights  # noqa: PLC0415

        return GgufWeights(source)

    def matrix_bytes(self, source: Source, name: str, outputs: int, inputs: int) -> int | None:
        from skipjoin.model.gguf.weights import coded_bytes  # noqa: PLC0415

        return coded_bytes(source, name, outputs, inputs)

    def dtype_name(self, files: ModelFiles) -> str:
        elements: Counter[str] = Counter()
        for tensor in read_gguf(files.folder).tensors.values():
            elements[_GGUF_DTYPES.get(tensor.type.name, "bfloat16")] += tensor.elements
        return max(elements, key=lambda name: elements[name])


@weight_format
class Safetensors(WeightFormat):
    name = "safetensors"

    def matches(self, files: ModelFiles) -> bool:
        return not files.quantization and files.may_have(*self.patterns, INDEX)

    def check(self, files: ModelFiles) -> None:
        if (files.folder / INDEX).is_file():
            read_weight_map(files.folder / INDEX)
        elif all(file.name.startswith("adapter_") for file in safetensors_files(files.folder)):
            raise ModelError(_why_adapter(files) or f"{files.folder} has no weights but those of an adapter")

    def open(self, source: Source) -> Weights:
        from skipjoin.model.safetensors_weights import FolderWeights  # noqa: PLC0415

        return FolderWeights(source)

    def dtype_name(self, files: ModelFiles) -> str:
        from skipjoin.model.safetensors_weights import stored_dtype  # noqa: PLC0415

        return stored_dtype(files.folder)


@weight_format
class Quantized(Safetensors):
    name = "quantized"

    def matches(self, files: ModelFiles) -> bool:
        found = files.quantization
        is_known = isinstance(found, Mapping) and found.get("quant_method") in _METHODS
        return is_known and files.may_have(*self.patterns, INDEX)

    def check(self, files: ModelFiles) -> None:
        from skipjoin.model.quantized import why_unsupported  # noqa: PLC0415

        super().check(files)
        if (why := why_unsupported(files)) is not None:
            raise ModelError(
                f"the weights in {files.folder} are {why}: give another quantization, or the model that they were made "
                "from"
            )

    def open(self, source: Source) -> Weights:
        from skipjoin.model.quantized import QuantizedWeights  # noqa: PLC0415

        return QuantizedWeights(source)

    def matrix_bytes(self, source: Source, name: str, outputs: int, inputs: int) -> int | None:
        from skipjoin.model.quantized import coded_bytes  # noqa: PLC0415

        return coded_bytes(source, name, outputs, inputs)


@weight_format
class Dummy(WeightFormat):
    name = load_format = "dummy"
    patterns = ()

    def matches(self, files: ModelFiles) -> bool:
        return not files.quantization

    def open(self, source: Source) -> Weights:
        from skipjoin.model.weights import RandomWeights  # noqa: PLC0415

        return RandomWeights(source.seed, source.dtype, source.device)

    def dtype_name(self, files: ModelFiles) -> str:
        from skipjoin.model.safetensors_weights import stored_dtype  # noqa: PLC0415

        try:
            return stored_dtype(files.folder)
        except ModelError as error:
            _log.info("config.json has no dtype, and %s: the random weights are float32", error)
            return "float32"


@weight_format
class Int8(WeightFormat):
    name = quantization = "int8"
    load_format = None
    patterns = ()

    def matches(self, files: ModelFiles) -> bool:
        return not files.quantization

    def open(self, source: Source) -> Weights:
        from skipjoin.model.weights import Int8Weights  # noqa: PLC0415

        plain = replace(source.spec, quantization="none")
        return Int8Weights(format_of(source.files, plain).open(source))

    def check_ops(self, ops: LayerOps, where: str) -> None:
        if ops.name != "cpp":
            raise ModelError(
                "quantization int8 needs the compiled CPU operations: device cpu, attention auto or cpp, and a C++ "
                f"compiler; got {where}"
            )

    def matrix_bytes(self, source: Source, name: str, outputs: int, inputs: int) -> int | None:
        from skipjoin.model.groups import coded_bytes  # noqa: PLC0415

        return coded_bytes(outputs, inputs)

    def product_bytes(self, source: Source, outputs: int, inputs: int) -> int | None:
        return self.matrix_bytes(source, "", outputs, inputs)


@weight_format
class Fp8(WeightFormat):
    name = quantization = "fp8"
    load_format = None
    patterns = ()

    def matches(self, files: ModelFiles) -> bool:
        return True

    def open(self, source: Source) -> Weights:
        from skipjoin.model.weights import Fp8Weights  # noqa: PLC0415

        self._check(source)
        plain = replace(source.spec, quantization="none")
        return Fp8Weights(format_of(source.files, plain).open(source), source.config.vocab_size)

    def check_ops(self, ops: LayerOps, where: str) -> None:
        if ops.reads_codes:
            raise ModelError(f"quantization fp8 needs device cuda, where a CPU has int8; got {where}")

    def product_bytes(self, source: Source, outputs: int, inputs: int) -> int | None:
        return outputs * inputs

    def plan(self, source: Source) -> PlannedWeights:
        self._check(source)
        return super().plan(source)

    def _check(self, source: Source) -> None:
        if source.config.experts is not None:
            raise ModelError("quantization fp8 is for models without experts")
        if source.spec.batch_invariant:
            raise ModelError("quantization fp8 has no products that batch_invariant needs")


# -- refusals ---------------------------------------------------------------------------------------------------------


def _why_bin(files: ModelFiles) -> str | None:
    if not files.config or not files.names("pytorch_model*.bin"):
        return None
    return (
        f"{files.folder} has its weights only as .bin files, which can run code when loaded; make a copy in "
        f"safetensors once with: skipjoin convert {files.folder} TARGET"
    )


def _why_quantized(files: ModelFiles) -> str | None:
    if not (found := files.quantization):
        return None
    method = found.get("quant_method", "no quant_method") if isinstance(found, Mapping) else found
    return (
        f"quantized weights of this kind are not supported: quantization_config in {files.folder / 'config.json'} "
        f"has {method!r:.80}, and {', '.join(_METHODS)} can be read. Give one of those, or the model that it was made "
        "from; --quantization int8 stores that in 8 bits"
    )


def _why_adapter(files: ModelFiles) -> str | None:
    if not (files.folder / "adapter_config.json").is_file():
        return None
    base = read_json(files.folder / "adapter_config.json").get("base_model_name_or_path")
    of = f" of {base}" if isinstance(base, str) and base else ""
    return (
        f"{files.folder} is a LoRA adapter{of}, not a model: serve that model with --lora-modules NAME={files.folder}, "
        "or give a copy of it that peft's merge_and_unload has made, unless the adapter changes the embedding or the "
        "output of a model that ties them, because merging changes both"
    )


def _why_pickled(files: ModelFiles) -> str | None:
    if not (found := files.names(*_PICKLED)):
        return None
    return (
        f"{files.folder} has its weights only as {found[0]}, a format that can run code when loaded and is never "
        "read: give a folder with config.json, a tokenizer and safetensors"
    )


# Each returns why files that no format matches are refused, or None.
_REFUSALS = (_why_quantized, _why_bin, _why_adapter, _why_pickled)


def why_refused(files: ModelFiles) -> str | None:
    return next((why for refusal in _REFUSALS if (why := refusal(files)) is not None), None)


def why_file(path: Path) -> str | None:
    if path.is_file():
        return f"{path} is a file: give its folder, which has config.json, a tokenizer and safetensors, or a GGUF file"
    return None
