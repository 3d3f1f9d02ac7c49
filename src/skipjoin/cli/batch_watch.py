from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.text import Text

from skipjoin.cli.progress import Bars

if TYPE_CHECKING:
    from skipjoin.cli.batch_client import BatchClient

FINAL = ("completed", "failed", "expired", "cancelled")
_POLL_S = 1.0
# Window of speed measurements in seconds.
_SPEED_S = 30.0


class Speed:
    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, int]] = deque()

    def add(self, now: float, lines: int, tokens: int) -> None:
        self._seen.append((now, lines, tokens))
        while len(self._seen) > 2 and self._seen[0][0] < now - _SPEED_S:
            self._seen.popleft()

    def per_second(self) -> tuple[float, float]:
        (begin, *first), (end, *last) = self._seen[0], self._seen[-1]
        span = max(end - begin, 1e-9)
        return (last[0] - first[0]) / span, (last[1] - first[1]) / span


class _Bar(Bars):
    note = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield Text(self.note)


class Watch:
    def __init__(self, console: Console | None = None) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()
        self._bars = _Bar(*columns, console=console, line=self._line, transient=False)
        self._status = ""
        self._task = self._bars.add_task("", total=None)
        self._speed = Speed()

    def __enter__(self) -> Watch:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    async def follow(self, client: BatchClient, batch_id: str) -> dict[str, Any]:
        """Show a batch until it has finished, and return its final state. Wait for an unavailable server."""
        from skipjoin.cli.server_client import ServerClientError  # noqa: PLC0415

        batch = await client.batch(batch_id)
        while True:
            self._show(batch)
            if batch["status"] in FINAL:
                return batch
            await asyncio.sleep(_POLL_S)
            try:
                batch = await client.batch(batch_id)
            except ServerClientError as error:
                if not error.is_lost:
                    raise
                self._bars.note = f"{error}; it is tried again"
                self._bars.update(self._task)

    def _show(self, batch: dict[str, Any]) -> None:
        counts = batch["request_counts"]
        done, total = counts["completed"] + counts["failed"], counts["total"]
        self._speed.add(time.monotonic(), done, (batch.get("usage") or {}).get("output_tokens", 0))
        lines_s, tokens_s = self._speed.per_second()
        note = f"{done} of {total} lines, {counts['failed']} failed" if total else "no lines yet"
        if batch["status"] == "in_progress":
            left_s = batch["expires_at"] - time.time()
            note += f", {tokens_s:.0f} tokens/s, {_outlook(total - done, lines_s, left_s)}"
        self._bars.note = note
        before, self._status = self._status, batch["status"]
        self._bars.update(self._task, description=self._status, completed=done, total=total or None)
        if self._status != before:
            self._bars.say()

    def _line(self) -> str:
        return f"{self._status}: {self._bars.note}"


def _outlook(lines: int, lines_s: float, left_s: float) -> str:
    window = f"the window ends in {_spell(left_s)}"
    if not lines_s:
        return window
    end_s = lines / lines_s
    return f"done in {_spell(end_s)}, {'before' if end_s < left_s else 'AFTER'} {window}"


def _spell(seconds: float) -> str:
    return str(timedelta(seconds=max(0, round(seconds))))


def summary(batch: dict[str, Any]) -> str:
    counts = batch["request_counts"]
    lines = [
        f"{batch['id']} {batch['status']}: {counts['completed']} of {counts['total']} lines done, "
        f"{counts['failed']} failed"
    ]
    for what in ("output", "error"):
        if batch.get(f"{what}_file_id"):
            lines[0] += f", {what} file {batch[f'{what}_file_id']}"
    for error in (batch.get("errors") or {}).get("data", ()):
        line, message = error.get("line"), error["message"]
        where = "" if line is None or message.startswith(f"line {line}") else f"line {line}: "
        lines.append(f"  {where}{message} ({error['code']})")
    return "\n".join(lines)
