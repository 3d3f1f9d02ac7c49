"""Encoders in GGUF files: tokens and vectors equal to those of the checkpoint that a file was made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from pooled_models import VOCAB, write
from safetensors.torch import load_file
from tokenizers import models, normalizers, pre_tokenizers, processors

from skipjoin import LLM
from skipjoin.model.errors import ModelError
from skipjoin.model.folder import model_files
from skipjoin.model.gguf.architectures import ARCHITECTURES
from skipjoin.model.load_spec import LoadSpec
from skipjoin.model.loader import read_config
from skipjoin.model.tokenizer import load_tokenizer
from support.gguf_files import Kind, small_llama, write_model

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [*"abcdefghijklmnopqrstuvwxyz.,?!-", "the", "river", "bank", "unused"]
PARTS = [*"abcdefghijklmnopqrstuvwxyz", "ing", "s", "er"]
TEXTS = ["The river bank?", "rivers, BANKING...", "naïve", "unknown \u4e2d \U0001f600 x", "", "[MASK] the [unused1]"]
SETTINGS: dict[str, Any] = {"progress": False, "threads": 1, "profile": "off", "dtype": "float32"}


def vocabulary(words: list[str]) -> list[str]:
    found = [*SPECIAL, "[unused1]", *words, *(f"##{part}" for part in PARTS)]
    return [*found, *(f"[unused{number}]" for number in range(2, VOCAB - len(found) + 2))]


def source(tokens: list[str], *, lowercase: bool) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordPiece({text: i for i, text in enumerate(tokens)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    backend.add_special_tokens(SPECIAL)
    return backend


def write_file(
    folder: Path, path: Path, name: str, tokens: list[str], *, pooling: int = 1, kind: Kind = Kind.F32
) -> None:
    """Write the model of a folder as llama.cpp's converter does."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType(pooling))
    if name == "nomic-bert":
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_tokenizer_model("bert")
    writer.add_token_list(
        [text[2:] if text.startswith("##") else text if text[0] == "[" else f"\u2581{text}" for text in tokens]
    )
    writer.add_token_types([2 if text == "[UNK]" else 3 if text in SPECIAL else 1 for text in tokens])
    for key, text in (("cls", "[CLS]"), ("seperator", "[SEP]"), ("unknown", "[UNK]"), ("padding", "[PAD]")):
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", tokens.index(text))
    of = ARCHITECTURES[name]
    family = of.prefix.partition(".")[0]
    for label, tensor in load_file(folder / "model.safetensors").items():
        if "pooler" not in label:
            (stored,) = of.stored_names(label if label.startswith(family) else f"{family}.{label}")
            is_product = tensor.dim() == 2 and stored.startswith("blk.")
            found = gguf.quantize(tensor.numpy(), kind if is_product else Kind.F32)
            writer.add_tensor(stored, found, raw_dtype=kind if is_product else Kind.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("name", "of", "kind", "error"),
    [
        ("bert", "bert", Kind.F32, 1e-5),
        ("nomic-bert", "nomic", Kind.F32, 1e-5),
        ("nomic-bert", "nomic", Kind.Q8_0, 0.01),
    ],
)
def test_vectors_and_tokens_of_an_encoder_are_those_of_its_checkpoint(
    name: str, of: str, kind: Kind, error: float, tmp_path: Path
) -> None:
    model, tokens = write(of, tmp_path / "folder"), vocabulary(WORDS)
    write_file(tmp_path / "folder", tmp_path / "model.gguf", name, tokens, kind=kind)
    backend = source(tokens, lowercase=True)
    with LLM(str(tmp_path / "model.gguf"), **SETTINGS) as llm:
        for text in TEXTS:
            assert llm.tokenizer.encode(text) == backend.encode(text).ids, text
        ids, types = llm.tokenizer.encode_pair("the river", "bank", 99)
        assert (ids, types) == ([2, *backend.encode("the river").ids[1:-1], 3, *backend.encode("bank").ids[1:]], 4)
        vectors = llm.embed(TEXTS[:3])
    for text, vector in zip(TEXTS, vectors, strict=False):
        with torch.no_grad():
            states = model(torch.tensor([backend.encode(text).ids])).last_hidden_state[0].mean(0)
        np.testing.assert_allclose(vector, states / states.norm(), atol=error)


def test_words_with_capital_letters_say_that_a_model_is_cased(tmp_path: Path) -> None:
    write("bert", tmp_path / "folder")
    tokens = vocabulary([*WORDS, "The"])
    write_file(tmp_path / "folder", tmp_path / "model.gguf", "bert", tokens, pooling=2)
    backend, found = source(tokens, lowercase=False), load_tokenizer(tmp_path / "model.gguf")
    for text in TEXTS:
        assert found.encode(text) == backend.encode(text).ids, text


def test_pooling_by_a_classifier_is_refused(tmp_path: Path) -> None:
    write("bert", tmp_path / "folder")
    write_file(tmp_path / "folder", tmp_path / "model.gguf", "bert", vocabulary(WORDS), pooling=4)
    with pytest.raises(ModelError, match=r"bert\.pooling_type 4, and those of mean, cls, last \(1 to 3\)"):
        LLM(str(tmp_path / "model.gguf"), **SETTINGS)


def test_a_decoder_with_a_pooling_embeds(tmp_path: Path) -> None:
    for number, how in ((0, None), (3, "last")):
        path = tmp_path / f"{number}.gguf"
        write_model(path, small_llama(), metadata={"llama.pooling_type": (number, gguf.GGUFValueType.UINT32)})
        pooling = read_config(model_files(str(path), "auto"), LoadSpec()).pooling
        assert (None if pooling is None else pooling.how) == how
