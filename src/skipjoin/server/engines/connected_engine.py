from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from skipjoin.observe.metric_snapshot import Snapshot
from skipjoin.server.engines.messages import (
    DescribeRequests,
    FindLives,
    LivesFound,
    Ready,
    RequestStates,
    Stats,
    ToEngine,
)
from skipjoin.server.engines.sequences import EngineSequence

Question = DescribeRequests | FindLives
Reply = RequestStates | LivesFound


class ConnectedEngine:
    """Engine that accepts requests. `send` must not block or raise."""

    __slots__ = ("info", "is_hung", "number", "questions", "send", "sequences", "stats")

    def __init__(self, number: int, info: Ready, send: Callable[[ToEngine], None]) -> None:
        self.number = number
        self.info = info
        self.send = send
        self.stats = Stats(0, Snapshot.zero())
        self.sequences: dict[int, EngineSequence] = {}
        self.questions: dict[int, asyncio.Future[Reply]] = {}
        self.is_hung = False

    def ask(self, question: Question) -> asyncio.Future[Reply]:
        answer = self.questions[question.id] = asyncio.get_running_loop().create_future()
        self.send(question)
        return answer


class Replies(NamedTuple):
    by_engine: dict[ConnectedEngine, Reply]
    silent: list[int]
