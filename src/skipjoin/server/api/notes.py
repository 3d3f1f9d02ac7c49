"""What becomes of a request over HTTP, noted where it is known, for the line in the log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from starlette.types import Scope

# Where a note lies in `scope["state"]`.
_NOTE = "note"


class Generated(Protocol):
    """What a request got: `generation.JobRun`. Times in seconds on the monotonic clock."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def first_token_at(self) -> float | None: ...
    @property
    def finish_reason(self) -> str: ...


@dataclass(slots=True)
class Note:
    """What is known of a request when it is over. run: None if nothing was generated for it. reason: the code of the
    error that ended it; empty: none did."""

    run: Generated | None = None
    reason: str = ""
    status: int | None = None


def note_of(scope: Scope) -> Note:
    """The note of a request; one that is dropped where requests are not logged."""
    found: Note = scope.get("state", {}).get(_NOTE) or Note()
    return found


def attach_note(scope: Scope) -> Note:
    """Begin the note of a request."""
    note = scope.setdefault("state", {})[_NOTE] = Note()
    return note
