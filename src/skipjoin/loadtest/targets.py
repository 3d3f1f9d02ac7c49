"""The server that a load client sends to, and the form of its requests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from skipjoin.config import base_url
from skipjoin.options import ConfigError, Knob, unknown
from skipjoin.workload.workload import WorkloadRequest

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}

_GROUP = "Target"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server and the form of requests to it. Raises `ConfigError`.

    base_url: with or without /v1. prompt_ids: the lowest and highest token id in prompts. extra: fields that every body
    has besides, or instead of its own; a null removes one.
    """

    base_url: Annotated[str, Knob("The server, such as http://127.0.0.1:8000.", metavar="URL", group=_GROUP)]
    endpoint: Annotated[
        str,
        Knob(
            "completions (prompts of token ids, or a trace's texts) or chat (messages of words, or those).",
            metavar="NAME",
            group=_GROUP,
        ),
    ] = "completions"
    model: Annotated[
        str | None,
        Knob("Model to ask for (default: the first that the server lists).", metavar="NAME", group=_GROUP),
    ] = None
    api_key: Annotated[str | None, Knob("Key to send.", metavar="KEY", envvar="OPENAI_API_KEY", group=_GROUP)] = None
    prompt_ids: tuple[int, int] = (100, 500)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "base_url", base_url("base_url", self.base_url))
        if self.endpoint not in PATHS:
            raise unknown("endpoint", self.endpoint, sorted(PATHS))
        low, high = self.prompt_ids
        if not 0 <= low < high < 1 << 31:
            raise ConfigError(f"prompt_ids must be LOW-HIGH with 0 <= LOW < HIGH < {1 << 31}, got {low}-{high}")

    @property
    def url(self) -> str:
        """The URL of requests."""
        return self.base_url + PATHS[self.endpoint]

    def max_tokens(self, job: WorkloadRequest) -> int | None:
        """The output tokens that are requested for a job, those of the workload. None: the request names no number, and
        the model decides when the answer to a text ends."""
        return job.output_tokens if job.prompt is None or self.extra.get("ignore_eos") else None

    @property
    def may_stop(self) -> bool:
        """Whether responses may be shorter than requested: by default the body tells the server to ignore the end
        token wherever it names a number of tokens."""
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
        found = json.loads(text) if text else {}
    except ValueError as error:
        raise ConfigError(f"extra_body must be a JSON object: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"extra_body must be a JSON object, got {text}")
    return found
