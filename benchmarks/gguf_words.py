"""A vocabulary of GGUF files with one word per id. Programs of other environments import it."""

from __future__ import annotations

import gguf


def add_words(writer: gguf.GGUFWriter, count: int) -> None:
    """Add one word per id as a byte-pair vocabulary, the kind that OpenVINO reads, with the fewest merges: one."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(["<unk>", "<s>", "</s>", "w", "3", "w3", *(f"w{number}" for number in range(6, count))])
    writer.add_token_merges(["w 3"])
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    writer.add_token_types([*kinds, *[gguf.TokenType.NORMAL] * (count - 3)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
