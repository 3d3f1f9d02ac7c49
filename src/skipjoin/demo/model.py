from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

# Large enough that the model and not Python decides the speed, small enough for a CPU.
CONTEXT = 1024
_VOCABULARY = 8192
_HIDDEN, _HEADS = 768, 12
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": _VOCABULARY,
    "hidden_size": _HIDDEN,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
NAME = "random-97m"


def write_model(folder: Path) -> Path:
    """Write the configuration and a tokenizer with one word per id, but no weights, and return their folder."""
    target = folder / NAME
    target.mkdir()
    (target / "config.json").write_text(json.dumps(_CONFIG), encoding="utf-8")
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(_VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.WordPiece(prefix="", cleanup=False)
    words.save(str(target / "tokenizer.json"))
    return target
