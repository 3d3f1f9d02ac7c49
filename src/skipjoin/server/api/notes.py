from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from starlette.types import Scope

# Key of the note in `scope["state"]`.
_NOTE = "note"


class Generated(Protocol):
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
    run: Generated | None = None
    reason: str = ""
    status: int | None = None


def note_of(scope: Scope) -> Note:
    found: Note = scope.get("state", {}).get(_NOTE) or Note()
    return found


def attach_note(scope: Scope) -> Note:
    note = scope.setdefault("state", {})[_NOTE] = Note()
    return note
