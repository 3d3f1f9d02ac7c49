from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator

from skipjoin.adapters import Adapter
from skipjoin.server.engines.connected_engine import ConnectedEngine, Question, Replies
from skipjoin.server.engines.messages import AdapterLoaded, LoadAdapter, UnloadAdapter

_Ask = Callable[[Callable[[int, ConnectedEngine], Question], float], Awaitable[Replies]]


class EngineAdapters:
    """Adapters that all engines have, also those that join later."""

    def __init__(self, engines: Iterable[ConnectedEngine], ask: _Ask) -> None:
        self._engines, self._ask = engines, ask
        # Changes since the engines' start, which a new engine repeats.
        self._added: dict[int, Adapter] = {}
        self._removed: list[int] = []

    async def load(self, adapter: Adapter, timeout_s: float) -> str:
        """Load an adapter. Return why an engine cannot, after all have unloaded it."""
        self._added[adapter.number] = adapter
        try:
            replies = await self._ask(lambda number, engine: LoadAdapter(number, adapter), timeout_s)
        except asyncio.CancelledError:
            self.unload(adapter.number)
            raise
        errors = [reply.error for reply in replies.by_engine.values() if isinstance(reply, AdapterLoaded)]
        if replies.silent:
            errors.append(f"adapter {adapter.name}: an engine did not load it within {timeout_s:g} s")
        error = next(filter(None, errors), "")
        if error:
            self.unload(adapter.number)
        return error

    def unload(self, number: int) -> None:
        """Unload an adapter that no sequence uses."""
        if self._added.pop(number, None) is None:
            self._removed.append(number)
        for engine in self._engines:
            engine.send(UnloadAdapter(number))

    def repeat(self, engine: ConnectedEngine, numbers: Iterator[int]) -> None:
        """Make the changes at an engine that joins, with the next of these numbers of questions."""
        for adapter in self._added.values():
            engine.send(LoadAdapter(next(numbers), adapter))
        for removed in self._removed:
            engine.send(UnloadAdapter(removed))
