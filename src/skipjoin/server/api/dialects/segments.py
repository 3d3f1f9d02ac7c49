"""Output as segments, which the dialects show as items or blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from skipjoin.engine.text import Choice
from skipjoin.formats.calls import Part, PartKind


@dataclass(slots=True, eq=False)
class Segment:
    """Text, reasoning or call of a message, which ends before the next one begins."""

    kind: PartKind
    index: int
    call: int | None = None
    name: str = ""
    id: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Change(NamedTuple):
    """Change of a segment: it begins or ends, or a text is added to it."""

    segment: Segment
    text: str = ""
    begins: bool = False
    ends: bool = False


class Segments:
    """Segments of one message while it is generated. They do not depend on how its text was cut."""

    def __init__(self) -> None:
        self.found: list[Segment] = []
        self._open: Segment | None = None

    def add(self, parts: Sequence[Part]) -> Iterator[Change]:
        for part in parts:
            segment = self._open
            if segment is None or (segment.kind, segment.call) != (part.kind, part.call):
                yield from self.close()
                segment = self._begin(part)
                yield Change(segment, begins=True)
            if part.text:
                segment.pieces.append(part.text)
                yield Change(segment, part.text)

    def close(self) -> Iterator[Change]:
        if self._open is not None:
            segment, self._open = self._open, None
            yield Change(segment, ends=True)

    def finish(self) -> Iterator[Change]:
        """End the message, which has at least one segment."""
        if not self.found:
            yield Change(self._begin(Part("")), begins=True)
        yield from self.close()

    def _begin(self, part: Part) -> Segment:
        self._open = Segment(part.kind, len(self.found), part.call, part.name, part.id)
        self.found.append(self._open)
        return self._open


def whole_of(choice: Choice, text: str) -> list[Segment]:
    segments = Segments()
    for _ in (*segments.add(choice.take_parts(text)), *segments.finish()):
        pass
    return segments.found
