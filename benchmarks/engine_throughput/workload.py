"""The model and the two sets of requests that every engine gets."""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB = 8192
BATCH = 16


@dataclass(frozen=True)
class Job:
    """One request: its prompt, and how many tokens it generates whatever they are."""

    prompt: list[int]
    output: int


def even() -> list[Job]:
    """16 requests of 64 tokens in and 64 out."""
    draw = random.Random(0)
    return [Job(_prompt(draw, 64), 64) for _ in range(BATCH)]


def ragged() -> list[Job]:
    """32 requests, prompts of 8 to 512 and outputs of 8 to 256 tokens."""
    draw = random.Random(1)
    return [Job(_prompt(draw, draw.randint(8, 512)), draw.randint(8, 256)) for _ in range(2 * BATCH)]


def _prompt(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(3, VOCAB) for _ in range(length)]


def make_model(dtype: torch.dtype) -> Path:
    """A folder with a random-weight Llama of 97.5M parameters and a tokenizer of one word per id."""
    folder = Path(tempfile.mkdtemp(prefix="skipjoin-bench-"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
        intermediate_size=2048,
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
    return folder
