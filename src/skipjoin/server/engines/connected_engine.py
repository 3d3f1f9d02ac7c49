from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from skipjoin.adapters import Adapter
from skipjoin.observe.metric_snapshot import Snapshot
from skipjoin.server.engines import messages
from skipjoin.server.engines.sequences import EngineSequence

Question = messages.DescribeRequests | messages.FindHistories | messages.LoadAdapter
Reply = messages.RequestStates | messages.HistoriesFound | messages.AdapterLoaded


@dataclass(slots=True, eq=False)
class ConnectedEngine:
    """`send` must not block or raise."""

    number: int
    info: messages.Ready
    send: Callable[[messages.ToEngine], None]
    stats: messages.Stats = field(default_factory=lambda: messages.Stats(0, Snapshot.zero()))
    sequences: dict[int, EngineSequence] = field(default_factory=dict)
    questions: dict[int, asyncio.Future[Reply]] = field(default_factory=dict)
    is_hung: bool = False

    def ask(self, question: Question) -> asyncio.Future[Reply]:
        answer = self.questions[question.id] = asyncio.get_running_loop().create_future()
        self.send(question)
        return answer


class Replies(NamedTuple):
    by_engine: dict[ConnectedEngine, Reply]
    silent: list[int]


class LiveRequest(NamedTuple):
    """Unfinished sequence, without `replica` while it waits for one."""

    label: str
    choice: int
    replica: int | None
    state: messages.RequestReport
    owner: str
    adapter: str = ""

    def row(self) -> dict[str, Any]:
        state = msgspec.structs.asdict(self.state)
        del state["facts"]
        where = {"replica": self.replica, "adapter": self.adapter or None}
        return {"id": self.label, "choice": self.choice, **where, **state}


class LiveRequests(NamedTuple):
    requests: list[LiveRequest]
    silent: list[int]


def live_requests(replica: ConnectedEngine, reply: messages.RequestStates) -> list[LiveRequest]:
    return [
        LiveRequest(sequence.label, sequence.index, replica.number, state, sequence.owner, sequence.adapter)
        for state in reply.requests
        if (sequence := replica.sequences.get(state.number)) is not None
    ]


def waiting_request(sequence: EngineSequence, now: float) -> LiveRequest:
    state = messages.RequestReport.of(sequence.request, now, "waiting", None, wait_reason="no_replica")
    return LiveRequest(sequence.label, sequence.index, None, state, sequence.owner, sequence.adapter)


_Ask = Callable[[Callable[[int, ConnectedEngine], Question], float], Awaitable[Replies]]


class EngineAdapters:
    """Adapters of all engines, also of those that join later."""

    def __init__(self, engines: Iterable[ConnectedEngine], ask: _Ask) -> None:
        self._engines, self._ask = engines, ask
        # Changes since the engines' start, which a new engine repeats.
        self._added: dict[int, Adapter] = {}
        self._removed: list[int] = []

    async def load(self, adapter: Adapter, timeout_s: float) -> str:
        """Return why an engine cannot load an adapter, after all have unloaded it."""
        self._added[adapter.number] = adapter
        try:
            replies = await self._ask(lambda number, engine: messages.LoadAdapter(number, adapter), timeout_s)
        except asyncio.CancelledError:
            self.unload(adapter.number)
            raise
        errors = [reply.error for reply in replies.by_engine.values() if isinstance(reply, messages.AdapterLoaded)]
        if replies.silent:
            errors.append(f"adapter {adapter.name}: an engine did not load it within {timeout_s:g} s")
        error = next(filter(None, errors), "")
        if error:
            self.unload(adapter.number)
        return error

    def unload(self, number: int) -> None:
        if self._added.pop(number, None) is None:
            self._removed.append(number)
        for engine in self._engines:
            engine.send(messages.UnloadAdapter(number))

    def repeat(self, engine: ConnectedEngine, numbers: Iterator[int]) -> None:
        for adapter in self._added.values():
            engine.send(messages.LoadAdapter(next(numbers), adapter))
        for removed in self._removed:
            engine.send(messages.UnloadAdapter(removed))
