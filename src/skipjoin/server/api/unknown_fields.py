from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator
from typing import Any, get_args

import msgspec
from pydantic import BaseModel

from skipjoin.server.api.errors import ApiError

logger = logging.getLogger(__name__)
UNKNOWN = "unknown_parameter"
# Undeclared fields of one body that may pass. Each costs another validation.
MAX_PASSED = 32
# Fields of bodies that clients mistake for others.
_ELSEWHERE = {
    "messages": "send messages to /v1/chat/completions",
    "prompt": "send a prompt to /v1/completions",
    "input": "send an input to /v1/responses",
    "extra_body": "an argument of OpenAI's Python client; in JSON its fields stand beside the others",
}
# Names of which only the first occurrence is logged.
_MAX_LOGGED = 1024


class UnknownFields:
    def __init__(self) -> None:
        self._logged: set[str] = set()

    def without(self, body: bytes, error: ApiError) -> bytes:
        """Remove the field that an error is about, or raise the error if that is impossible."""
        content, parts = msgspec.json.decode(body), (error.param or "").split(".")
        place: Any = content
        try:
            for part in parts[:-1]:
                place = place[int(part) if isinstance(place, list) else part]
            del place[parts[-1]]
        except (KeyError, IndexError, TypeError, ValueError):
            raise error from None
        name = ".".join("*" if part.isdigit() else part for part in parts)
        if name not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(name)
            logger.warning("unknown field %r of requests is ignored (--unknown-fields warn)", name)
        return msgspec.json.encode(content)


def with_suggestion(error: ApiError, kind: type[BaseModel]) -> ApiError:
    parts = (error.param or "").split(".")
    similar = difflib.get_close_matches(parts[-1][:64], sorted(_fields_at(kind, parts[:-1])), 1)
    hint = f"did you mean {similar[0]!r}?" if similar else None
    if error.param in _ELSEWHERE:
        hint = _ELSEWHERE[error.param]
    if hint is None:
        return error
    return ApiError(error.status, f"{error.message}: {hint}", code=error.code, param=error.param)


def _fields_at(kind: type[BaseModel], path: list[str]) -> set[str]:
    models = {kind}
    for part in path:
        if not part.isdigit():
            models = {
                inner
                for model in models
                if part in model.model_fields
                for inner in _models_in(model.model_fields[part].annotation)
            }
    return {name for model in models for name in model.model_fields}


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)
