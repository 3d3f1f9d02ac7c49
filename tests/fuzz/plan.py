from __future__ import annotations

import random
from dataclasses import dataclass

from fuzz import forms, values, wire
from fuzz.case import Case

# Generators of cases, and how many cases of a round each makes.
_KINDS = (
    (values.json_case, 33),
    (values.refused, 3),
    (wire.heads, 14),
    (forms.form_case, 8),
    (wire.chunks, 7),
    (wire.lengths, 6),
    (wire.leaving, 6),
    (wire.pipeline, 5),
    (wire.upgrades, 3),
    (wire.bodies_with_requests, 3),
    (wire.incomplete, 3),
    (wire.known_trailers, 3),
    (wire.forbidden_trailers, 2),
    (wire.key_in_trailers, 2),
    (wire.many_trailers, 1),
    (wire.endless_trailer, 1),
    (wire.slow, 3),
)
_MAKERS = [maker for maker, count in _KINDS for _ in range(count)]
CASES, STORIES = len(_MAKERS), 4


@dataclass(frozen=True)
class Round:
    """Cases and stories that run concurrently."""

    seed: int
    number: int
    only: int | None = None

    def cases(self) -> list[tuple[int, Case]]:
        order = random.Random(f"order/{self.seed}/{self.number}").sample(range(CASES), CASES)
        return [(index, _MAKERS[index](self._draw(index))) for index in order if self.only in (None, index)]

    def stories(self) -> list[tuple[int, random.Random]]:
        some = range(CASES, CASES + STORIES)
        return [(index, self._draw(index)) for index in some if self.only in (None, index)]

    def replay(self, index: int | None = None) -> str:
        case = "" if index is None else f" --case {index}"
        return f"PYTHONPATH=tests python -m fuzz --seed {self.seed} --round {self.number} --rounds 1{case}"

    def _draw(self, index: int) -> random.Random:
        return random.Random(f"fuzz/{self.seed}/{self.number}/{index}")
