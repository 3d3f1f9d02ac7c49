"""The generated pages about models, from records of tests and from the tables of GGUF."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from markdown_tables import codes, table
from skipjoin.model.families.encoder import Encoder
from skipjoin.model.family import _families, _register_own
from skipjoin.model.gguf.architectures import ARCHITECTURES, VARIANTS
from skipjoin.model.gguf.file import TENSOR_TYPES, TensorType
from skipjoin.model.gguf.groups import LAYOUTS
from skipjoin.model.gguf.tokenizer import SCHEMES

_ORDER = ("native", "through transformers", "refused", "not tried")
_RECORDS = Path(__file__).parents[1] / "tests" / "model"
ARCHITECTURES_RUN, MODEL_FORMATS = _RECORDS / "architectures.json", _RECORDS / "model_formats.json"
COMPOSITES = _RECORDS / "composites.json"


def models() -> Iterator[str]:
    yield from (
        "# Models",
        "",
        "Which family runs from which format of weights on a CPU, as `tests/model/test_model_formats.py` ran it:",
        "*native* weights keep their bits, *widened* ones take those of `--dtype`, by default `bfloat16`, and",
        "others are *refused* with a sentence that has a remedy. [GGUF files](gguf.md) has all types of those.",
        "",
    )
    record = json.loads(MODEL_FORMATS.read_text(encoding="utf-8"))
    rows = [[family, *map(_outcome, formats.values())] for family, formats in record.items()]
    yield from table(["family", *next(iter(record.values()))], rows)
    yield (
        "An NVIDIA GPU runs what torch's operations run. `quantization int8` needs the compiled operations of a CPU. "
        "`skipjoin convert` makes safetensors of `.bin` files. GGUF files of Mistral and Mixtral have the architecture "
        "`llama`, and those of OLMo 3 `olmo2`. Of models that also see or hear, such as Gemma 3 and "
        "4, LLaVA, Llama 4 and Qwen-VL, the language model is served. Of other families, GGUF files are refused."
    )
    yield from _architectures()
    yield from _encoders()


def _encoders() -> Iterator[str]:
    _register_own()
    names = [name for one in _families.values() if issubclass(one.decoder, Encoder) for name in one.architectures]
    yield from (
        "",
        "## Encoders",
        "",
        "Models of [embeddings and scores](../api.md#embeddings-and-scores), which `tests/engine/test_embeddings.py`",
        f"compares with transformers: {codes(names)}.",
        "Decoders with files of sentence-transformers embed, too; EmbeddingGemma as an encoder.",
    )


def _architectures() -> Iterator[str]:
    record = json.loads(ARCHITECTURES_RUN.read_text(encoding="utf-8"))
    names: dict[str, list[str]] = {}
    for name, (outcome, why) in record["architectures"].items():
        names.setdefault(f"{outcome}: {why}" if why else outcome, []).append(name)
    yield from (
        "",
        "## Architectures",
        "",
        f"The causal decoders of transformers {record['transformers']} with small random weights, as",
        "`tests/model/architectures.py` ran them on a CPU, and compared logits of chunked prompts with those of",
        "transformers. Rows of all that run had the same bits in each batch and chunking, with `dtype float32`,",
        "`dtype bfloat16` and `kv_cache_dtype int8`. What runs through transformers is compared again when it is",
        "loaded; see [Serve](../serve.md#through-transformers).",
        "",
    )
    order = sorted(names, key=lambda how: (how.startswith("not tried"), how.startswith("refused"), how != "native"))
    yield from table(["how", "architectures"], [[how.replace("|", " "), codes(names[how])] for how in order])
    yield from _composites()


def _composites() -> Iterator[str]:
    record = json.loads(COMPOSITES.read_text(encoding="utf-8"))
    names: dict[tuple[str, str], list[str]] = {}
    for name, (outcome, detail) in record["composites"].items():
        reason = "" if outcome == "not tried" else detail
        names.setdefault((outcome, reason), []).append(name)
    yield from (
        "",
        "## Models that also see or hear",
        "",
        "They serve texts by their language model: as above if it has an architecture of its own, or else as a part of",
        "transformers' class of the whole, whose other parts are not loaded. `tests/model/composites.py` ran those",
        "with small random weights beside transformers; it has no small configuration of those not tried.",
        "",
    )
    rows = []
    for (outcome, detail), found in sorted(names.items(), key=lambda row: (_ORDER.index(row[0][0]), row[0][1])):
        how = f"{outcome}: {detail}" if outcome == "refused" else f"{outcome}, as `{detail}`" if detail else outcome
        rows.append([how.replace("|", " "), codes(found)])
    yield from table(["how", "models"], rows)


def _outcome(by_operations: Mapping[str, str]) -> str:
    compiled, torch = by_operations["compiled"], by_operations["torch"]
    return compiled if compiled == torch else f"{compiled}; torch: {torch}"


def gguf() -> Iterator[str]:
    yield "# GGUF files"
    yield ""
    yield (
        "`skipjoin serve FILE.gguf` reads a model with its tokenizer, chat template and sampling defaults. Headers are "
        "checked against the size of the file before anything is allocated."
    )
    yield ""
    served = [(name, [of, *(VARIANTS[name][1:] if name in VARIANTS else ())]) for name, of in ARCHITECTURES.items()]
    rows = [
        [f"`{name}`", ", ".join(dict.fromkeys(of.name.removesuffix("ForCausalLM") for of in found))]
        for name, found in served
    ]
    yield from table(["`general.architecture`", "served as"], rows)
    yield (
        "Mistral's files have the architecture `llama`. Others are refused. Of gpt-oss and Phi-3, our logits are those "
        "of their own settings, and not those of llama.cpp, which rounds the ramp of YaRN and ignores the window."
    )
    yield ""
    kinds = [[kind.name, f"{8 * kind.size / kind.elements:g}", _kept(kind)] for kind in TENSOR_TYPES.values()]
    yield from table(["type", "bits per weight", "in memory"], kinds)
    yield (
        "Compiled CPU code multiplies the codes of a file; see [CPUs](../cpu.md#weights-in-codes). Codes of 5 "
        "bits take 6, and scales of K and XS types are rounded to float16. Elsewhere, and where the table says so, "
        "numbers are those of llama.cpp's package `gguf`, and the log says what was widened."
    )
    yield ""
    yield f"Tokenizers of SentencePiece (`llama`), and byte-level ones (`gpt2`) that split text by {codes(SCHEMES)}."
    yield ""
    yield "## Quantized safetensors"
    yield ""
    rows = [
        ["`awq`", "4 bits, version gemm", "codes"],
        ["`auto-round`", "those of `awq` and `gptq`", "codes"],
        ["`gptq`", "4 and 8 bits, also by matrix, zero points of both versions, act-order", "codes"],
        ["`bitsandbytes`", "nf4, fp4 and int8, also with scales in codes", "codes"],
        ["`compressed-tensors`", "pack-quantized and int-quantized, 4 and 8 bits", "codes"],
        ["`compressed-tensors`", "mxfp4-pack-quantized and nvfp4-pack-quantized", "codes"],
        ["`compressed-tensors`", "float-quantized (fp8)", "widened"],
        ["none, of MLX", "affine, 4 and 8 bits", "codes"],
        ["`modelopt`", "NVFP4", "codes"],
        ["`modelopt`", "FP8", "widened"],
        ["`fp8`", "with a scale per block or matrix", "widened"],
    ]
    yield from table(["`quant_method`", "layouts", "in compiled CPU code"], rows)
    yield "Elsewhere weights are widened to `--dtype`. Scales of inputs are ignored."


def _kept(kind: TensorType) -> str:
    if kind.elements == 1:
        return "as stored, or in `--dtype`"
    layout = LAYOUTS.get(kind.name)
    if layout is None:
        return "widened to `--dtype`, by default `bfloat16`"
    scales = 8 * layout.scale_bytes * (1 + layout.has_minimums) / layout.group
    return f"codes of {layout.bits} bits, {layout.bits + scales:g} per weight"
