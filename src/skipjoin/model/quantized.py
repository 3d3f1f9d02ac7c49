from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from skipjoin.model.bitsandbytes import SCALES_4BIT, SCALES_8BIT, Blocks, read_4bit, read_8bit
from skipjoin.model.errors import ModelError
from skipjoin.model.family import family_named
from skipjoin.model.groups import GroupedMatrix
from skipjoin.model.groups import coded_bytes as groups_bytes
from skipjoin.model.ops.base import LayerOps, Linear
from skipjoin.model.safetensors_weights import FolderWeights, SafetensorsFiles, stored_names
from skipjoin.model.weight_files import ModelFiles, Source
from skipjoin.model.weights import Matrix, Stack

_log = logging.getLogger(__name__)
_NUMBERS = ("F32", "F16", "BF16")
_FP8 = "F8_E4M3"
# Twice the numbers of four-bit floats, so that they are integers.
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
# Where AWQ stores each eight outputs in a word.
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
# Formats of compressed-tensors.
_FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized",
    "mxfp4-pack-quantized", "nvfp4-pack-quantized",
)  # fmt: skip
# Values of quant_algo in files of ModelOpt, of which the last one has matrices of the others.
_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "MIXED_PRECISION")
# Suffixes of tensors of matrices in codes of as many bits as the settings say, or of 4.
_IN_4_OR_8_BITS = ("qweight", "weight_packed", "weight_scale_2", "biases", SCALES_4BIT)
# Inputs per scale in NVFP4.
_NVFP4_GROUP = 16


