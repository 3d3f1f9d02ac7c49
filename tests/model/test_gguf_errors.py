"""Damaged, cut and unsupported GGUF files are refused in one sentence, without being followed."""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from model_zoo import make_reference

from skipjoin.model.config import ModelConfig
from skipjoin.model.errors import ModelError
from skipjoin.model.folder import check_model
from skipjoin.model.generation_config import sampling_defaults
from skipjoin.model.gguf.file import TENSOR_TYPES, read_gguf
from skipjoin.model.gguf.weights import widened
from skipjoin.model.tokenizer import load_tokenizer
from support.gguf_files import Kind, plain_tokens, small_llama, write_model

SEEDS = 200


def header(tensors: int = 0, metadata: int = 1, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, metadata)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"PK\3\4" + bytes(40), "is not a GGUF file"),
        (header()[:20], "is cut off in its header, at byte 20: download it again"),
        (header(version=1), "is a version 1 GGUF file; little-endian versions 2 and 3 can be read"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is a big-endian GGUF file"),
        (header(tensors=1 << 60), f"says that it has {1 << 60} tensors"),
        (header(tensors=900), "is cut off in its header"),
        (header(metadata=1 << 40), "metadata entries, and at most"),
        (header() + struct.pack("<Q", 1 << 62), "is cut off in its header"),
        (header() + text(b"a") + struct.pack("<IIQ", 9, 0, 1 << 40), f"{1 << 40} elements of 'a', and at most"),
        (header() + text(b"a") + struct.pack("<IIQ", 9, 8, 1 << 20), "is cut off in its header"),
        (header() + text(b"a") + struct.pack("<IIQ", 9, 9, 1), "has metadata 'a', an array of type 9"),
        (header() + text(b"a") + struct.pack("<I", 77) + bytes(9), "has metadata 'a' of type 77"),
        (header() + text(b"\xff") + struct.pack("<IB", 0, 1), "has text that is not UTF-8 in a metadata entry's name"),
        (header(metadata=2) + 2 * (text(b"a") + struct.pack("<IB", 0, 1)), "has metadata 'a' twice"),
        (header(1, 0) + text(b"t") + struct.pack("<I", 9) + bytes(99), "has tensor 't' of 9 dimensions"),
        (header(1, 0) + text(b"t") + struct.pack("<IQIQ", 1, 32, 40, 0), "stores tensor 't' as type 40, which cannot"),
        (header(1, 0) + text(b"t") + struct.pack("<IQIQ", 1, 31, 2, 0), "has shape (31,) for tensor 't', whose rows"),
        (
            header(1, 0) + text(b"t") + struct.pack("<IQIQ", 1, 32, 2, 3),
            "has tensor 't' at 3, which is no multiple of 32",
        ),
        (header(1, 0) + text(b"t") + struct.pack("<IQIQ", 1, 1 << 62, 0, 0), "is cut off: tensor 't' ends at byte"),
    ],
)
def test_header_is_checked_before_it_is_followed(data: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(data)
    with pytest.raises(ModelError) as caught:
        check_model(str(file))
    assert str(caught.value).startswith(f"{file} ")
    assert message in str(caught.value)


def test_models_that_are_not_supported_are_refused(tmp_path: Path) -> None:
    def refused(message: str, use: Callable[[Path], Any] = ModelConfig.from_folder, **options: Any) -> None:
        file = tmp_path / "m.gguf"
        write_model(file, options.pop("model", None) or small_llama(hidden_size=32), **options)
        with pytest.raises(ModelError) as caught:
            use(file)
        assert str(file) in str(caught.value)
        assert message in str(caught.value)

    integer, words = gguf.GGUFValueType.UINT32, plain_tokens(101)
    refused("has architecture 'gemma3n', which is not supported", architecture="gemma3n")
    refused("has no tokens", tokenizer=words | {"tokens": [], "ids": {}})
    refused("has a sliding window of 9 tokens", metadata={"llama.attention.sliding_window": (9, integer)})
    refused("values of 3 numbers and keys of 8", metadata={"llama.attention.value_length": (3, integer)})
    refused("tokenizer.ggml.eos_token_id 101, which must be one of its 101", tokenizer=words | {"ids": {"eos": 101}})
    refused(
        "has a tensor 'blk.0.attn_q_norm.weight', which LlamaForCausalLM lacks", extra={"blk.0.attn_q_norm.weight": 8}
    )
    refused("those of attn_k, attn_output, attn_v", extra={"blk.0.attn_q.bias": 32})
    refused("num_hidden_layers in config.json must be", metadata={"llama.block_count": (1 << 30, integer)})
    refused("of kind 't5' (tokenizer.ggml.model)", load_tokenizer, tokenizer=words | {"model": "t5"})
    refused("no token for tokenizer.ggml.cls_token_id", load_tokenizer, tokenizer=words | {"model": "bert"})
    refused("by the scheme 'x' (tokenizer.ggml.pre)", load_tokenizer, tokenizer=words | {"pre": "x"})
    refused("a tokenizer that cannot be built", load_tokenizer, tokenizer=words | {"merges": ["q z"]})
    changing = words | {"model": "llama", "scores": [0.0] * 101, "flags": {"remove_extra_whitespaces": True}}
    refused("that changes texts first (tokenizer.ggml.remove_extra", load_tokenizer, tokenizer=changing)
    refused("for each of its 101 tokens", load_tokenizer, tokenizer=words | {"types": [1]})


# Of the architecture "llama" with 4 heads of 8 numbers: a number that is not supported, and one that changes nothing.
NUMBERS = {
    "attention.causal": (False, True),
    "attention.clamp_kqv": (8.0, 0.0),
    "attention.key_length_swa": (16, 8),
    "attention.max_alibi_bias": (8.0, 0.0),
    "attention.scale": (0.25, 8**-0.5),
    "attention.sliding_window": (9, 128),
    "attention.temperature_scale": (0.1, 0.0),
    "embedding_scale": (12.0, 1.0),
    "expert_gating_func": (2, 1),
    "expert_group_count": (4, 1),
    "expert_weights_norm": (False, True),
    "expert_weights_scale": (2.5, 1.0),
    "final_logit_softcapping": (30.0, 0.0),
    "logit_scale": (0.0625, 1.0),
    "residual_scale": (0.22, 1.0),
    "rope.dimension_count_swa": (4, 8),
    "rope.freq_base_swa": (1e6, 1e4),
    "rope.scaling.alpha": (1000.0, 0.0),
    "rope.scaling.yarn_log_multiplier": (0.1, 0.0),
    "swiglu_clamp_exp": ([7.0], [0.0]),
}


@pytest.mark.parametrize("key", NUMBERS)
def test_numbers_that_change_what_is_computed_are_not_ignored(key: str, tmp_path: Path) -> None:
    kinds, model = {bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32}, small_llama(hidden_size=32)
    file = tmp_path / "m.gguf"
    for value, is_refused in zip(NUMBERS[key], (True, False), strict=True):
        if isinstance(value, list):
            kind = gguf.GGUFValueType.ARRAY
        else:
            kind = kinds.get(type(value), gguf.GGUFValueType.FLOAT32)
        write_model(file, model, metadata={f"llama.{key}": (value, kind)})
        if is_refused:
            with pytest.raises(ModelError, match="the folder or hub id of the model that it was made from"):
                ModelConfig.from_folder(file)
        else:
            ModelConfig.from_folder(file)


def test_files_of_adapters_and_factors_of_two_kinds_are_refused(tmp_path: Path) -> None:
    file, number = tmp_path / "m.gguf", gguf.GGUFValueType.FLOAT32
    write_model(file, small_llama(hidden_size=32), metadata={"general.type": ("adapter", gguf.GGUFValueType.STRING)})
    with pytest.raises(ModelError, match="'adapter', and is no model of its own"):
        ModelConfig.from_folder(file)
    metadata = {"llama.rope.scaling.factor": (4.0, number)}
    write_model(file, small_llama(hidden_size=32), metadata=metadata, extra={"rope_freqs.weight": 4})
    with pytest.raises(ModelError, match=r"scaling.factor 4 besides a tensor 'rope_freqs.weight'"):
        ModelConfig.from_folder(file)


def test_mutated_and_cut_files_are_read_or_refused_quickly(tmp_path: Path) -> None:
    models = {"llama-llama3": Kind.Q8_0, "gpt-neox": Kind.Q4_1}
    for name, kind in models.items():
        write_model(tmp_path / f"{name}.gguf", make_reference(name), kind)
    pieces = [*("<unk>", "<s>", "</s>"), *map(chr, range(0x61, 0x7A)), "ab", "abc"]
    spm = {"model": "llama", "tokens": pieces, "types": [2, 3, 3, *[1] * (len(pieces) - 3)]}
    spm |= {"scores": [-float(index) for index in range(len(pieces))], "ids": {"bos": 1, "eos": 2, "unknown": 0}}
    write_model(tmp_path / "spm.gguf", small_llama(vocab_size=len(pieces), hidden_size=32), tokenizer=spm)
    sources = [file.read_bytes() for file in sorted(tmp_path.glob("*.gguf"))]
    target, refusals = tmp_path / "m.gguf", []
    started = time.perf_counter()
    for seed in range(SEEDS):
        target.write_bytes(_damaged(random.Random(seed), random.Random(seed).choice(sources)))
        try:
            ModelConfig.from_folder(target)
            load_tokenizer(target).encode("abc  12 é")
            sampling_defaults(target)
            for tensor in read_gguf(target).tensors.values():
                rows = tensor.nbytes // tensor.row_bytes
                widened(tensor, np.arange(min(rows, 3)), None, torch.float32)
        except ModelError as error:
            refusals.append(str(error))
    assert len(refusals) > SEEDS / 4
    assert all(str(target) in refusal for refusal in refusals)
    assert time.perf_counter() - started < 60


def _damaged(draw: random.Random, data: bytes) -> bytes:
    """Return a file with some bytes changed, most of them in the header, or without its end."""
    if draw.random() < 0.2:
        return data[: draw.randrange(len(data))]
    changed = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 8, 64])):
        at = draw.randrange(min(len(data), draw.choice([64, 600, 8000, 1 << 30])))
        # Sizes and counts have 8 bytes: bits of the highest make the most of them.
        changed[at] = draw.choice([0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)])
    return bytes(changed)


def test_types_are_those_of_the_format() -> None:
    for number, kind in TENSOR_TYPES.items():
        assert gguf.GGMLQuantizationType(number).name == kind.name
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] == (kind.elements, kind.size)
