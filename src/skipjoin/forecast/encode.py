"""Encoding of prompts. Only hashes are kept, neither text nor tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol
from zlib import crc32

import numpy as np

from skipjoin.forecast.mass import Array

# Tokens of a prompt that are encoded: half from its start and half from its end, where instructions are.
SEEN = 1024
# Feature ids: hashes below 2 ** HASH_BITS, then prompt lengths, then a constant.
HASH_BITS = 15
_LENGTHS = 32
FEATURES = (1 << HASH_BITS) + _LENGTHS + 1
# Width of the hashed vector for similarity search.
WIDTH = 256
_WORD = re.compile(r"\w+|[^\w\s]")
# Odd constants of splitmix64, which mixes every bit and, unlike Python's hash, is equal in every process.
_MIX_1, _MIX_2, _GOLDEN = (np.uint64(n) for n in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15))


def words(text: str) -> list[int]:
    return [crc32(word.encode()) for word in _WORD.findall(text.lower())]


class Hashed(NamedTuple):
    """Sparse features of a prompt."""

    ids: Array  # below `FEATURES`
    weights: Array
    hashes: int  # number of the first features, which stand for tokens


def hashed(prompt: Sequence[int]) -> Hashed:
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
    at = min(2 * np.log2(1 + tokens), _LENGTHS - 1.001)
    low = int(at)
    start = 1 << HASH_BITS
    return np.array([start + low, start + low + 1, FEATURES - 1], dtype=np.int32), np.array([low + 1 - at, at - low, 1])


class Encoder(Protocol):
    """Encoder of prompts."""

    name: str  # in stored states
    width: int
    batch: int  # number of prompts up to which encoding them together is cheaper

    def encode(self, prompts: Sequence[Sequence[int]], features: Sequence[Hashed]) -> Array:
        """Return (prompts, width) float32 vectors of norm 1 or 0."""


class HashedTokens:
    """Folds the hashed features into `WIDTH` dimensions with random signs."""

    batch, width = 1, WIDTH
    name = f"hashed-{WIDTH}"

    def encode(self, prompts: Sequence[Sequence[int]], features: Sequence[Hashed]) -> Array:
        return np.array([self._folded(feature) for feature in features], np.float32).reshape(-1, self.width)

    def _folded(self, features: Hashed) -> Array:
        ids = _mixed(features.ids[: features.hashes].astype(np.uint64))
        signs = np.where(ids & np.uint64(1), 1.0, -1.0)
        indices = ((ids >> np.uint64(1)) % np.uint64(self.width)).astype(np.intp)
        return unit(np.bincount(indices, signs * features.weights[: features.hashes], self.width))


def unit(vector: Array) -> Array:
    return (vector / max(float(np.linalg.norm(vector)), 1e-12)).astype(np.float32)
