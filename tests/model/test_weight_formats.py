"""Weight formats: one of this file alone, from a folder to served tokens, and what no format can open."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from skipjoin.builtin import builtin_model_path
from skipjoin.config import EngineConfig
from skipjoin.engine.load import check_load
from skipjoin.llm import LLM
from skipjoin.model import weight_format as formats
from skipjoin.model.errors import ModelError
from skipjoin.model.folder import check_model, model_files
from skipjoin.model.load_spec import LoadSpec
from skipjoin.model.loader import load_model, planned_model, read_config
from skipjoin.model.ops.base import GATED, LayerOps, Linear, Norm
from skipjoin.model.safetensors_weights import FolderWeights
from skipjoin.model.weight_files import ModelFiles, Source
from skipjoin.model.weight_format import Safetensors
from skipjoin.model.weights import Matrix, Weights
from skipjoin.sampling import SamplingParams

PROMPTS = ["Count from 3 to 12", "Count down from 9 to 2"]
SETTINGS = {"dtype": "float32", "threads": 1, "profile": "off", "kv_cache_gib": 0.02, "swap_space_gib": 0}


class Nibbles(Safetensors):
    """Four bits per weight of a layer's products, with a scale and a minimum per row."""

    name = "nibbles"

    def matches(self, files: ModelFiles) -> bool:
        return bool(files.quantization) and files.quantization.get("quant_method") == self.name

    def open(self, source: Source) -> Weights:
        return NibbleWeights(source)

    def matrix_bytes(self, source: Source, name: str, outputs: int, inputs: int) -> int | None:
        return outputs * (inputs // 2 + 8) if name.endswith("_proj") else None


class NibbleWeights(FolderWeights):
    label = "nibble"

    def linear(
        self,
        ops: LayerOps,
        matrices: Sequence[Matrix],
        inputs: int,
        *,
        bias: bool,
        columns: range | None = None,
        activation: str | None = None,
    ) -> Linear:
        if not self.has(f"{matrices[0].name}.codes"):
            return super().linear(ops, matrices, inputs, bias=bias, columns=columns, activation=activation)
        sizes = {"codes": (inputs // 2, "U8"), "ranges": (2, "F32")}
        codes, ranges = (
            torch.cat([self.stored(f"{m.name}.{part}", m.out, width, types=(kind,)) for m in matrices])
            for part, (width, kind) in sizes.items()
        )
        return NibbleLinear(codes, ranges, activation == GATED)


class NibbleLinear:
    def __init__(self, codes: torch.Tensor, ranges: torch.Tensor, gated: bool) -> None:
        self._codes, self._ranges, self._gated = codes, ranges, gated
        self.weight_bytes = codes.nbytes + ranges.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        product = F.linear(x, unpacked(self._codes, self._ranges).to(x.dtype))
        if not self._gated:
            return product
        gate, up = product.chunk(2, dim=-1)
        return F.silu(gate) * up

    def add_to(self, x: torch.Tensor, total: torch.Tensor, then: Norm | None = None) -> torch.Tensor:
        total += self(x)
        return total if then is None else then(total)


def packed(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = weight.float().aminmax(dim=1, keepdim=True)
    scale = ((high - low) / 15).clamp(min=1e-8)
    codes = ((weight - low) / scale).round().to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4, torch.cat([scale, low], 1)


def unpacked(codes: torch.Tensor, ranges: torch.Tensor) -> torch.Tensor:
    numbers = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
    return numbers * ranges[:, :1] + ranges[:, 1:]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Return folders of the built-in model in 4 bits, and with the same weights as float32."""
    small, plain = tmp_path / "small", tmp_path / "plain"
    for folder in (small, plain):
        shutil.copytree(builtin_model_path(), folder)
    tensors = load_file(plain / "model.safetensors")
    stored = dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        codes, ranges = packed(stored.pop(name))
        base = name.removesuffix("weight")
        stored |= {f"{base}codes": codes, f"{base}ranges": ranges}
        tensors[name] = unpacked(codes, ranges)
    save_file(stored, small / "model.safetensors")
    save_file(tensors, plain / "model.safetensors")
    config = json.loads((small / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "nibbles", "bits": 4}
    (small / "config.json").write_text(json.dumps(config))
    return small, plain


@pytest.fixture
def nibbles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_formats", dict(formats._formats))
    formats.weight_format(Nibbles)


@pytest.mark.usefixtures("nibbles")
def test_a_registered_format_serves_the_tokens_of_its_numbers(folders: tuple[Path, Path]) -> None:
    params, found = SamplingParams(temperature=0, max_tokens=40), []
    for folder in folders:
        with LLM(str(folder), **SETTINGS) as llm:
            found.append([output.token_ids for output in llm.generate(PROMPTS, params)])
            info = llm.engine.info
            assert info.dtype == ("float32, nibble weights" if folder == folders[0] else "float32")
            sizes = info.weight_bytes, llm.engine.executor.rank_specs[0].parameters
        if folder == folders[0]:
            small = sizes
    assert found[0] == found[1]
    assert small[0] < sizes[0] / 2
    assert small[1] == sizes[1]


@pytest.mark.usefixtures("nibbles")
def test_memory_is_checked_with_the_bytes_of_the_format(folders: tuple[Path, Path]) -> None:
    planned, spec = [], LoadSpec(dtype="float32", attention="torch")
    for folder in folders:
        files = model_files(str(folder))
        planned.append(planned_model(files, read_config(files, spec), spec).weight_bytes)
        assert planned[-1] == load_model(folder, spec).weight_bytes
    assert planned[0] < planned[1] / 2


def test_an_unknown_quantization_is_refused_before_anything_is_loaded(folders: tuple[Path, Path]) -> None:
    message = r"quantized weights of this kind are not supported: quantization_config in .*config\.json has 'nibbles'"
    for load_format in ("auto", "dummy"):
        with pytest.raises(ModelError, match=message):
            check_model(str(folders[0]), load_format)
    with pytest.raises(ModelError, match=message):
        check_load(EngineConfig(model=str(folders[0]), quantization="int8"))
