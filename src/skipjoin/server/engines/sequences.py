"""A sequence in the API process: its mailbox, and all that another engine needs to continue it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from skipjoin.core.request import FinishReason, Request
from skipjoin.engine.text import Output
from skipjoin.sampling import SamplingParams, Scored
from skipjoin.server.engines.messages import Add

# Called at the end of a sequence with the reason and the tokens that it has.
OnEnd = Callable[[FinishReason, int], None]


# Outputs of a job, log-probabilities of generated tokens included, that may wait to be taken, and how many more for
# each of its sequences: some 3 MB, and 0.4 MB for each, or 200 steps with all log-probabilities.
MOST_WAITING, MOST_OF_SEQUENCE = 1 << 15, 1 << 12
# Outputs that are taken at a time, so that other streams go on.
_TAKEN = 256


class Mailbox:
    """The outputs of the sequences of one job, and the means to wait for them.

    on_full: called, soon, when more outputs of so many `sequences` wait to be taken than may. Outputs are dropped after
    that, and after `fail`.
    """

    __slots__ = ("_error", "_items", "_most", "_on_full", "_size", "_waiter")

    def __init__(self, on_full: Callable[[], None] = lambda: None, sequences: int = 1) -> None:
        self._on_full = on_full
        self._most = MOST_WAITING + sequences * MOST_OF_SEQUENCE
        self._items: list[Output] = []
        self._size = 0
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None

    async def get(self) -> list[Output]:
        """Outputs since the last call; waits for the first one. Raises the error of `fail` once the outputs before it
        are taken."""
        if not self._items and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if len(self._items) > _TAKEN:
            await asyncio.sleep(0)
        if self._items:
            items, self._items = self._items[:_TAKEN], self._items[_TAKEN:]
            self._size -= sum(map(_size, items))
            return items
        assert self._error is not None
        raise self._error

    def put(self, output: Output) -> None:
        """Add an output."""
        if self._error is not None or self._size > self._most:
            return
        self._items.append(output)
        self._size += _size(output)
        if self._size > self._most:
            # Not at once: outputs of a step are being delivered.
            asyncio.get_running_loop().call_soon(self._on_full)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: Exception) -> None:
        """Let `get` raise this error; only the first call counts."""
        if self._error is None:
            self._error = error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _size(output: Output) -> int:
    return 1 if output.detail is None else 2 + len(output.detail.chosen.top)


class EngineSequence:
    """One request at an engine, from `submit` to its end.

    request: prompt, tokens so far, options, and arrival on this process's monotonic clock. params: with the seed, so
    that another engine continues with the same noise. index: of its choice. label: the id of the answer that it belongs
    to. owner: a hash of the client's key. patience: fires when it has waited for an engine for too long. alarm: fires
    when its deadline has passed. has_begun: whether it has run at the engine that it is at. deaths: engines that ended
    after it had begun there. stuck: those since its last token that it may have ended. scores: those of the prompt,
    before the first token. cached_tokens: tokens of the prompt whose KV was there at the engine where its output began.
    """

    __slots__ = (
        "alarm",
        "cached_tokens",
        "deaths",
        "has_begun",
        "index",
        "label",
        "mailbox",
        "on_end",
        "on_start",
        "owner",
        "params",
        "patience",
        "request",
        "scores",
        "stuck",
    )

    def __init__(self, request: Request, params: SamplingParams, mailbox: Mailbox, index: int, label: str = "") -> None:
        self.request = request
        self.params = params
        self.mailbox = mailbox
        self.index = index
        self.label = label
        self.owner = ""
        self.cached_tokens = 0
        self.patience: asyncio.TimerHandle | None = None
        self.scores: list[Scored] = []
        self.alarm: asyncio.TimerHandle | None = None
        self.has_begun = False
        self.deaths = self.stuck = 0
        self.on_start: Callable[[], None] | None = None
        self.on_end: OnEnd | None = None

    @property
    def id(self) -> int:
        """Its id, which is the same at every engine."""
        return self.request.id

    def started(self, cached_tokens: int) -> None:
        """It runs at its engine for the first time."""
        self.has_begun = True
        if not self.request.output:  # else its output began at another one
            self.cached_tokens = cached_tokens
        if self.on_start is not None:
            self.on_start()

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
