from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from skipjoin.formats.calls import Part, PartKind
from skipjoin.formats.message import MessageReader


class _Hit(NamedTuple):
    end: int
    shown: str
    stop: str


class StopStrings:
    """Finds the first stop string, and holds back text that may begin one; `special` ones contain special tokens."""

    def __init__(self, stops: Sequence[str], *, include: bool, special: Sequence[str] = ()) -> None:
        self._stops, self._special, self._include = stops, special, include
        # Text that is not shown yet, in which stop strings up to `_early` do not count, and the characters of it that
        # belong to hidden tokens.
        self._text, self._early = "", 0
        self._hidden: list[range] = []
        self.stop: str | None = None  # the one that was found

    @property
    def found(self) -> bool:
        return self.stop is not None

    def add(self, text: str, *, hidden: str = "", is_early: bool = False) -> str:
        """Return what may be shown after a `hidden` token and a text; if `is_early`, no stop string ends here."""
        if self.found:
            return ""
        if hidden and self._special:
            self._hidden.append(range(len(self._text), len(self._text) + len(hidden)))
            self._text += hidden
        self._text += text
        hits = [] if is_early else self._hits()
        if hits:
            # The stop string that completes first counts, wherever tokens cut the text.
            first = min(hits)
            self.stop, self._text = first.stop, ""
            return first.shown
        if is_early:
            self._early = len(self._text)
        return self._release()

    def flush(self) -> str:
        held = self._visible(len(self._text))
        self._text, self._early, self._hidden = "", 0, []
        return held

    def _hits(self) -> list[_Hit]:
        places = self._places()
        visible, early = self._visible(len(self._text)), sum(place < self._early for place in places)
        hits = []
        for stop in self._stops:
            at = visible.find(stop, max(0, early - len(stop) + 1))
            if at >= 0:
                end = at + len(stop)
                hits.append(_Hit(places[end - 1] + 1, visible[: end if self._include else at], stop))
        for stop in self._special:
            at = self._text.find(stop, max(0, self._early - len(stop) + 1))
            if at >= 0:
                hits.append(_Hit(at + len(stop), self._visible(at) + (stop if self._include else ""), stop))
        return hits

    def _release(self) -> str:
        places = self._places()
        visible = self._visible(len(self._text))
        keep = max((_overlap(visible, stop) for stop in self._stops), default=0)
        start = places[len(visible) - keep] if keep else len(self._text)
        start = min(start, len(self._text) - max((_overlap(self._text, stop) for stop in self._special), default=0))
        shown = self._visible(start)
        self._text, self._early = self._text[start:], max(0, self._early - start)
        self._hidden = [range(span.start - start, span.stop - start) for span in self._hidden if span.stop > start]
        return shown

    def _places(self) -> Sequence[int]:
        if not self._hidden:
            return range(len(self._text))
        return [place for place in range(len(self._text)) if not any(place in span for span in self._hidden)]

    def _visible(self, end: int) -> str:
        if not self._hidden:
            return self._text[:end]
        return "".join(self._text[place] for place in self._places() if place < end)


def _overlap(text: str, stop: str) -> int:
    first = stop[0]
    start = max(0, len(text) - len(stop) + 1)
    while (start := text.find(first, start)) >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0


class Answer:
    """Message of an output, whose content ends at a stop string. Reasoning and calls stay whole.

    `kinds` are those of the first tokens, as far as known, if `is_counted`.
    """

    def __init__(self, reader: MessageReader, stops: Sequence[str], *, include: bool, is_counted: bool = False) -> None:
        self.has_calls, self.has_reasoning = False, reader.has_reasoning
        self.kinds: list[PartKind] = []
        self._is_counted, self._unknown = is_counted, 0
        self._kind: PartKind | None = None  # of the last part
        self._kind_before: PartKind | None = None  # of the last token whose kind is known
        self._reader = reader
        self._content = StopStrings(stops, include=include) if stops else None
        self._raw = StopStrings(stops, include=include)
        self._unread: list[str] = []
        self._parts: list[Part] = []
        self._is_last = False

    def add(self, text: str, *, is_early: bool, is_last: bool) -> str:
        self._unread.append(text)
        self._is_last = is_last
        if self._is_counted:
            self._read(is_early=is_early)
            self._count()
        if self._content is None:
            return text
        self._read(is_early=is_early)
        if self.found:
            shown = self._raw.add(text)
            # The reader held back the stop string, since it may have begun a mark.
            return shown if self._raw.found else ""
        return self._raw.add(text, is_early=True) + (self._raw.flush() if is_last else "")

    @property
    def stop(self) -> str | None:
        return None if self._content is None else self._content.stop

    @property
    def found(self) -> bool:
        return self.stop is not None

    def _count(self) -> None:
        self._unknown += 1
        kind, self._kind = self._kind, None
        if kind is not None:
            # Text that was held back is of the kind that follows, unless a mark was.
            before = kind if kind is self._kind_before else PartKind.MARK
            self.kinds += [*[before] * (self._unknown - 1), kind]
            self._kind_before, self._unknown = kind, 0

    def take_parts(self) -> list[Part]:
        self._read()
        parts, self._parts = self._parts, []
        return parts

    def _read(self, *, is_early: bool = False) -> None:
        if self.found or not (self._unread or self._is_last):
            return
        parts = self._reader.feed("".join(self._unread))
        self._unread = []
        is_last, self._is_last = self._is_last, False
        self._show([*parts, *(self._reader.finish() if is_last else ())], is_early=is_early)
        if is_last:
            self._flush()

    def _show(self, parts: Sequence[Part], *, is_early: bool) -> None:
        for part in parts:
            if part.call is not None or part.is_reasoning or self._content is None:
                self._flush()
                self.has_calls = self.has_calls or part.call is not None
                self._append(part)
                continue
            shown = self._content.add(part.text, is_early=is_early)
            if shown:
                self._append(Part(shown))
            if self._content.found:
                return

    def _append(self, part: Part) -> None:
        self._parts.append(part)
        self._kind = part.kind

    def _flush(self) -> None:
        if self._content is not None and not self.found and (held := self._content.flush()):
            self._append(Part(held))
