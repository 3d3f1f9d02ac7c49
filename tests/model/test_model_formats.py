"""Which family runs from which format of weights, by which operations; docs/reference/models.md is made of the record.

PYTHONPATH=tests:tests/model python tests/model/test_model_formats.py    # writes the record; then: make reference
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from model_zoo import PagedRunner, make_reference
from safetensors import safe_open
from test_gguf import reference_of

from skipjoin.model.errors import ModelError
from skipjoin.model.folder import model_files
from skipjoin.model.gguf.file import is_gguf, read_gguf
from skipjoin.model.load_spec import LoadSpec
from skipjoin.model.loader import load_model
from support.gguf_files import Kind, write_model
from support.worlds import exhaustive

RECORD = Path(__file__).with_name("model_formats.json")
FAMILIES = [
    *("llama", "mistral", "ministral", "ministral3", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "smollm3"),
    *("olmo2", "olmo3", "granite", "glm", "glm4", "exaone4", "cohere", "cohere2", "gpt-neox", "starcoder2", "opt"),
    *("gemma4", "seed-oss", "ernie4.5", "helium", "cwm"),
    *("qwen2-moe", "qwen3-moe", "mixtral", "olmoe", "granite-moe", "granite-moe-shared"),
    *("glm4-moe", "dots1", "ernie4.5-moe", "minimax-m2"),
    *("solar-open", "exaone-moe", "deepseek-v2", "deepseek-v3", "glm4-moe-lite", "youtu"),
    *("gpt-oss", "lfm2", "lfm2-moe", "qwen3-next", "qwen3.5", "granite-hybrid"),
]
HYBRID = {"lfm2", "lfm2-moe", "qwen3-next", "qwen3.5", "granite-hybrid"}
# llama.cpp has no such architecture, so no file can be made, or it is not read.
NOT_IN_GGUF = {"opt", "ministral", "helium", "cwm", "solar-open"}
NOT_IN_GGUF |= {"deepseek-v2", "deepseek-v3", "glm4-moe-lite", "youtu"}
# Those that are made of the same parts as others, or of which test_recurrent.py runs most.
ALIKE = {"ministral", "ministral3", "gemma", "gemma2", "smollm3", "olmo2", "olmo3", "granite", "glm", "glm4", "exaone4"}
ALIKE |= {"seed-oss", "ernie4.5", "helium", "cwm", "qwen2-moe", "dots1", "ernie4.5-moe", "minimax-m2"}
ALIKE |= {"solar-open", "exaone-moe", "deepseek-v2", "glm4-moe-lite", "youtu"}
ALIKE |= {
    "cohere",
    "cohere2",
    "olmoe",
    "granite-moe",
    "granite-moe-shared",
    "mistral",
    "qwen2",
    "phi3",
    "mixtral",
    "qwen3",
    "qwen3-moe",
    "gemma3",
    "starcoder2",
} | HYBRID
OPERATIONS = {"compiled": "auto", "torch": "torch"}
NATIVE, WIDENED, REFUSED = "native", "widened", "refused"
# Memory of weights over that in the file, from which they count as widened.
WIDER = 1.2


def safetensors(dtype: torch.dtype) -> Callable[[str, Path], Path]:
    def write(name: str, folder: Path) -> Path:
        make_reference(name).to(dtype).save_pretrained(folder)
        return folder

    return write


def gguf(kind: Kind) -> Callable[[str, Path], Path]:
    def write(name: str, folder: Path) -> Path:
        write_model(folder / "m.gguf", reference_of(name), kind)
        return folder / "m.gguf"

    return write


def quantized(name: str, folder: Path) -> Path:
    safetensors(torch.float32)(name, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    return folder


def pickled(name: str, folder: Path) -> Path:
    safetensors(torch.float32)(name, folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    return folder


FORMATS: dict[str, tuple[Callable[[str, Path], Path], LoadSpec]] = {
    "safetensors float32": (safetensors(torch.float32), LoadSpec()),
    "safetensors bfloat16": (safetensors(torch.bfloat16), LoadSpec()),
    "safetensors float16": (safetensors(torch.float16), LoadSpec()),
    "safetensors with quantization int8": (safetensors(torch.bfloat16), LoadSpec(quantization="int8")),
    "safetensors with quantization_config": (quantized, LoadSpec()),
    "GGUF F32": (gguf(Kind.F32), LoadSpec()),
    "GGUF F16": (gguf(Kind.F16), LoadSpec()),
    "GGUF BF16": (gguf(Kind.BF16), LoadSpec()),
    "GGUF Q8_0": (gguf(Kind.Q8_0), LoadSpec()),
    "GGUF Q4_0": (gguf(Kind.Q4_0), LoadSpec()),
    ".bin": (pickled, LoadSpec()),
}


def stored_bytes(path: Path) -> int:
    if is_gguf(path):
        return sum(tensor.nbytes for tensor in read_gguf(path).tensors.values())
    with safe_open(path / "model.safetensors", "pt") as file:
        return sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118 - not a mapping


def outcome(path: Path, spec: LoadSpec) -> str:
    try:
        model = load_model(model_files(str(path)).folder, spec)
    except ModelError:
        return REFUSED
    for logits in PagedRunner(model, [[5, 6, 7], [8]], 4, 0).run():
        assert logits.isfinite().all()
    return WIDENED if model.weight_bytes > WIDER * stored_bytes(path) else NATIVE


def outcomes(family: str) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for name, (write, spec) in FORMATS.items():
        if family in NOT_IN_GGUF and name.startswith("GGUF"):
            found[name] = dict.fromkeys(OPERATIONS, REFUSED)
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = write(family, Path(folder))
            found[name] = {
                operations: outcome(path, LoadSpec(attention=attention, quantization=spec.quantization))
                for operations, attention in OPERATIONS.items()
            }
    return found


@pytest.mark.parametrize("family", [exhaustive(family) if family in ALIKE else family for family in FAMILIES])
def test_formats_of_a_family_are_those_of_the_record(family: str) -> None:
    assert outcomes(family) == json.loads(RECORD.read_text(encoding="utf-8"))[family]


if __name__ == "__main__":
    RECORD.write_text(json.dumps({family: outcomes(family) for family in FAMILIES}, indent=1) + "\n")
