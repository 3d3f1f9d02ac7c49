"""Models with random weights. `small` is a Llama of 97.5M parameters: large enough that the model and not Python
decides the speed, and small enough for the last-level cache of a server. Others have the shape of models that people
run.

    python benchmarks/random_model.py FOLDER [--shape small|qwen3-0.6b|...] [--dtype bfloat16|float32] [--experts|--awq]
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from harness import scratch

VOCAB = 8192
# Inputs with one scale, and the largest scale, for which weights are about as large as transformers draws them.
AWQ_GROUP, AWQ_SCALE = 128, 0.008
EOS = "<eos>"


Config = dict[str, Any]


def _config(model_type: str, vocab: int, hidden: int, inner: int, layers: int, **more: Any) -> Config:
    return {
        "model_type": model_type,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "max_position_embeddings": 8192,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **more,
    }


_QWEN3 = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
_LLAMA_1B = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True}
_SMOLLM2 = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "tie_word_embeddings": True}
# As Gemma 4 E2B, with fewer layers and words.
_GEMMA4 = {
    **{"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512},
    **{"layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 2, "num_kv_shared_layers": 5},
    **{"use_double_wide_mlp": True, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 32_768},
}
# The attention of DeepSeek-V2-Lite.
_LATENT = {
    **{"num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
}
SHAPES: dict[str, Config] = {
    "small": _config("llama", VOCAB, 768, 2048, 12, num_attention_heads=12, max_position_embeddings=1024),
    "smollm2": _config("llama", 49_152, 576, 1536, 30, **_SMOLLM2),
    "qwen3-0.6b": _config("qwen3", 151_936, 1024, 3072, 28, **_QWEN3),
    "llama-1b": _config("llama", 128_256, 2048, 8192, 16, **_LLAMA_1B),
    "gemma4": _config("gemma4_text", 32_768, 1536, 6144, 10, **_GEMMA4),
    "latent": _config("youtu", 32_768, 1024, 2816, 8, **_LATENT),
    "qwen3-1.7b": _config("qwen3", 151_936, 2048, 6144, 28, **_QWEN3),
}


def add_shape(parser: argparse.ArgumentParser, default: str = "small") -> None:
    parser.add_argument("--shape", choices=SHAPES, default=default, help="of the model (random_model.py)")


def make_model(folder: Path, dtype: torch.dtype, shape: str = "small", **changes: int) -> None:
    """Write a model of this shape, with `changes` of its configuration, and a tokenizer of one word per id."""
    config = SHAPES[shape] | changes
    _write_weights(folder, dtype, config)
    write_words(folder, config["vocab_size"])


def make_awq_model(folder: Path, dtype: torch.dtype, shape: str) -> None:
    """Write a model of this shape whose layers have weights of 4 bits, as AWQ writes them, with random codes."""
    from safetensors.torch import load_file, save_file  # noqa: PLC0415

    make_model(folder, dtype, shape)
    draw = torch.Generator().manual_seed(0)
    written: dict[str, torch.Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            written[name] = weight
            continue
        (outputs, inputs), base = weight.shape, name.removesuffix("weight")
        words, groups = outputs // 8, inputs // AWQ_GROUP  # a word of 32 bits has eight codes
        written[f"{base}qweight"] = torch.randint(-(2**31), 2**31, (inputs, words), generator=draw, dtype=torch.int32)
        written[f"{base}qzeros"] = torch.full((groups, words), -0x77777778, dtype=torch.int32)  # eight times 8
        written[f"{base}scales"] = torch.rand(groups, outputs, generator=draw).half() * AWQ_SCALE
    save_file(written, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    method = {"quant_method": "awq", "bits": 4, "group_size": AWQ_GROUP, "zero_point": True, "version": "gemm"}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": method}))


def make_expert_model(folder: Path, dtype: torch.dtype) -> None:
    """Write a Qwen3-MoE of 642M parameters, of which a token uses 114M: 8 of 64 experts in each of 8 layers."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: PLC0415 - takes two seconds

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=1024,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=4096,
        moe_intermediate_size=384,
        num_experts=64,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    Qwen3MoeForCausalLM(config).to(dtype).save_pretrained(folder)
    write_words(folder)


def write_words(folder: Path, vocab: int = VOCAB) -> None:
    """Write a tokenizer of one word per id."""
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(vocab)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.WordPiece(cleanup=False)  # words with spaces between
    _write_tokenizer(folder, words)


def make_byte_model(folder: Path, dtype: torch.dtype, *, vocab: int, layers: int, hidden: int) -> None:
    """Write a model with tied embeddings, and a tokenizer of bytes and made-up words that encodes prompts as bytes."""
    words = byte_vocabulary(vocab - 1)
    config = _config("llama", vocab, hidden, hidden * 8 // 3, layers, num_attention_heads=hidden // 64)
    ids = {"bos_token_id": None, "eos_token_id": len(words)}
    _write_weights(folder, dtype, config | ids | {"tie_word_embeddings": True, "max_position_embeddings": 4096})
    backend = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([EOS])
    _write_tokenizer(folder, backend, eos_token=EOS)


def byte_vocabulary(size: int) -> list[str]:
    """Return all bytes, and then distinct words, half of them after a space, with lengths as in real vocabularies."""
    draw = random.Random(0)
    found = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    while len(found) < size:
        word = "".join(draw.choices("etaoinshrdlucmfwypvbgkjqxz", k=min(14, 2 + int(draw.expovariate(0.25)))))
        found[("Ġ" if draw.random() < 0.5 else "") + word] = None
    return list(found)


def _write_tokenizer(folder: Path, backend: Tokenizer, **special: str) -> None:
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - takes two seconds

    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(folder)


def _write_weights(folder: Path, dtype: torch.dtype, config: Config) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 - takes two seconds

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype).save_pretrained(folder)


@contextmanager
def scratch_model(dtype: torch.dtype, shape: str = "small", *, awq: bool = False, **changes: int) -> Iterator[Path]:
    with scratch() as folder:
        if awq:
            make_awq_model(folder / "model", dtype, shape)
        else:
            make_model(folder / "model", dtype, shape, **changes)
        yield folder / "model"


def prompt_of(number: int, length: int) -> list[int]:
    """Return the token ids of a prompt that differs from those of other numbers from its first token on."""
    return [3 + (number * 7919 + place * 104729) % (VOCAB - 3) for place in range(length)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--experts", action="store_true", help="a Qwen3-MoE instead")
    kind.add_argument("--awq", action="store_true", help="layers in AWQ's 4 bits")
    add_shape(parser)
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    if args.experts:
        make_expert_model(args.folder, dtype)
    elif args.awq:
        make_awq_model(args.folder, dtype, args.shape)
    else:
        make_model(args.folder, dtype, args.shape)


if __name__ == "__main__":
    main()
