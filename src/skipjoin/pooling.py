from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import mul


class Task(StrEnum):
    GENERATE = "generate"
    EMBED = "embed"
    SCORE = "score"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """What a request of a vector asks for.

    Attributes:
        dimensions: Number of leading values, of which the vector is normalized; None for all.
        second: Position of the first token of a pair's second text, for encoders that distinguish the two.
    """

    dimensions: int | None = None
    second: int | None = None


_DOES = {
    Task.GENERATE: ("generates text", "ask /v1/chat/completions or call LLM.generate, or serve it with --task embed"),
    Task.EMBED: ("embeds texts", "ask /v1/embeddings, /v1/rerank or /score, or call LLM.embed"),
    Task.SCORE: ("scores pairs of texts", "ask /v1/rerank or /score, or call LLM.score"),
}


def wrong_task(model: str, task: Task) -> str:
    does, remedy = _DOES[task]
    return f"model {model} {does}, and does nothing else here: {remedy}"


def values_of(vector: bytes) -> array[float]:
    values = array("f", vector)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def cosine(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the cosine of the angle between two vectors; 0 if one has no length."""
    lengths = math.hypot(*first) * math.hypot(*second)
    return float(sum(map(mul, first, second))) / lengths if lengths else 0.0
