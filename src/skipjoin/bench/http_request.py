"""The load client's requests: bodies with prompts of given lengths, or with given texts."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from skipjoin.bench.target import Target
from skipjoin.bench.workload import WorkloadRequest

# Ordinary words that are one token in most vocabularies.
_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school")
_encode = msgspec.json.Encoder().encode


class Bodies:
    """Request bodies, one for each job in turn; the same seed gives the same bodies.

    A job with a text sends it, and the model ends the answer. Other prompts are random, and consecutive ones differ
    from the first token on, so that a server's prefix cache has no hits.
    """

    def __init__(self, target: Target, seed: str) -> None:
        self._target = target
        self._random = random.Random(seed)
        self._count = 0
        low, high = target.prompt_ids
        self._ids = tuple(range(low, high + 1))

    def make(self, job: WorkloadRequest) -> bytes:
        """The JSON of the next request."""
        target = self._target
        max_tokens = target.max_tokens(job)
        body: dict[str, Any] = {
            "model": target.model,
            **(self._prompt(job.prompt_tokens) if job.prompt is None else self._text(job.prompt)),
            "max_tokens": max_tokens,
            "ignore_eos": None if max_tokens is None else True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if job.priority:
            body["priority"] = job.priority
        body |= target.extra
        self._count += 1
        return _encode({name: value for name, value in body.items() if value is not None})

    def _prompt(self, length: int) -> dict[str, Any]:
        rest = length - 1
        if self._target.endpoint == "chat":
            return self._text(" ".join([f"{self._count}", *self._random.choices(_WORDS, k=rest)]))
        return {"prompt": [self._ids[self._count % len(self._ids)], *self._random.choices(self._ids, k=rest)]}

    def _text(self, text: str) -> dict[str, Any]:
        if self._target.endpoint == "chat":
            return {"messages": [{"role": "user", "content": text}]}
        return {"prompt": text}
