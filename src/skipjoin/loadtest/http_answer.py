from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from skipjoin.routes import OPENAI_EVENTS, Frames

# Maximum length of an error's text in reports, because some servers return HTML pages.
_LONGEST_DETAIL = 200


class Failure(NamedTuple):
    kind: str
    detail: str


def failure(kind: str, detail: object) -> Failure:
    text = " ".join(str(detail).split())
    return Failure(kind, text if len(text) <= _LONGEST_DETAIL else text[:_LONGEST_DETAIL] + "...")


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    def content(self) -> str:
        return self.text or (self.delta.content if self.delta is not None else None) or ""

    def shows_token(self) -> bool:
        """Return whether the event has a token. Chats begin with a role only, and some tokens have no text."""
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


@dataclass(slots=True)
class Answer:
    frames: Frames = OPENAI_EVENTS
    first_token: float | None = None
    last_token: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None
    ended: float | None = None
    error: Failure | None = None
    _tail: bytes = b""
    _parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def feed(self, data: bytes, now: float) -> None:
        *lines, self._tail = (self._tail + data).split(b"\n")
        prefix = self.frames.prefix.rstrip()
        for line in lines:
            if line.startswith(prefix) and (data := line[len(prefix) :].strip()):
                self._take(data, now)

    def close(self, now: float) -> None:
        self.feed(b"\n", now)
        if not self.frames.end:
            self.ended = now

    def problem(self, wanted: int, *, may_stop: bool) -> Failure | None:
        if self.error is not None:
            return self.error
        if self.ended is None:
            return Failure("truncated", f"the stream ended without {self.frames.end.decode()}")
        if self.output_tokens is None:
            return Failure("no_usage", "the stream reported no usage, which stream_options.include_usage requests")
        if self.output_tokens < wanted and not (may_stop and self.finish_reason == "stop"):
            return Failure("truncated", f"{self.output_tokens} tokens of {wanted}, finish reason {self.finish_reason}")
        if self.first_token is None:
            return Failure("malformed", "no event of the stream held a token")
        return None

    def _take(self, payload: bytes, now: float) -> None:
        if self.frames.end and payload == self.frames.end:
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
            self._parts.append(choice.content())
            if self.first_token is None:
                self.first_token = now
            self.finish_reason = choice.finish_reason or self.finish_reason
