"""The sets of requests that every engine gets."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from random_model import VOCAB

# Most requests in flight at once, of any set, and the KV of each engine that has a pool.
SEATS, KV_GIB = 64, 1.0


@dataclass(frozen=True)
class Job:
    """One request: its prompt, and how many tokens it generates whatever they are."""

    prompt: list[int]
    output: int


@dataclass(frozen=True)
class WorkloadSet:
    """Lengths of requests, prompt and output. counts_prompts: the rate is of prompt tokens, not of output tokens."""

    lengths: list[tuple[int, int]]
    counts_prompts: bool = False

    def jobs(self, turn: int) -> list[Job]:
        """Requests of these lengths. Each turn has other prompts: engines keep the KV of those that they have seen."""
        draw = random.Random(f"{turn}")
        return [Job([draw.randrange(3, VOCAB) for _ in range(prompt)], output) for prompt, output in self.lengths]

    @property
    def tokens(self) -> int:
        """Those that the rate counts."""
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
# The same, and as many tokens as a pool has room for: memory that was never written costs its first user a fault.
FILL_UP: Callable[[int], list[Job]] = WorkloadSet([(64, 4)] * 16 + [(900, 1)] * 33).jobs
