from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Protocol

# Identifies the content of a full block and of all blocks before it.
Key = bytes
# Returns the known token ids at positions [start, end), as `Request.tokens` does.
ReadTokens = Callable[[int, int], Sequence[int]]

_KEY_BYTES = 16


class Prefix(Protocol):
    """Keys of one request's blocks. Equal keys mean equal tokens up to the end of the block."""

    def keys(self, read: ReadTokens, tokens: int, *, reverse: bool = False) -> Sequence[Key]:
        """Return the keys of the full blocks in the first `tokens` tokens, all of which must be known.

        There may be more keys, or fewer if blocks have none. Callers must not keep the sequence. For one object, `read`
        always reads the same tokens, and `reverse` never changes.
        """


class ContentPrefix:
    """Keys that are hashes of the previous key and the block's tokens.

    Requests share none if their salts differ, or if they fill their blocks from different ends.
    """

    __slots__ = ("_block_size", "_keys", "_last")

    def __init__(self, block_size: int, salt: bytes = b"") -> None:
        self._block_size = block_size
        self._keys: list[Key] = []
        self._last = blake2b(salt, digest_size=_KEY_BYTES).digest()

    def keys(self, read: ReadTokens, tokens: int, *, reverse: bool = False) -> Sequence[Key]:
        size, keys = self._block_size, self._keys
        begin, end = len(keys) * size, tokens // size * size
        if begin < end:
            if not keys and reverse:
                self._last = _reversed(self._last)
            data = array("q", read(begin, end))
            width = size * data.itemsize
            of_all = data.tobytes()
            for at in range(0, len(of_all), width):
                self._last = blake2b(self._last + of_all[at : at + width], digest_size=_KEY_BYTES).digest()
                keys.append(self._last)
        return keys

    def copy(self) -> ContentPrefix:
        """Return a copy for another request with the same prompt and salt."""
        other = ContentPrefix(self._block_size)
        other._keys, other._last = list(self._keys), self._last
        return other


class NamedPrefix:
    """Keys from given names, for traces without texts. Output has no keys.

    Equal names mean equal slices of `part` tokens at the same position after equal ones.
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

    def keys(self, read: ReadTokens, tokens: int, *, reverse: bool = False) -> Sequence[Key]:
        if not reverse:
            return self._keys
        if self._reversed is None:
            self._reversed = [_reversed(key) for key in self._keys]
        return self._reversed


def _reversed(key: Key) -> Key:
    return blake2b(key + b"<", digest_size=_KEY_BYTES).digest()
