"""A random-weight Llama of 97.5M parameters: large enough that the model and not Python decides the speed, and small
enough for a CPU.

    python benchmarks/random_model.py FOLDER [--dtype bfloat16|float32]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from harness import scratch

VOCAB = 8192


def make_model(
    folder: Path, dtype: torch.dtype, *, layers: int = 12, hidden: int = 768, intermediate: int = 2048
) -> None:
    """Write the model, with heads of 64 elements, and a tokenizer of one word per id into a folder."""
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


@contextmanager
def scratch_model(dtype: torch.dtype, **shape: int) -> Iterator[Path]:
    """Yield a temporary folder with the model."""
    with scratch() as folder:
        make_model(folder / "model", dtype, **shape)
        yield folder / "model"


def prompt_of(number: int, length: int) -> list[int]:
    """Return the token ids of a prompt that differs from those of other numbers from its first token on."""
    return [3 + (number * 7919 + place * 104729) % (VOCAB - 3) for place in range(length)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    args = parser.parse_args()
    make_model(args.folder, getattr(torch, args.dtype))


if __name__ == "__main__":
    main()