class Numbers(NamedTuple):
    stored: torch.Tensor
    scales: torch.Tensor

    def widened(self) -> torch.Tensor:
        outputs, inputs = self.stored.shape
        scales = self.scales.float()
        rows, columns = (-(-size // count) for size, count in zip(self.stored.shape, scales.shape, strict=True))
        spread = scales.repeat_interleave(rows, 0)[:outputs].repeat_interleave(columns, 1)[:, :inputs]
        return self.stored.float() * spread


Stored = GroupedMatrix | Numbers | Blocks


class QuantizedWeights(FolderWeights):
    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._reads_codes = source.reads_codes
        self._settings: Mapping[str, Any] = source.files.quantization
        self._is_told = False
        self.label = ""

    def grouped(self, matrix: Matrix, inputs: int, columns: range | None = None) -> GroupedMatrix | None:
        if not self._reads_codes:
            return None
        found: Stored | None = self._decoded(matrix.name, matrix.out, inputs)
        if not isinstance(found, GroupedMatrix):
            return None
        part = found.outputs(matrix.rows)
        coded = part if columns is None else part.columns(columns)
        if coded is not None:
            self.label = str(self._settings["quant_method"])
        return coded

    def take(self, name: str, *shape: int, rows: range | None = None, columns: range | None = None) -> torch.Tensor:
        base, _, kind = name.rpartition(".")
        found = self._decoded(base, *shape) if kind == "weight" and len(shape) == 2 else None
        if found is None:
            return super().take(name, *shape, rows=rows, columns=columns)
        self._tell_widened()
        wanted = [slice(None) if part is None else slice(part.start, part.stop) for part in (rows, columns)]
        return found.widened()[wanted[0], wanted[1]].to(device=self._device, dtype=self._dtype).contiguous()

    def _tell_widened(self) -> None:
        if not self._is_told:
            _log.info("weights of type %s are widened to %s", self._settings["quant_method"], self._dtype)
            self._is_told = True

    def stacked(
        self, ops: LayerOps, stack: Stack, bias: torch.Tensor | None, activation: str | None = None
    ) -> list[Linear]:
        if not self.has(f"{stack.name}_blocks"):
            return super().stacked(ops, stack, bias, activation)
        made: list[Linear] = []
        sizes = stack.experts, stack.out, stack.inputs // 32
        blocks = self.stored(f"{stack.name}_blocks", *sizes, 16, types=("U8",)).flatten(2)
        exponents = self.stored(f"{stack.name}_scales", *sizes, types=("U8",))
        for index in range(stack.experts):
            matrix, shift = _fp4_matrix(blocks[index], exponents[index]), None if bias is None else bias[index]
            coded = matrix if stack.columns is None else matrix.columns(stack.columns)
            if self._reads_codes and coded is not None:
                self.label = str(self._settings["quant_method"])
                rows = stack._replace(columns=None).part
                made.append(
                    ops.grouped([coded._replace(codes=rows(coded.codes), scales=rows(coded.scales))], shift, activation)
                )
            else:
                self._tell_widened()
                weight = stack.part(matrix.widened()).to(device=self._device, dtype=self._dtype)
                made.append(self.product(ops, weight.contiguous(), shift, activation))
        return made

    def _decoded(self, name: str, outputs: int, inputs: int) -> Stored | None:
        for suffix, read in self._layouts():
            if self.has(f"{name}.{suffix}"):
                return read(name, outputs, inputs)
        return None

    def _layouts(self) -> list[tuple[str, Callable[[str, int, int], Stored]]]:
        by_method = self._awq if self._settings["quant_method"] == "awq" else self._gptq
        return [
            ("qweight", by_method),
            ("weight_packed", self._packed),
            ("weight_scale_2", self._nvfp4_of_modelopt),
            ("weight_scale_inv", self._fp8_blocks),
            ("weight_scale", self._scaled),
            ("biases", self._mlx),
            (SCALES_4BIT, partial(read_4bit, self)),
            (SCALES_8BIT, partial(read_8bit, self)),
        ]

    def _awq(self, name: str, outputs: int, inputs: int) -> GroupedMatrix:
        group = self._group(inputs)
        sizes = inputs, -(-inputs // group)
        codes, zeros = (
            _unpacked(self.stored(f"{name}.{part}", size, outputs // 8, types=("I32",)), 4)
            .T.contiguous()
            .view(-1, 8, size)[:, _AWQ_ORDER]  # whole rows are moved
            .view(outputs, size)
            for part, size in zip(("qweight", "qzeros"), sizes, strict=True)
        )
        scales = self.stored(f"{name}.scales", sizes[1], outputs, types=_NUMBERS)
        return _with_zeros(codes, scales.T, zeros, group, 4)

    def _gptq(self, name: str, outputs: int, inputs: int) -> GroupedMatrix:
        bits, group = self._own_sizes(name, inputs)
        per_word, groups = 32 // bits, -(-inputs // group)
        words = self.stored(f"{name}.qweight", inputs // per_word, outputs, types=("I32",))
        codes = _unpacked(words.T.contiguous(), bits)
        zeros = _unpacked(self.stored(f"{name}.qzeros", groups, outputs // per_word, types=("I32",)), bits)
        if self._settings.get("checkpoint_format", "gptq") != "gptq_v2":
            zeros = zeros + 1 & (1 << bits) - 1
        scales = self.stored(f"{name}.scales", groups, outputs, types=_NUMBERS)
        order = None
        if self.has(f"{name}.g_idx"):
            index = self.stored(f"{name}.g_idx", inputs, types=("I32",))
            plain = torch.arange(inputs, dtype=torch.int32) // group
            if not torch.equal(index, plain):
                order = index.argsort(stable=True)
                if not torch.equal(index[order], plain):
                    raise ModelError(f"{self._folder}: {name}.g_idx has groups of other than {group} inputs")
                codes = codes[:, order]
        return _with_zeros(codes, scales.T, zeros.T, group, bits)._replace(order=order)

    def _own_sizes(self, name: str, inputs: int) -> tuple[int, int]:
        words, scales = (self.shape_of(f"{name}.{part}") or (0,) for part in ("qweight", "scales"))
        bits = next((bits for bits in (4, 8) if 32 * words[0] == bits * inputs), int(self._settings["bits"]))
        group, groups = self._group(inputs), scales[0]
        is_other = groups not in (0, -(-inputs // group)) and inputs % groups == 0
        return bits, inputs // groups if is_other else group

    def _mlx(self, name: str, outputs: int, inputs: int) -> GroupedMatrix:
        words = self._shape(f"{name}.weight")[-1]
        bits = 32 * words // inputs
        if bits not in (4, 8):
            raise ModelError(f"{self._folder}: {name} has {32 * words / inputs:g} bits per weight; 4 and 8 can be read")
        stored = self.stored(f"{name}.weight", outputs, words, types=("U32",)).view(torch.int32)
        groups = self._shape(f"{name}.scales")[-1]
        scales, biases = (
            self.stored(f"{name}.{part}", outputs, groups, types=_NUMBERS).float() for part in ("scales", "biases")
        )
        codes, middle = _unpacked(stored, bits), 0 if bits == 4 else 128
        return GroupedMatrix(
            (codes - middle).to(torch.uint8 if bits == 4 else torch.int8),
            scales, inputs // groups, bits, biases + middle * scales,
        )  # fmt: skip

    def _packed(self, name: str, outputs: int, inputs: int) -> GroupedMatrix:
        if self._kind(f"{name}.weight_packed") == "U8":
            return self._fp4(name, outputs, inputs)
        settings = self._weights()
        bits = int(settings["num_bits"])
        words = self.stored(f"{name}.weight_packed", outputs, inputs * bits // 32, types=("I32",))
        scales, group = self._scales(name, outputs, inputs)
        order, zeros = None, torch.full(scales.shape, 1 << bits - 1, dtype=torch.uint8)
        if self.has(f"{name}.weight_zero_point"):
            rows = -(-outputs * bits // 32)
            packed = self.stored(f"{name}.weight_zero_point", rows, scales.shape[1], types=("I32",))
            zeros = _unpacked(packed.T.contiguous(), bits).T[:outputs]
        codes = _unpacked(words, bits)
        if self.has(f"{name}.weight_g_idx"):
            index = self.stored(f"{name}.weight_g_idx", inputs, types=("I32",))
            order = index.argsort(stable=True)
            codes = codes[:, order]
        return _with_zeros(codes, scales, zeros, group, bits)._replace(order=order)

    def _fp4(self, name: str, outputs: int, inputs: int) -> GroupedMatrix:
        if self.has(f"{name}.weight_global_scale"):
            divisor = self._single(f"{name}.weight_global_scale")
            return self._nvfp4(name, "weight_packed", outputs, inputs, 1 / divisor)
        packed = self.stored(f"{name}.weight_packed", outputs, inputs // 2, types=("U8",))
        exponents = self.stored(f"{name}.weight_scale", outputs, inputs // 32, types=("U8",))
        return _fp4_matrix(packed, exponents)

    def _nvfp4_of_modelopt(self, name: str, outputs: int, inputs: int) -> GroupedMatrix:
        return self._nvfp4(name, "weight", outputs, inputs, self._single(f"{name}.weight_scale_2"))

    def _nvfp4(self, name: str, codes: str, outputs: int, inputs: int, factor: torch.Tensor) -> GroupedMatrix:
        packed = self.stored(f"{name}.{codes}", outputs, inputs // 2, types=("U8",))
        scales = self.stored(f"{name}.weight_scale", outputs, inputs // _NVFP4_GROUP, types=(_FP8,))
        return GroupedMatrix(_nibbles(packed), scales.float() * (factor / 2), _NVFP4_GROUP, 4, values=_FP4)

    def _single(self, name: str) -> torch.Tensor:
        shape = self.shape_of(name)
        return self.stored(name, *(shape if shape == () else (1,)), types=("F32",)).view(())

    def _scaled(self, name: str, outputs: int, inputs: int) -> GroupedMatrix | Numbers:
        stored = self.stored(f"{name}.weight", outputs, inputs, types=("I8", _FP8))
        scales, group = self._scales(name, outputs, inputs)
        if stored.dtype != torch.int8 or group == 1:
            return Numbers(stored, scales)
        zeros = None
        if self.has(f"{name}.weight_zero_point"):
            zeros = self.stored(f"{name}.weight_zero_point", *self._shape(f"{name}.weight_zero_point"), types=("I8",))
        minimums = None if zeros is None else -(scales.float() * zeros.view(scales.shape).float())
        scales = _kept(scales) if minimums is None else scales.float()
        return GroupedMatrix(stored, scales.contiguous(), group, 8, minimums)

    def _fp8_blocks(self, name: str, outputs: int, inputs: int) -> Numbers:
        rows, columns = self._settings.get("weight_block_size") or (outputs, inputs)
        stored = self.stored(f"{name}.weight", outputs, inputs, types=(_FP8,))
        sizes = -(-outputs // rows), -(-inputs // columns)
        scales = self.stored(f"{name}.weight_scale_inv", *sizes, types=_NUMBERS)
        spread = scales.float().repeat_interleave(rows, 0)[:outputs].repeat_interleave(columns, 1)[:, :inputs]
        return Numbers(stored, spread)

    def _scales(self, name: str, outputs: int, inputs: int) -> tuple[torch.Tensor, int]:
        shape, block = self._shape(f"{name}.weight_scale"), self._weights().get("block_structure")
        scales = self.stored(f"{name}.weight_scale", *shape, types=_NUMBERS)
        if block:
            spread = scales.repeat_interleave(block[0], 0)[:outputs]
            return spread.repeat_interleave(block[1], 1)[:, :inputs], 1
        scales = scales.view(shape[0] if shape else 1, -1).expand(outputs, -1)
        whole = -(-inputs // 32) * 32
        return scales, whole if scales.shape[1] == 1 else int(self._weights()["group_size"])

    def _group(self, inputs: int) -> int:
        size = int(self._settings.get("group_size", 128))
        return -(-inputs // 32) * 32 if size < 0 else size

    def _weights(self) -> Mapping[str, Any]:
        groups = self._settings.get("config_groups") or {}
        first: Any = next(iter(groups.values()), {})
        return dict(first.get("weights") or {})

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files.opened(self.named(name) or name).get_shape())

    def _kind(self, name: str) -> str:
        return str(self._files.opened(self.named(name) or name).get_dtype())


def _fp4_matrix(packed: torch.Tensor, exponents: torch.Tensor) -> GroupedMatrix:
    return GroupedMatrix(_nibbles(packed), 2.0 ** (exponents.float() - 128), 32, 4, values=_FP4)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack([packed & 15, packed >> 4], -1).flatten(1)


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    stored = words.contiguous().view(torch.uint8)
    if bits == 8:
        return stored
    pairs = stored.to(torch.int16)  # each becomes two bytes, the lower one first
    return pairs.bitwise_or_(pairs << 4).bitwise_and_(0x0F0F).view(torch.uint8)


def _kept(scales: torch.Tensor) -> torch.Tensor:
    return scales if scales.dtype == torch.float16 else scales.float()


def _with_zeros(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group: int, bits: int) -> GroupedMatrix:
    middle = 1 << bits - 1
    stored = codes if bits == 4 else (codes ^ middle).view(torch.int8)
    if bool((zeros == middle).all()):
        return GroupedMatrix(stored.contiguous(), _kept(scales).contiguous(), group, bits, offset=8 if bits == 4 else 0)
    wide = scales.float().contiguous()
    shifts = zeros.float() if bits == 4 else zeros.float() - middle
    return GroupedMatrix(stored.contiguous(), wide, group, bits, -wide * shifts)


def coded_bytes(source: Source, name: str, outputs: int, inputs: int) -> int | None:
    stored = _names(source.files.folder) if source.files.has_weights and source.reads_codes else frozenset()
    names = stored_names(name, family_named(source.config.family).prefix)
    if {f"{name}_blocks" for name in names} & stored:
        return groups_bytes(outputs, inputs, bits=4, scale_bytes=4)
    settings = source.files.quantization
    groups = settings.get("config_groups") or {}
    weights = next((group["weights"] for group in groups.values()), settings)
    kinds = {*_IN_4_OR_8_BITS, *(["weight_scale"] if weights.get("type") == "int" else [])}
    if {f"{name}.{SCALES_8BIT}" for name in names} & stored:
        return groups_bytes(outputs, inputs, group=inputs)
    if not {f"{name}.{kind}" for name in names for kind in kinds} & stored:
        return None
    bits, group = int(weights.get("num_bits", weights.get("bits", 4))), int(weights.get("group_size") or -1)
    return groups_bytes(outputs, inputs, bits=bits, group=group if group > 0 else inputs)


# A model's matrices are asked for one by one.
@lru_cache(maxsize=1)
def _names(folder: Path) -> frozenset[str]:
    return frozenset(SafetensorsFiles(folder).where)


def why_unsupported(files: ModelFiles) -> str | None:
    found = files.quantization
    method = found.get("quant_method")
    if method == "awq" and (found.get("bits", 4) != 4 or str(found.get("version", "gemm")).lower() != "gemm"):
        return f"awq with bits {found.get('bits')!r:.20}, version {found.get('version')!r:.20}; 4 and gemm can be read"
    if method == "gptq" and found.get("bits") not in (4, 8):
        return f"gptq with bits {found.get('bits')!r:.20}; 4 and 8 can be read"
    layout = found.get("checkpoint_format") or "gptq"
    if method == "gptq" and layout not in ("gptq", "gptq_v2"):
        return f"gptq with checkpoint_format {layout!r:.40}; gptq and gptq_v2 can be read"
    if method == "bitsandbytes" and (storage := found.get("bnb_4bit_quant_storage", "uint8")) != "uint8":
        return f"bitsandbytes with bnb_4bit_quant_storage {storage!r:.20}; uint8 can be read"
    if method == "mlx" and (mode := found.get("mode", "affine")) != "affine":
        return f"those of MLX with mode {mode!r:.20}; affine can be read"
    if method == "modelopt" and found.get("quant_algo") not in _ALGORITHMS:
        return f"modelopt with quant_algo {found.get('quant_algo')!r:.40}; {', '.join(_ALGORITHMS)} can be read"
    if method == "compressed-tensors":
        kind, groups = found.get("format"), found.get("config_groups")
        if kind not in _FORMATS:
            return f"compressed-tensors with format {kind!r:.40}; {', '.join(_FORMATS)} can be read"
        if found.get("transform_config") or not isinstance(groups, Mapping) or len(groups) != 1:
            return "compressed-tensors with transforms or several config_groups; one without can be read"
        (group,) = groups.values()
        bits = (group.get("weights") or {}).get("num_bits") if isinstance(group, Mapping) else None
        if bits not in (4, 8):
            return f"compressed-tensors with num_bits {bits!r:.20}; 4 and 8 can be read"
    return None
