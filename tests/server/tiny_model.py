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
WIDTH = 32
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "eos_token_id": EOS,
    "bos_token_id": None,
    "tie_word_embeddings": True,
}


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
    """Write the tokenizer and a two-layer Llama, without transformers, whose import takes two seconds."""
    import torch  # noqa: PLC0415 - most tests of this folder run without it
    from safetensors.torch import save_file  # noqa: PLC0415

    write_tokenizer(folder)
    draw = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw) * 0.02

    tensors = {"model.embed_tokens.weight": weight(VOCAB, WIDTH), "model.norm.weight": torch.ones(WIDTH)}
    for layer in range(CONFIG["num_hidden_layers"]):
        parts = {
            **{f"{name}_layernorm": torch.ones(WIDTH) for name in ("input", "post_attention")},
            **{f"self_attn.{name}_proj": weight(WIDTH, WIDTH) for name in "qo"},
            **{f"self_attn.{name}_proj": weight(WIDTH // 2, WIDTH) for name in "kv"},
            **{f"mlp.{name}_proj": weight(2 * WIDTH, WIDTH) for name in ("gate", "up")},
            "mlp.down_proj": weight(WIDTH, 2 * WIDTH),
        }
        tensors |= {f"model.layers.{layer}.{name}.weight": part for name, part in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return folder
