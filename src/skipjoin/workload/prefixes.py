from __future__ import annotations

import random
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from skipjoin.config import ConfigError
from skipjoin.core.prefixes import NamedPrefix

# Tokens per entry of `hash_ids` in Mooncake's traces.
HASH_TOKENS = 512
MAX_SHARED_TOKENS = 10_000_000
MAX_GROUPS = 1_000_000_000


class PromptParts(NamedTuple):
    """Named leading parts of a prompt, of `tokens` tokens each. Prompts with equal leading names share them."""

    names: tuple[int, ...]
    tokens: int

    def prefix(self, block_size: int) -> NamedPrefix:
        self.check(block_size)
        return NamedPrefix(self.names, self.tokens - self.tokens % block_size, block_size)

    def check(self, block_size: int) -> None:
        if len(self.names) > 1 and self.tokens % block_size:
            raise ConfigError(f"hash_tokens must be a multiple of the block size, {block_size}, got {self.tokens}")


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    tokens: int
    groups: int = 1

    def __post_init__(self) -> None:
        for name, value, most in (("tokens", self.tokens, MAX_SHARED_TOKENS), ("groups", self.groups, MAX_GROUPS)):
            if not 1 <= value <= most:
                raise ConfigError(f"prefix: {name} must be an integer in [1, {most}], got {value}")

    def __str__(self) -> str:
        return f"{self.tokens}:{self.groups}"

    def draw(self, chance: random.Random, stream: str) -> PromptParts:
        return PromptParts((_name(stream, int(chance.random() * self.groups)),), self.tokens)


def parse_shared_prefix(text: str) -> SharedPrefix:
    parts = text.split(":")
    try:
        return SharedPrefix(*map(int, parts))
    except (TypeError, ValueError):
        raise ConfigError(f"prefix must be TOKENS or TOKENS:GROUPS, two integers, got {text!r}") from None


def _name(stream: str, group: int) -> int:
    # Negative, to differ from all ids of traces.
    digest = blake2b(f"{group} {stream}".encode(), digest_size=8).digest()
    return -1 - (int.from_bytes(digest, "big") >> 1)
