"""A Llama of 97.5M parameters with random weights, to measure with: large enough that the model, not Python, takes the
time, and small enough for a CPU.

    python benchmarks/random_model.py FOLDER [--dtype bfloat16|float32]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB = 8192


def make_model(
    folder: Path, dtype: torch.dtype, *, layers: int = 12, hidden: int = 768, intermediate: int = 2048
) -> None:
    """Write the model, and a tokenizer of one word per id, into a folder. Heads are 64 wide."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        intermediate_size=intermediate,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.WordPiece(prefix="", cleanup=False)
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    args = parser.parse_args()
    make_model(args.folder, getattr(torch, args.dtype))


if __name__ == "__main__":
    main()
