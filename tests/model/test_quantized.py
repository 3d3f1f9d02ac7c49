"""Checkpoints of other libraries' quantizations: numbers, logits, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_zoo import VOCAB, PagedRunner
from safetensors.torch import load_file, save_file

from skipjoin.model.errors import ModelError
from skipjoin.model.folder import check_model, model_files
from skipjoin.model.load_spec import LoadSpec
from skipjoin.model.loader import load_model, planned_model, read_config
from skipjoin.model.ops.build import load_library
from skipjoin.model.parallel import Shard
from skipjoin.model.quantized import QuantizedWeights
from skipjoin.model.weight_files import Source
from skipjoin.model.weights import Matrix
from support.gguf_files import small_llama

Tensors = dict[str, torch.Tensor]
GROUP = 64
# Means of sixteen equally likely parts of a normal distribution, one of them zero (QLoRA, section 3).
NF4 = torch.tensor(
    [
        -1.0, -0.69619280, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0,
        0.07958030, 0.16093020, 0.24611230, 0.33791524, 0.44070983, 0.56261700, 0.72295684, 1.0,
    ]
)  # fmt: skip
PLAIN = LoadSpec(dtype="float32", attention="torch")


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes into words in the last dimension, the lowest bits first."""
    words = codes.long().unflatten(-1, (-1, 32 // bits)) << torch.arange(0, 32, bits)
    return words.sum(-1).to(torch.int32)


def with_zeros(weight: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round to unsigned codes with a scale and a zero per group; also return [out, groups] of both."""
    groups = weight.unflatten(1, (-1, group))
    low, high = groups.aminmax(dim=-1)
    scale = ((high - low) / (2**bits - 1)).half().float()
    zero = (-low / scale).round().clamp(0, 2**bits - 1)
    codes = (groups / scale[..., None] + zero[..., None]).round().clamp(0, 2**bits - 1)
    return codes.flatten(1), scale, zero


def widened(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, group: int) -> torch.Tensor:
    return (codes - zero.repeat_interleave(group, 1)) * scale.repeat_interleave(group, 1)


def awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, scale, zero = with_zeros(weight, 4, GROUP)

    def words(values: torch.Tensor) -> torch.Tensor:  # eight outputs in a word, even ones first
        return packed(values.T.unflatten(1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1), 4)

    tensors = {"qweight": words(codes), "qzeros": words(zero), "scales": scale.T.half().contiguous()}
    return tensors, widened(codes, scale, zero, GROUP)


def gptq(bits: int, stored_zero: int, *, has_order: bool = False) -> Callable[..., tuple[Tensors, torch.Tensor]]:
    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        inputs = weight.shape[1]
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(4))
        order = order if has_order else torch.arange(inputs)
        index = torch.empty(inputs, dtype=torch.int32)
        index[order] = torch.arange(inputs, dtype=torch.int32) // GROUP
        codes, scale, zero = with_zeros(weight[:, order], bits, GROUP)
        zero = zero.clamp(min=1)  # older files store one less
        numbers = widened(codes, scale, zero, GROUP)[:, order.argsort()]
        tensors = {
            "qweight": packed(codes[:, order.argsort()], bits).T.contiguous(),
            "qzeros": packed((zero - stored_zero).T.contiguous(), bits),
            "scales": scale.T.half().contiguous(),
            "g_idx": index,
        }
        return tensors, numbers

    return write


def pack_quantized(bits: int, *, is_symmetric: bool) -> Callable[..., tuple[Tensors, torch.Tensor]]:
    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, scale, zero = with_zeros(weight, bits, GROUP)
        if is_symmetric:
            zero = torch.full_like(zero, 2 ** (bits - 1))
        tensors = {
            "weight_packed": packed(codes, bits),
            "weight_scale": scale.bfloat16(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not is_symmetric:
            tensors["weight_zero_point"] = packed(zero.T.contiguous(), bits).T.contiguous()
        return tensors, widened(codes, scale.bfloat16().float(), zero, GROUP)

    return write


def int_quantized(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scale).round()
    return {"weight": codes.to(torch.int8), "weight_scale": scale}, codes * scale


def float_quantized(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def fp8_blocks(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    blocks = weight.unflatten(1, (-1, 64)).unflatten(0, (-1, 32))
    scale = blocks.abs().amax((1, 3)) / 448
    spread = scale.repeat_interleave(32, 0).repeat_interleave(64, 1)
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scale}, codes.float() * spread


def mxfp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    groups = weight.unflatten(1, (-1, 32))
    exponent = (groups.abs().amax(-1) / 6).log2().ceil()
    scaled = groups / 2 ** exponent[..., None]
    nearest = (scaled.abs()[..., None] - values).abs().argmin(-1)
    codes = (nearest + 8 * (scaled < 0)).flatten(1).to(torch.uint8)
    numbers = values[nearest] * scaled.sign() * 2 ** exponent[..., None]
    stored = {"weight_packed": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": (exponent + 127).to(torch.uint8)}
    return stored, numbers.flatten(1)


def nvfp4(*, of_modelopt: bool) -> Callable[..., tuple[Tensors, torch.Tensor]]:
    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        groups = weight.unflatten(1, (-1, 16))
        factor = weight.abs().max() / (6 * 448)
        scale = (groups.abs().amax(-1) / 6 / factor).to(torch.float8_e4m3fn)
        spread = scale.float()[..., None] * factor
        nearest = ((groups / spread).abs()[..., None] - values).abs().argmin(-1)
        codes = (nearest + 8 * (groups < 0)).flatten(1).to(torch.uint8)
        stored = codes[:, ::2] | codes[:, 1::2] << 4
        tensors = {"weight": stored, "weight_scale": scale, "weight_scale_2": factor, "input_scale": torch.ones(())}
        if not of_modelopt:
            tensors = {"weight_packed": stored, "weight_scale": scale, "weight_global_scale": 1 / factor[None]}
        return tensors, (values[nearest] * groups.sign() * spread).flatten(1)

    return write


def fp8_of_modelopt(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.ones(())}, codes.float() * scale


def bits_and_bytes(kind: str, *, has_codes: bool) -> Callable[..., tuple[Tensors, torch.Tensor]]:
    """Return a writer of 4 bits; with `has_codes`, of scales in codes of their differences from the mean."""
    values = NF4 if kind == "nf4" else torch.tensor([0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4])
    values = values if len(values) == 16 else torch.cat([values, -values])

    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        blocks = weight.view(-1, GROUP)
        scale = blocks.abs().amax(1)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": GROUP, "dtype": "float32", "shape": [*weight.shape]}
        tensors = {"weight.quant_map": values.clone(), "weight.absmax": scale}
        if has_codes:
            table, mean = torch.linspace(-1, 1, 256), float(scale.mean())
            sizes = torch.nn.functional.pad(scale - mean, (0, -len(scale) % 256)).view(-1, 256).abs().amax(1)
            spread = sizes.repeat_interleave(256)[: len(scale)]
            chosen = ((scale - mean) / spread)[:, None].sub(table).abs().argmin(1)
            scale = table[chosen] * spread + mean
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": mean}
            tensors |= {
                "weight.absmax": chosen.to(torch.uint8),
                "weight.nested_absmax": sizes,
                "weight.nested_quant_map": table,
            }
        codes = (blocks / scale[:, None])[..., None].sub(values).abs().argmin(-1).flatten()
        tensors["weight"] = (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None]
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(
            [*json.dumps(state).encode()], dtype=torch.uint8
        )
        return tensors, (values[codes].view(-1, GROUP) * scale[:, None]).view(weight.shape)

    return write


def mlx(bits: int) -> Callable[..., tuple[Tensors, torch.Tensor]]:
    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, scale, zero = with_zeros(weight, bits, GROUP)
        tensors = {"weight": packed(codes, bits).view(torch.uint32), "scales": scale, "biases": -zero * scale}
        return tensors, widened(codes, scale, zero, GROUP)

    return write


def bytes_per_output(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.abs().amax(1)
    codes = (weight * 127 / scale[:, None]).round()
    parts = {"weight": codes.to(torch.int8), "SCB": scale, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, codes * scale[:, None] / 127


def of_tensors(kind: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"group_size": GROUP, **weights}}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups, "ignore": ["lm_head"]}


BITS_AND_BYTES = {"quant_method": "bitsandbytes"}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP}
GPTQ = {"quant_method": "gptq", "group_size": GROUP}
# What writes a matrix, the settings, and whether products read its codes.
CASES: dict[str, tuple[Callable[..., tuple[Tensors, torch.Tensor]], Mapping[str, Any], bool]] = {
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, True),
    "gptq": (gptq(4, 1), {**GPTQ, "bits": 4}, True),
    "gptq, 8 bits": (gptq(8, 1), {**GPTQ, "bits": 8}, True),
    "gptq, version 2": (gptq(4, 0), {**GPTQ, "bits": 4, "checkpoint_format": "gptq_v2"}, True),
    "gptq, act-order": (gptq(4, 1, has_order=True), {**GPTQ, "bits": 4, "desc_act": True}, True),
    "auto-round": (gptq(4, 1), {**AUTO_ROUND, "packing_format": "auto_round:auto_gptq"}, True),
    "auto-round, matrices of other bits": (gptq(8, 0), {**AUTO_ROUND, "packing_format": "auto_round"}, True),
    "auto-round, as awq": (awq, {**AUTO_ROUND, "packing_format": "auto_round:auto_awq"}, True),
    "int4": (pack_quantized(4, is_symmetric=True), of_tensors("pack-quantized", num_bits=4), True),
    "int4 with zeros": (pack_quantized(4, is_symmetric=False), of_tensors("pack-quantized", num_bits=4), True),
    "int8": (pack_quantized(8, is_symmetric=True), of_tensors("pack-quantized", num_bits=8), True),
    "int8 per output": (int_quantized, of_tensors("int-quantized", num_bits=8, type="int", group_size=None), True),
    "mlx": (mlx(4), {"bits": 4, "group_size": GROUP}, True),
    "mlx, 8 bits": (mlx(8), {"bits": 8, "group_size": GROUP}, True),
    "nvfp4": (nvfp4(of_modelopt=False), of_tensors("nvfp4-pack-quantized", num_bits=4), True),
    "nvfp4 of modelopt": (nvfp4(of_modelopt=True), {"quant_method": "modelopt", "quant_algo": "NVFP4"}, True),
    "fp8 of modelopt": (fp8_of_modelopt, {"quant_method": "modelopt", "quant_algo": "FP8"}, False),
    "nf4": (bits_and_bytes("nf4", has_codes=False), BITS_AND_BYTES, True),
    "nf4, scales in codes": (bits_and_bytes("nf4", has_codes=True), BITS_AND_BYTES, True),
    "fp4": (bits_and_bytes("fp4", has_codes=False), BITS_AND_BYTES, True),
    "bytes per output": (bytes_per_output, BITS_AND_BYTES, True),
    "fp8 per output": (float_quantized, of_tensors("float-quantized", num_bits=8, type="float"), False),
    "fp8 in blocks": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [32, 64]}, False),
    "mxfp4": (mxfp4, of_tensors("mxfp4-pack-quantized", num_bits=4), True),
}


@pytest.fixture
def reference(tmp_path: Path) -> tuple[Path, Tensors]:
    model = small_llama(vocab_size=VOCAB)
    model.save_pretrained(tmp_path / "plain")
    return tmp_path / "plain", load_file(tmp_path / "plain" / "model.safetensors")


def write(folder: Path, tensors: Tensors, settings: Mapping[str, Any]) -> Path:
    folder.mkdir()
    config = json.loads((folder.parent / "plain" / "config.json").read_text())
    field = "quantization_config" if "quant_method" in settings else "quantization"
    (folder / "config.json").write_text(json.dumps({**config, field: settings}))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def quantized(folder: Path, tensors: Tensors, case: str) -> tuple[Path, Tensors]:
    """Write a model, and set its tensors to the numbers that it has."""
    by, settings, _ = CASES[case]
    stored = dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        parts, tensors[name] = by(stored.pop(name).float())
        stored |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in parts.items()}
    return write(folder, stored, settings), tensors


def logits(folder: Path, spec: LoadSpec) -> torch.Tensor:
    return torch.cat(PagedRunner(load_model(folder, spec), [[i % 90 for i in range(40)], [3, 4, 5]], 4, seed=1).run())


@pytest.mark.parametrize("case", CASES)
def test_numbers_and_logits_are_those_of_the_checkpoint(
    case: str, reference: tuple[Path, Tensors], tmp_path: Path
) -> None:
    plain, tensors = reference
    folder, tensors = quantized(tmp_path / "quantized", tensors, case)
    save_file(tensors, plain / "model.safetensors")
    files, in_codes = model_files(str(folder)), CASES[case][2]
    config = read_config(files, PLAIN)
    weights = QuantizedWeights(Source(files, PLAIN, config, torch.float32, torch.device("cpu"), reads_codes=True))
    name = "model.layers.0.self_attn.k_proj"
    expected = tensors[f"{name}.weight"]
    size = expected.abs().max()
    taken = weights.take(f"{name}.weight", *expected.shape, rows=range(32, 96), columns=range(64, 192))
    assert (taken - expected[32:96, 64:192]).abs().max() <= 1e-6 * size
    coded = weights.grouped(Matrix(name, 128, range(32, 96)), 256)
    assert (coded is not None) == in_codes
    if coded is not None:
        assert (coded.widened() - expected[32:96]).abs().max() <= 1e-6 * size
    ours, theirs = logits(folder, PLAIN), logits(plain, PLAIN)
    assert (ours - theirs).norm() <= 1e-4 * theirs.norm()
    if load_library() is not None:
        spec = LoadSpec(dtype="float32")
        model = load_model(folder, spec)
        assert (logits(folder, spec) - theirs).norm() <= (0.04 if in_codes else 1e-4) * theirs.norm()
        assert bool(model.weight_label) == in_codes
        planned = planned_model(files, config, spec).weight_bytes
        assert planned <= model.weight_bytes
        assert planned_model(files, config, spec, Shard.of_rank(0, 2, 1)).weight_bytes < planned


@pytest.mark.parametrize("case", ["fp8 per output", "fp8 in blocks", "int4"])
def test_checkpoints_become_products_of_eight_bit_floats(
    case: str, reference: tuple[Path, Tensors], tmp_path: Path
) -> None:
    """Those with a scale per output keep their codes; inputs are rounded, too."""
    folder, _ = quantized(tmp_path / "quantized", reference[1], case)
    found, plain = logits(folder, replace(PLAIN, quantization="fp8")), logits(folder, PLAIN)
    assert (found - plain).norm() <= 0.08 * plain.norm()


@pytest.mark.parametrize(
    "case", ["int4", "int4 with zeros", "int8", "int8 per output", "fp8 per output", "mxfp4", "nvfp4"]
)
def test_writers_agree_with_compressed_tensors(case: str) -> None:
    library = pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor  # noqa: PLC0415
    from compressed_tensors.quantization import QuantizationScheme  # noqa: PLC0415

    assert library is not None
    by, settings, _ = CASES[case]
    parts, numbers = by(torch.randn(64, 256, generator=torch.Generator().manual_seed(1)))
    has_groups = "per output" not in case
    weights = {
        "num_bits": settings["config_groups"]["group_0"]["weights"]["num_bits"],
        "type": "float" if "fp" in case else "int",
        "symmetric": "zeros" not in case,
        "strategy": "tensor_group" if case == "nvfp4" else "group" if has_groups else "channel",
        "group_size": {"mxfp4": 32, "nvfp4": 16}.get(case, GROUP) if has_groups else None,
    }
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = BaseCompressor.get_value_from_registry(settings["format"])
    found = compressor.decompress(parts, scheme)["weight"]
    torch.testing.assert_close(found.float(), numbers, atol=2e-2 * float(numbers.abs().max()), rtol=1e-2)


@pytest.mark.parametrize("case", ["nf4", "nf4, scales in codes", "fp4"])
def test_writers_agree_with_bitsandbytes(case: str) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    parts, numbers = CASES[case][0](torch.randn(64, 256, generator=torch.Generator().manual_seed(1)))
    stored = {name.removeprefix("weight."): tensor for name, tensor in parts.items() if name != "weight"}
    state = functional.QuantState.from_dict(stored, device=torch.device("cpu"))
    found = functional.dequantize_4bit(parts["weight"], state)
    torch.testing.assert_close(found.float(), numbers, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
def test_writers_agree_with_mlx(bits: int) -> None:
    core = pytest.importorskip("mlx.core")
    parts, numbers = CASES["mlx" if bits == 4 else "mlx, 8 bits"][0](torch.randn(64, 256))
    arrays = [core.array(parts[name].numpy()) for name in ("weight", "scales", "biases")]
    found = torch.from_numpy(np.array(core.dequantize(*arrays, group_size=GROUP, bits=bits)))
    torch.testing.assert_close(found, numbers, atol=1e-5, rtol=1e-5)


def test_blocks_of_two_outputs_are_widened(reference: tuple[Path, Tensors], tmp_path: Path) -> None:
    write_blocks = bits_and_bytes("nf4", has_codes=False)
    parts, numbers = write_blocks(torch.randn(48, 96, generator=torch.Generator().manual_seed(1)))
    name = "model.layers.0.self_attn.k_proj"
    stored = {f"{name}.{part}": tensor for part, tensor in parts.items()}
    files = model_files(str(write(tmp_path / "quantized", reference[1] | stored, BITS_AND_BYTES)))
    source = Source(files, PLAIN, read_config(files, PLAIN), torch.float32, torch.device("cpu"), reads_codes=True)
    weights = QuantizedWeights(source)
    assert weights.grouped(Matrix(name, 48, range(48)), 96) is None
    torch.testing.assert_close(weights.take(f"{name}.weight", 48, 96, rows=range(1, 9)), numbers[1:9])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq with bits 4, version 'gemv'; 4 and gemm can be"),
        ({"quant_method": "gptq", "bits": 3}, "gptq with bits 3; 4 and 8 can be read"),
        (of_tensors("marlin-24", num_bits=4), "compressed-tensors with format 'marlin-24'; "),
        ({"bits": 4, "group_size": 32, "mode": "mxfp4"}, "those of MLX with mode 'mxfp4'; affine can be read"),
        ({**AUTO_ROUND, "packing_format": "auto_round:fp8"}, "of this kind are .* has 'auto-round'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "modelopt with quant_algo 'W4A8_AWQ'; FP8, FP8_PER"),
        (of_tensors("pack-quantized", num_bits=2), "compressed-tensors with num_bits 2; 4 and 8 can be read"),
        ({**of_tensors("pack-quantized", num_bits=4), "config_groups": {}}, "several config_groups; one without"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"},
            "bitsandbytes with bnb_4bit_quant_storage 'bfloat16'; uint8 can be read",
        ),
        ({"quant_method": "quanto"}, "quantized weights of this kind are .* has 'quanto', and compressed-tensors, awq"),
    ],
)
def test_other_layouts_are_refused_in_a_sentence(
    settings: Mapping[str, Any], message: str, reference: tuple[Path, Tensors], tmp_path: Path
) -> None:
    folder = write(tmp_path / "quantized", reference[1], settings)
    with pytest.raises(ModelError, match=message):
        check_model(str(folder))


@pytest.mark.parametrize(
    ("part", "message"),
    [("scales", r"has no tensor .*k_proj\.scales"), ("qweight", r"k_proj\.qweight has shape .*implies")],
)
def test_damaged_checkpoints_are_refused(
    part: str, message: str, reference: tuple[Path, Tensors], tmp_path: Path
) -> None:
    folder, _ = quantized(tmp_path / "quantized", reference[1], "gptq")
    stored = load_file(folder / "model.safetensors")
    name = f"model.layers.0.self_attn.k_proj.{part}"
    if part == "scales":
        del stored[name]
    else:
        stored[name] = stored[name][:-1].contiguous()
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        load_model(folder, LoadSpec(dtype="float32"))
