"""The load client's requests: the server's address and key, and bodies with prompts of given lengths."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec

from skipjoin.bench.workload import WorkloadRequest
from skipjoin.knobs import ConfigError, Knob, unknown

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
# Ordinary words that are one token in most vocabularies.
_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school")

_GROUP = "Target"
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server and the form of requests to it. Raises `ConfigError`.

    base_url: with or without /v1. prompt_ids: the lowest and highest token id in prompts. extra: fields that every body
    has besides, or instead of its own; a null removes one.
    """

    base_url: Annotated[str, Knob("The server, such as http://127.0.0.1:8000.", metavar="URL", group=_GROUP)]
    endpoint: Annotated[
        str,
        Knob("completions (prompts of token ids) or chat (a message of words).", metavar="NAME", group=_GROUP),
    ] = "completions"
    model: Annotated[
        str | None,
        Knob("Model to ask for (default: the first that the server lists).", metavar="NAME", group=_GROUP),
    ] = None
    api_key: Annotated[str | None, Knob("Key to send.", metavar="KEY", envvar="OPENAI_API_KEY", group=_GROUP)] = None
    prompt_ids: tuple[int, int] = (100, 500)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.base_url)
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            valid = False
        if not valid:
            raise ConfigError(f"base_url must be like http://127.0.0.1:8000, got {self.base_url!r}")
        object.__setattr__(self, "base_url", self.base_url.rstrip("/").removesuffix("/v1"))
        if self.endpoint not in PATHS:
            raise unknown("endpoint", self.endpoint, sorted(PATHS))
        low, high = self.prompt_ids
        if not 0 <= low < high < 1 << 31:
            raise ConfigError(f"prompt_ids must be LOW-HIGH with 0 <= LOW < HIGH < {1 << 31}, got {low}-{high}")

    @property
    def url(self) -> str:
        """The URL of requests."""
        return self.base_url + PATHS[self.endpoint]

    @property
    def may_stop(self) -> bool:
        """Whether responses may be shorter than requested: by default the body tells the server to ignore the end
        token."""
        return not self.extra.get("ignore_eos", True)


def parse_prompt_ids(text: str) -> tuple[int, int]:
    """Token ids from a text such as "100-500". Raises `ConfigError`."""
    low, dash, high = text.partition("-")
    if not (dash and low.strip().isdecimal() and high.strip().isdecimal()):
        raise ConfigError(f"prompt_ids must be LOW-HIGH, such as 100-500, got {text!r}")
    return int(low), int(high)


def parse_extra(text: str | None) -> dict[str, Any]:
    """Additional fields of a body from a JSON object. Raises `ConfigError`."""
    try:
        found = msgspec.json.decode(text) if text else {}
    except msgspec.DecodeError as error:
        raise ConfigError(f"extra_body must be a JSON object: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"extra_body must be a JSON object, got {text}")
    return found


class Bodies:
    """Request bodies, one for each job in turn; the same seed gives the same bodies.

    Prompts are random, and consecutive ones differ from the first token on, so that a server's prefix cache has no
    hits.
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
        body: dict[str, Any] = {
            "model": target.model,
            **self._prompt(job.prompt_tokens),
            "max_tokens": job.output_tokens,
            "ignore_eos": True,
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
            words = [f"{self._count}", *self._random.choices(_WORDS, k=rest)]
            return {"messages": [{"role": "user", "content": " ".join(words)}]}
        return {"prompt": [self._ids[self._count % len(self._ids)], *self._random.choices(self._ids, k=rest)]}
