"""A sequence in the API process: its mailbox, and all that another engine needs to continue it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from skipjoin.core.request import FinishReason, Request
from skipjoin.engine.text import Output
from skipjoin.sampling import SamplingParams
from skipjoin.server.engines.messages import Add

# Called at the end of a sequence with the reason and the tokens that it has.
OnEnd = Callable[[FinishReason, int], None]


class Mailbox:
    """The outputs of the sequences of one job, and the means to wait for them."""

    __slots__ = ("_error", "_items", "_waiter")

    def __init__(self) -> None:
        self._items: list[Output] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None

    async def get(self) -> list[Output]:
        """All outputs since the last call; waits for the first one. Raises the error of `fail` once the outputs before
        it are taken."""
        if not self._items and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._items:
            items, self._items = self._items, []
            return items
        assert self._error is not None
        raise self._error

    def put(self, output: Output) -> None:
        """Add an output."""
        self._items.append(output)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: Exception) -> None:
        """Let `get` raise this error; only the first call counts."""
        if self._error is None:
            self._error = error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineSequence:
    """One request at an engine, from `submit` to its end.

    request: prompt, tokens so far, options, and arrival on this process's monotonic clock. params: with the seed, so
    that another engine continues with the same noise. index: of its choice. label: the id of the answer that it belongs
    to. patience: fires when it has waited for an engine for too long.
    """

    __slots__ = ("index", "label", "mailbox", "on_end", "on_start", "params", "patience", "request")

    def __init__(self, request: Request, params: SamplingParams, mailbox: Mailbox, index: int, label: str = "") -> None:
        self.request = request
        self.params = params
        self.mailbox = mailbox
        self.index = index
        self.label = label
        self.patience: asyncio.TimerHandle | None = None
        self.on_start: Callable[[], None] | None = None
        self.on_end: OnEnd | None = None

    @property
    def id(self) -> int:
        """Its id, which is the same at every engine."""
        return self.request.id

    def message(self, now: float) -> Add:
        """What makes an engine continue after the tokens that are known. now: seconds, on this process's clock."""
        request, params = self.request, self.params
        if request.output and params.prompt_logprobs is not None:
            params = replace(params, prompt_logprobs=None)  # the client has them since the first token
        return Add(
            id=request.id,
            prompt=list(request.prompt),
            params=params,
            options=request.options,
            output=list(request.output),
            age_s=now - request.arrival,
            forecast=request.forecast,
        )
