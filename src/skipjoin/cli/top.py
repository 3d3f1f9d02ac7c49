from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from skipjoin.cli.connection import Connection, call
from skipjoin.cli.options import Section, Values, takes
from skipjoin.cli.tables import Table
from skipjoin.report.numbers import duration

if TYPE_CHECKING:
    from skipjoin.cli.server_client import ServerClient

_BAR = 30
_HEAD_LINES = 7
_FILE_WIDTH = 160
# Columns, and the width of the terminal from which each is shown: ids must be whole, because `skipjoin explain` takes
# them.
_COLUMNS = {
    "request": 0,
    "class": 140,
    "state": 52,
    "why": 100,
    "waits": 60,
    "age": 80,
    "prompt": 140,
    "output": 80,
    "forecast": 120,
    "KV blocks": 120,
}
# Length of an id, and width up to which columns are close together.
_ID, _NARROW = len("chatcmpl-") + 32, 150
_STATE_STYLES = {"running": "green", "swapped": "cyan", "preempted": "yellow", "waiting": "red"}


@takes(server=Section(Connection))
def top(
    *,
    once: Annotated[bool, typer.Option("--once", help="Print the state once and exit, as without a terminal.")] = False,
    server: Values,
) -> None:
    """Show a server's requests live: which run, which wait and why, and how full the KV cache is."""
    from skipjoin.cli.server_client import ServerClient  # noqa: PLC0415

    async def watch(client: ServerClient) -> None:
        screen = _Screen()
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = _FILE_WIDTH
        live = Live(console=console, screen=True, auto_refresh=False) if console.is_terminal and not once else None
        if live is not None:
            live.start()
        try:
            async for name, data in client.events("/debug/events"):
                screen.take(name, json.loads(data))
                screen.width = console.width
                if name != "snapshot":
                    continue
                if live is None:
                    console.print(screen.render(None))
                    return
                live.update(screen.render(console.height), refresh=True)
        finally:
            if live is not None:
                live.stop()

    call(ServerClient, Connection(**server), watch)


class _Screen:
    def __init__(self) -> None:
        self._hello: Mapping[str, Any] = {}
        self._now: Mapping[str, Any] = {}
        self._before: Mapping[str, Any] | None = None
        self.width = _FILE_WIDTH

    def take(self, name: str, data: Any) -> None:
        if name == "hello":
            self._hello = data
        elif name == "snapshot":
            self._before, self._now = self._now or None, data

    def render(self, height: int | None) -> RenderableType:
        rows = self._now["rows"]
        room = len(rows) if height is None else max(1, height - _HEAD_LINES)
        more = sum(group["requests"] for group in self._now["groups"]) - min(room, len(rows))
        return Group(*self._head(), Text(), self._table(rows[:room]), Text(f"and {more} more" if more > 0 else ""))

    def _head(self) -> list[Text]:
        hello, now, load = self._hello, self._now, self._now["load"]
        clock = time.strftime("%H:%M:%S", time.localtime(now["time"]))
        speed = "" if (tps := self._tokens_per_s()) is None else f", {tps:.0f} tokens/s"
        waits: dict[str, int] = {}
        for group in now["groups"]:
            if (reason := group["wait_reason"]) is not None:
                waits[reason] = waits.get(reason, 0) + group["requests"]
        reasons = ", ".join(f"{count} {hello['reasons'][reason]['short']}" for reason, count in waits.items())
        lines = [
            Text(f"{hello['model']}, recipe {hello['recipe']}, {clock}{speed}", style="bold"),
            Text(f"{load['running']} running, {load['waiting']} waiting" + (f" ({reasons})" if reasons else "")),
        ]
        if (usage := load["kv_cache_usage"]) is not None:
            bar = "█" * round(usage * _BAR) + "░" * (_BAR - round(usage * _BAR))
            lines.append(Text(f"KV {bar} {usage:.0%}"))
        lines += map(Text, self._of_recipe())
        if now["silent_replicas"]:
            lines.append(Text(f"no reply from replicas {now['silent_replicas']}", style="red"))
        return lines

    def _of_recipe(self) -> Iterator[str]:
        sums = {
            name: [
                sum(values)
                for values in zip(*(engine.get(name) or () for engine in self._now["engines"]), strict=False)
            ]
            for name in ("queue_requests", "deadline_requests", "kv_hosted_requests", "kv_hosted_blocks")
        }
        if levels := [f"{level}: {n:.0f}" for level, n in enumerate(sums["queue_requests"]) if n]:
            yield f"requests by level of the queue, 0 first: {', '.join(levels)}"
        if any(sums["deadline_requests"]):
            in_time, late = sums["deadline_requests"]
            yield f"next tokens of real-time requests: {in_time:.0f} in time, {late:.0f} late"
        if any(sums["kv_hosted_requests"]):
            (requests,), (blocks,) = sums["kv_hosted_requests"], sums["kv_hosted_blocks"]
            yield f"{requests:.0f} requests hosted in {blocks:.0f} blocks that others reserve"

    def _tokens_per_s(self) -> float | None:
        if self._before is None or not self._hello["sees_totals"]:
            return None
        tokens = [
            sum(engine["generation_tokens_total"] for engine in part["engines"]) for part in (self._before, self._now)
        ]
        seconds = self._now["time"] - self._before["time"]
        return max(0.0, tokens[1] - tokens[0]) / seconds if seconds > 0 else None

    def _table(self, rows: list[Mapping[str, Any]]) -> Table:
        shown = [name for name, width in _COLUMNS.items() if self.width >= width]
        table = Table(box=None, padding=(0, 2 if self.width > _NARROW else 1, 0, 0), pad_edge=False)
        for name in shown:
            # An id is what explain takes, so others give way.
            is_id = name == "request"
            width = min(_ID, self.width) if is_id else 0
            table.add_column(name, no_wrap=not is_id, overflow="fold" if is_id else "ellipsis", min_width=width)
        reasons = self._hello["reasons"]
        for row in rows:
            reason, forecast = row["wait_reason"], row["predicted_tokens"]
            cells: dict[str, RenderableType] = {
                "request": Text(row["id"] + (f" #{row['choice']}" if row["choice"] else "")),
                "class": Text(row["service"] + (" !" if row["is_urgent"] else "")),
                "state": Text(row["state"], style=_STATE_STYLES.get(row["state"], "")),
                "why": Text("" if reason is None else reasons[reason]["short"]),
                "waits": "" if row["wait_s"] is None else duration(row["wait_s"]),
                "age": duration(row["age_s"]),
                "prompt": str(row["prompt_tokens"]),
                "output": f"{row['output_tokens']}/{row['max_tokens']}",
                "forecast": "" if forecast is None else f"{forecast:.0f}",
                "KV blocks": str(row["device_blocks"]) + (f"+{row['cpu_blocks']}" if row["cpu_blocks"] else ""),
            }
            table.add_row(*(cells[name] for name in shown))
        return table
