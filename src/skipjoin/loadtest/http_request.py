from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from skipjoin.core.request import ServiceClass
from skipjoin.loadtest.targets import Target
from skipjoin.routes import CHAT, COMPLETIONS, RESPONSES
from skipjoin.workload.request import WorkloadRequest

# Ordinary words that are one token in most vocabularies.
_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "history", "child", "world", "school")
# Fields with the maximum number of output tokens, where they have another name.
_LIMITS = {RESPONSES: "max_output_tokens"}
_Token = TypeVar("_Token", int, str)
_encode = msgspec.json.Encoder().encode


def _slo(job: WorkloadRequest) -> dict[str, float]:
    target = job.target._asdict()
    return {f"{name.removesuffix('_s')}_ms": s * 1000 for name, s in target.items() if s < math.inf}


class Bodies:
    """Generator of request bodies, deterministic for a seed.

    Random prompts differ from the first token on, so that prefix caches have hits only for declared prefixes.
    """

    def __init__(self, target: Target, seed: str) -> None:
        self._target = target
        self._seed = seed
        self._random = random.Random(seed)
        self._count = 0
        low, high = target.prompt_ids
        self._ids = tuple(range(low, high + 1))

    def make(self, job: WorkloadRequest) -> bytes:
        target = self._target
        max_tokens = target.max_tokens(job)
        body: dict[str, Any] = {
            "model": target.model,
            **(self._prompt(job) if job.prompt is None else self._text(job.prompt)),
            _LIMITS.get(target.route, "max_tokens"): max_tokens,
            "ignore_eos": None if max_tokens is None else True,
            "temperature": 0,
            "stream": True,
        }
        if target.route in (CHAT, COMPLETIONS):  # streams of others always end with the usage
            body["stream_options"] = {"include_usage": True}
        if job.priority:
            body["priority"] = job.priority
        if job.service is ServiceClass.BEST_EFFORT:
            body["service_tier"] = "flex"
        if job.deadline_s is not None:
            body["deadline_ms"] = max(1, round(job.deadline_s * 1000))
        if slo := _slo(job):
            body["slo"] = slo
        body |= target.extra
        self._count += 1
        return _encode({name: value for name, value in body.items() if value is not None})

    def _prompt(self, job: WorkloadRequest) -> dict[str, Any]:
        if self._target.route is not COMPLETIONS:
            return self._text(" ".join(self._drawn(job, f"{self._count}", _WORDS)))
        return {self._target.route.prompt: self._drawn(job, self._ids[self._count % len(self._ids)], self._ids)}

    def _drawn(self, job: WorkloadRequest, own: _Token, choices: Sequence[_Token]) -> list[_Token]:
        shared: list[_Token] = []
        if job.parts is not None:
            for name in job.parts.names:
                shared += random.Random(f"{self._seed}/{name}").choices(choices, k=job.parts.tokens)
        rest = job.prompt_tokens - len(shared)
        if rest:
            shared.append(own)
            shared += self._random.choices(choices, k=rest - 1)
        return shared

    def _text(self, text: str) -> dict[str, Any]:
        field = self._target.route.prompt
        return {field: [{"role": "user", "content": text}] if field == "messages" else text}
