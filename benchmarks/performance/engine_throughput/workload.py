"""The sets of requests that every engine runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from random_model import SHAPES, VOCAB
from skipjoin.model.config import ModelConfig
from skipjoin.model.kv_cache import PagedKV

# Maximum number of requests in flight in any set, and the tokens of the pool of each engine that has one.
SLOTS, POOL_TOKENS = 64, 29_120


def kv_gib_of(shape: str, dtype: torch.dtype) -> float:
    config = ModelConfig.from_dict(SHAPES[shape])
    return round(POOL_TOKENS * PagedKV.bytes_per_block(config, 1, dtype) / (1 << 30), 3)


@dataclass(frozen=True)
class Job:
    """A prompt and its number of output tokens."""

    prompt: list[int]
    output: int


@dataclass(frozen=True)
class WorkloadSet:
    """Prompt and output lengths; with `counts_prompts` the rate counts prompt tokens instead of output tokens."""

    lengths: list[tuple[int, int]]
    counts_prompts: bool = False

    def jobs(self, turn: int) -> list[Job]:
        """Return requests of these lengths, with new prompts in each turn, because engines cache prefixes."""
        draw = random.Random(f"{turn}")
        return [Job([draw.randrange(3, VOCAB) for _ in range(prompt)], output) for prompt, output in self.lengths]

    @property
    def tokens(self) -> int:
        return sum(prompt if self.counts_prompts else output for prompt, output in self.lengths)


def _ragged() -> list[tuple[int, int]]:
    draw = random.Random(1)
    return [(draw.randint(8, 512), draw.randint(8, 256)) for _ in range(32)]


SETS: dict[str, WorkloadSet] = {
    "even": WorkloadSet([(64, 64)] * 16),
    "one": WorkloadSet([(64, 128)]),
    "wide": WorkloadSet([(64, 64)] * 64),
    "ragged": WorkloadSet(_ragged()),
    "prefill": WorkloadSet([(900, 1)] * 16, counts_prompts=True),
    "long": WorkloadSet([(700, 128)] * 16),
}
WARM_UP: Callable[[int], list[Job]] = WorkloadSet([(64, 4)] * 16 + [(900, 4)]).jobs
# As many tokens as a pool holds, so that later runs cause no page faults.
FILL_UP: Callable[[int], list[Job]] = WorkloadSet([(64, 4)] * 16 + [(900, 1)] * 33).jobs
