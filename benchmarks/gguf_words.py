"""A vocabulary of GGUF files with one word per id. Programs of other environments import it."""

from __future__ import annotations

import gguf


def add_words(writer: gguf.GGUFWriter, count: int) -> None:
    """Add one word per id, beginning with the special tokens that llama.cpp expects."""
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"w{number}" for number in range(3, count))])
    writer.add_token_scores([-float(number) for number in range(count)])
    writer.add_token_types([*kinds, *[gguf.TokenType.NORMAL] * (count - 3)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
