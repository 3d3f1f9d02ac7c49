from __future__ import annotations

import logging
import time
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skipjoin.server.api.auth import ANONYMOUS
from skipjoin.server.api.notes import Note, attach_note

logger = logging.getLogger(__name__)
# Characters of a key's hash that identify the key in the log.
_LABEL = 8


class RequestLogging:
    """ASGI middleware that logs each request, successful GETs at level debug."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not logger.isEnabledFor(logging.INFO):
            await self.app(scope, receive, send)
            return
        note = attach_note(scope)
        begin = time.monotonic()

        async def send_noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                note.status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_noting)
        finally:
            looks = scope["method"] == "GET" and note.status == HTTPStatus.OK
            level = logging.DEBUG if looks else logging.INFO
            if logger.isEnabledFor(level):
                fields = _fields(scope, note, begin, time.monotonic())
                logger.log(level, "%s %s", scope["method"], quote(scope["path"]), extra={"fields": fields})


def _fields(scope: Scope, note: Note, begin: float, end: float) -> dict[str, Any]:
    owner, run = scope["state"].get("owner", ANONYMOUS), note.run
    first = None if run is None else run.first_token_at
    reason = note.reason or ("" if run is None else run.finish_reason)
    return {
        "id": scope["state"].get("request_id"),
        "key": None if owner == ANONYMOUS else owner[:_LABEL],
        "status": note.status,
        "reason": reason or (None if note.status is None else _phrase(note.status)),
        "prompt_tokens": None if run is None else run.prompt_tokens,
        "output_tokens": None if run is None else run.output_tokens,
        "ttft_s": None if first is None else round(first - begin, 6),
        "total_s": round(end - begin, 6),
    }


def _phrase(status: int) -> str:
    known = status in HTTPStatus.__members__.values()
    return HTTPStatus(status).phrase.lower().replace(" ", "_") if known else str(status)
