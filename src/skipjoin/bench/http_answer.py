"""A streamed answer as its client sees it: when tokens came, how many there were, and what was wrong with it."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

# An example of each kind of error is shown; a page of HTML need not be.
_LONGEST_DETAIL = 200


class Failure(NamedTuple):
    """Why a request does not count as finished. kind: what it is counted as. detail: what was said of it."""

    kind: str
    detail: str


def failure(kind: str, detail: object) -> Failure:
    """With the detail on one line and not too long."""
    text = " ".join(str(detail).split())
    return Failure(kind, text if len(text) <= _LONGEST_DETAIL else text[:_LONGEST_DETAIL] + "...")


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    def shows_token(self) -> bool:
        """A chat begins with a role, before there is a token; some tokens of a completion have no text of their own."""
        delta = self.delta
        spoken = delta is not None and (delta.content or delta.reasoning_content)
        return self.text is not None or bool(spoken) or self.finish_reason is not None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int
    completion_tokens: int


class _Event(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class Answer:
    """Server-sent events of a completion or a chat, taken in pieces as they come.

    first_token, last_token: the time that `feed` was told with the first and last event that held a token; an event
    may hold several, or a part of one. prompt_tokens, output_tokens: by the server's count, None until it is told.
    ended: when [DONE] came.
    """

    __slots__ = (
        "_tail",
        "ended",
        "error",
        "finish_reason",
        "first_token",
        "last_token",
        "output_tokens",
        "prompt_tokens",
    )

    def __init__(self) -> None:
        self._tail = b""
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.finish_reason: str | None = None
        self.ended: float | None = None
        self.error: Failure | None = None

    def feed(self, data: bytes, now: float) -> None:
        """The next bytes, which came at `now`."""
        *lines, self._tail = (self._tail + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip(), now)

    def close(self, now: float) -> None:
        """No more bytes: a last line may lack its end."""
        self.feed(b"\n", now)

    def problem(self, wanted: int, *, may_stop: bool) -> Failure | None:
        """What keeps the answer from being complete. wanted: tokens that were asked for. may_stop: whether the model
        may end it earlier."""
        if self.error is not None:
            return self.error
        if self.ended is None:
            return Failure("truncated", "the stream ended without [DONE]")
        if self.output_tokens is None:
            return Failure("no_usage", "the stream did not tell its usage, which stream_options.include_usage asks for")
        if self.output_tokens < wanted and not (may_stop and self.finish_reason == "stop"):
            return Failure("truncated", f"{self.output_tokens} tokens of {wanted}, finish reason {self.finish_reason}")
        if self.first_token is None:
            return Failure("malformed", "no event of the stream held a token")
        return None

    def _take(self, payload: bytes, now: float) -> None:
        if payload == b"[DONE]":
            self.ended = now
            return
        try:
            event = _decode(payload)
        except ValueError as error:  # not JSON, or not UTF-8
            self.error = self.error or failure("malformed", f"{error}: {payload.decode('utf-8', 'replace')}")
            return
        if event.error is not None:
            message = event.error.get("message") if isinstance(event.error, dict) else None
            self.error = self.error or failure("error_event", message or event.error)
        if event.usage is not None:
            self.prompt_tokens, self.output_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
        if event.choices and (choice := event.choices[0]).shows_token():
            self.last_token = now
            if self.first_token is None:
                self.first_token = now
            self.finish_reason = choice.finish_reason or self.finish_reason
