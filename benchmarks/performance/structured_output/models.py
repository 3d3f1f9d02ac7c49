"""Random-weight Llamas with vocabularies of bytes and of made-up words."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EOS = "<eos>"


def make_model(folder: Path, vocab: int, dtype: torch.dtype, *, layers: int, hidden: int) -> None:
    """Write a model and a byte-level tokenizer of `vocab` tokens; prompts are encoded byte by byte."""
    words = vocabulary(vocab - 1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        intermediate_size=hidden * 8 // 3,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=len(words),
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    backend = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([EOS])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS).save_pretrained(folder)


def vocabulary(size: int) -> list[str]:
    """Return all bytes, and then distinct words, half of them after a space, with lengths as in real vocabularies."""
    draw = random.Random(0)
    found = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    while len(found) < size:
        word = "".join(draw.choices("etaoinshrdlucmfwypvbgkjqxz", k=min(14, 2 + int(draw.expovariate(0.25)))))
        found[("Ġ" if draw.random() < 0.5 else "") + word] = None
    return list(found)
