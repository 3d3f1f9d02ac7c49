"""Writes tiny model folders: a byte-level tokenizer with a chat template, and a Llama with random weights."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
EOS = 256
SPECIAL = ["<eos>", "<|system|>", "<|user|>", "<|assistant|>"]
VOCAB = 256 + len(SPECIAL)
CONTEXT = 512


def write_tokenizer(folder: Path) -> Path:
    """Write a tokenizer with one token per byte, in the order of the byte-level alphabet, and a few special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "chat_template": TEMPLATE}))
    return folder


def write_model(folder: Path) -> Path:
    """Write the tokenizer and a two-layer Llama."""
    import torch  # noqa: PLC0415 - most tests of this folder run without it
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    write_tokenizer(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        eos_token_id=EOS,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
