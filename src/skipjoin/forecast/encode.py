"""From the tokens of a prompt to vectors: what forecasts are made from. No text and no token is kept, hashes only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol
from zlib import crc32

import numpy as np

from skipjoin.forecast.mass import Array

# Tokens of a prompt that are looked at: half from its start, half from its end, where instructions stand.
SEEN = 1024
# Hashed features are numbered below 2 ** HASH_BITS; the lengths of prompts follow, and a constant.
HASH_BITS = 15
_LENGTHS = 32
FEATURES = (1 << HASH_BITS) + _LENGTHS + 1
# Width of the hashed vector that similar prompts are found by.
WIDTH = 256
_WORD = re.compile(r"\w+|[^\w\s]")
# Odd constants of splitmix64, a hash that mixes every bit; the same in every process, unlike Python's.
_MIX_1, _MIX_2, _GOLDEN = (np.uint64(n) for n in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15))


def words(text: str) -> list[int]:
    """Stable hashes of a text's lower-cased words and punctuation marks: tokens where there is no tokenizer."""
    return [crc32(word.encode()) for word in _WORD.findall(text.lower())]


class Hashed(NamedTuple):
    """A prompt as sparse features: `ids` (int32) below `FEATURES`, `weights` (float32). hashes: the number of those
    that stand for tokens, at the start."""

    ids: Array
    weights: Array
    hashes: int


def hashed(prompt: Sequence[int]) -> Hashed:
    """The hashed tokens and pairs of a prompt, those at its start and at its end apart, and its length.

    Weights grow with the logarithm of the count; those of the hashes have length 1 together.
    """
    ids, counts = np.unique(_hashes(_seen(prompt)) >> np.uint64(64 - HASH_BITS), return_counts=True)
    weights = 1.0 + np.log(counts)
    weights /= max(1.0, float(np.linalg.norm(weights)))
    extra_ids, extra_weights = _length_features(len(prompt))
    return Hashed(
        np.concatenate([ids.astype(np.int32), extra_ids]),
        np.concatenate([weights, extra_weights]).astype(np.float32),
        len(ids),
    )


def _seen(prompt: Sequence[int]) -> Array:
    if len(prompt) > SEEN:
        prompt = [*prompt[: SEEN // 2], *prompt[-SEEN // 2 :]]
    return np.asarray(prompt, dtype=np.int64).astype(np.uint64)


def _hashes(tokens: Array) -> Array:
    single = _mixed(tokens + np.uint64(1))
    pairs = _mixed(single[:-1] * _GOLDEN + single[1:])
    first = _mixed(single[:2] + _GOLDEN * np.arange(1, 1 + len(single[:2]), dtype=np.uint64))
    return np.concatenate([single, pairs, first])


def _mixed(values: Array) -> Array:
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return np.asarray(values ^ (values >> np.uint64(31)))


def _length_features(tokens: int) -> tuple[Array, Array]:
    """The length of a prompt as a place between two of `_LENGTHS` points, half an octave apart; and a constant."""
    at = min(2 * np.log2(1 + tokens), _LENGTHS - 1.001)
    low = int(at)
    start = 1 << HASH_BITS
    return np.array([start + low, start + low + 1, FEATURES - 1], dtype=np.int32), np.array([low + 1 - at, at - low, 1])


class Encoder(Protocol):
    """Makes the vectors that similar prompts are found by. name: what the vectors come from; states of forecasters
    that were made with another one are refused. width: of the vectors."""

    name: str
    width: int

    def encode(self, prompt: Sequence[int], features: Hashed) -> Array:
        """A vector of length 1, or of zeros: (width,), float32. features: the prompt's, hashed."""
        ...


class HashedTokens:
    """The hashed features, folded into `width` places with signs."""

    def __init__(self, width: int = WIDTH) -> None:
        self.name, self.width = f"hashed-{width}", width

    def encode(self, prompt: Sequence[int], features: Hashed) -> Array:
        """See `Encoder`."""
        ids = _mixed(features.ids[: features.hashes].astype(np.uint64))
        signs = np.where(ids & np.uint64(1), 1.0, -1.0)
        places = ((ids >> np.uint64(1)) % np.uint64(self.width)).astype(np.intp)
        return unit(np.bincount(places, signs * features.weights[: features.hashes], self.width))


def unit(vector: Array) -> Array:
    """The vector at length 1, in float32; zeros stay zeros."""
    return (vector / max(float(np.linalg.norm(vector)), 1e-12)).astype(np.float32)
