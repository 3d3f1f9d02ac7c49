"""The two sets of requests that every engine gets."""

from __future__ import annotations

import random
from dataclasses import dataclass

from random_model import VOCAB

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
