"""The keys of KV: what lets one request use the KV that another one computed."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol

from skipjoin.core.kv.block_pool import Key

if TYPE_CHECKING:
    from skipjoin.core.request import Request

_KEY_BYTES = 16


class Prefix(Protocol):
    """The keys of one request's blocks: equal keys mean equal tokens up to the end of the block."""

    def keys(self, request: Request, tokens: int) -> Sequence[Key]:
        """Of the full blocks within the first `tokens` tokens, which are known, as far as they have keys. The sequence
        may hold more keys, and is not to be kept."""
        ...


class ContentPrefix:
    """Keys from the tokens themselves: each block's is the hash of the key before it and of its tokens, so that equal
    keys mean equal prompts from the first token on.

    block_size: tokens per block. salt: requests with another one share nothing. Nor do requests that fill their blocks
    from different ends.
    """

    __slots__ = ("_block_size", "_keys", "_last")

    def __init__(self, block_size: int, salt: bytes = b"") -> None:
        self._block_size = block_size
        self._keys: list[Key] = []
        self._last = blake2b(salt, digest_size=_KEY_BYTES).digest()

    def keys(self, request: Request, tokens: int) -> Sequence[Key]:
        size, keys = self._block_size, self._keys
        begin, end = len(keys) * size, tokens // size * size
        if begin < end:
            if not keys and request.reverse:
                self._last = _reversed(self._last)
            data = array("q", request.tokens(begin, end))
            width = size * data.itemsize
            of_all = data.tobytes()
            for at in range(0, len(of_all), width):
                self._last = blake2b(self._last + of_all[at : at + width], digest_size=_KEY_BYTES).digest()
                keys.append(self._last)
        return keys

    def copy(self) -> ContentPrefix:
        """For another request with the same prompt and salt: what is hashed is not hashed again."""
        other = ContentPrefix(self._block_size)
        other._keys, other._last = list(self._keys), self._last
        return other


class NamedPrefix:
    """Keys that are given, as those of a trace, which names blocks of text and has no text.

    names: of the prompt's parts of `part` tokens each; equal names mean equal parts, at the same place, after equal
    ones. part: a multiple of block_size. What is generated has no keys.
    """

    __slots__ = ("_keys", "_reversed")

    def __init__(self, names: Sequence[int], part: int, block_size: int) -> None:
        if part % block_size:
            raise ValueError(f"parts of {part} tokens are not made of whole blocks of {block_size}")
        self._keys = [
            name.to_bytes(8, "big", signed=True) + index.to_bytes(4, "big")
            for name in names
            for index in range(part // block_size)
        ]
        self._reversed: list[Key] | None = None

    def keys(self, request: Request, tokens: int) -> Sequence[Key]:
        if not request.reverse:
            return self._keys
        if self._reversed is None:
            self._reversed = [_reversed(key) for key in self._keys]
        return self._reversed


def _reversed(key: Key) -> Key:
    """Another key for blocks that are filled from their last slot down."""
    return blake2b(key + b"<", digest_size=_KEY_BYTES).digest()
