from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

from skipjoin.config import base_url
from skipjoin.options import ConfigError, Option, unknown
from skipjoin.routes import Route, generating
from skipjoin.workload.request import WorkloadRequest

_GROUP = "Target"
_target = partial(Option, group=_GROUP, is_common=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    base_url: Annotated[
        str, _target("URL of the server, such as http://127.0.0.1:8000.", flags=("--url", "--base-url"))
    ]
    endpoint: Annotated[
        str,
        _target(
            "Endpoint: completions (with token ids, or a trace's texts), or chat, responses or messages (with words, "
            "or a trace's texts).",
            metavar="NAME",
        ),
    ] = "completions"
    model: Annotated[
        str | None, _target("Model to request (default: the first that the server lists).", metavar="NAME")
    ] = None
    api_key: Annotated[str | None, _target("API key.", metavar="KEY", envvar="OPENAI_API_KEY")] = None
    prompt_ids: tuple[int, int] = (100, 500)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "base_url", base_url("base_url", self.base_url))
        if self.endpoint not in (names := _routes()):
            raise unknown("endpoint", self.endpoint, sorted(names))
        low, high = self.prompt_ids
        if not 0 <= low < high < 1 << 31:
            raise ConfigError(f"prompt_ids must be LOW-HIGH with 0 <= LOW < HIGH < {1 << 31}, got {low}-{high}")

    @property
    def url(self) -> str:
        return self.base_url + self.route.path

    @property
    def route(self) -> Route:
        return _routes()[self.endpoint]

    def max_tokens(self, job: WorkloadRequest) -> int | None:
        return job.output_tokens if job.prompt is None or self.extra.get("ignore_eos") else None

    @property
    def may_stop(self) -> bool:
        return not self.extra.get("ignore_eos", True)


def _routes() -> dict[str, Route]:
    return {route.load_name: route for route in generating() if route.load_name}


def parse_prompt_ids(text: str) -> tuple[int, int]:
    low, dash, high = text.partition("-")
    if not (dash and low.strip().isdecimal() and high.strip().isdecimal()):
        raise ConfigError(f"prompt_ids must be LOW-HIGH, such as 100-500, got {text!r}")
    return int(low), int(high)


def parse_extra(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text) if text else {}
    except ValueError as error:
        raise ConfigError(f"extra_body must be a JSON object: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"extra_body must be a JSON object, got {text}")
    return found
