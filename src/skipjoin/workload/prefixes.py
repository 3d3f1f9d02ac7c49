"""What prompts of a workload have in common: parts of them by name, from a trace or from groups of requests."""

from __future__ import annotations

import random
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from skipjoin.config import ConfigError
from skipjoin.core.kv.prefixes import NamedPrefix

# Tokens per id of `hash_ids` in Mooncake's traces.
HASH_TOKENS = 512
MOST_SHARED_TOKENS = 10_000_000
MOST_GROUPS = 1_000_000_000


class PromptParts(NamedTuple):
    """The first parts of a prompt, of `tokens` tokens each, by name: prompts whose first names are equal begin with the
    same tokens."""

    names: tuple[int, ...]
    tokens: int

    def prefix(self, block_size: int) -> NamedPrefix:
        """The keys of the prompt's KV. Raises `ConfigError` as `check` does."""
        self.check(block_size)
        return NamedPrefix(self.names, self.tokens - self.tokens % block_size, block_size)

    def check(self, block_size: int) -> None:
        """Raise `ConfigError` where a block would lie in two parts."""
        if len(self.names) > 1 and self.tokens % block_size:
            raise ConfigError(f"hash_tokens must be a multiple of the block size, {block_size}, got {self.tokens}")


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Prompts begin with `tokens` further tokens, which those of a group have in common, such as a system prompt. Each
    request is of one of `groups` groups at random."""

    tokens: int
    groups: int = 1

    def __post_init__(self) -> None:
        for name, value, most in (("tokens", self.tokens, MOST_SHARED_TOKENS), ("groups", self.groups, MOST_GROUPS)):
            if not 1 <= value <= most:
                raise ConfigError(f"prefix: {name} must be an integer in [1, {most}], got {value}")

    def __str__(self) -> str:
        return f"{self.tokens}:{self.groups}"

    def draw(self, chance: random.Random, stream: str) -> PromptParts:
        """What a prompt of this stream begins with."""
        return PromptParts((_name(stream, int(chance.random() * self.groups)),), self.tokens)


def parse_shared_prefix(text: str) -> SharedPrefix:
    """From "1000", or with a number of groups "1000:20". Raises `ConfigError`."""
    parts = text.split(":")
    try:
        return SharedPrefix(*map(int, parts))
    except (TypeError, ValueError):
        raise ConfigError(f"prefix must be TOKENS or TOKENS:GROUPS, two integers, got {text!r}") from None


def _name(stream: str, group: int) -> int:
    # Below 0, where no id of a trace is.
    digest = blake2b(f"{group} {stream}".encode(), digest_size=8).digest()
    return -1 - (int.from_bytes(digest, "big") >> 1)
