from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from skipjoin.core.request import FinishReason, Request
from skipjoin.engine.text import Output
from skipjoin.sampling import SamplingParams, TokenLogprob
from skipjoin.server.engines.messages import Add

# Called at the end of a sequence with the reason and its number of output tokens.
OnEnd = Callable[[FinishReason, int], None]


# Maximum of unread outputs of a job, log-probabilities included: a base (about 3 MB) and an allowance for each sequence
# (0.4 MB, or 200 steps with all log-probabilities).
MAX_WAITING, MAX_OF_SEQUENCE = 1 << 15, 1 << 12
# Maximum outputs that `get` returns, so that other streams are not delayed.
_TAKEN = 256


class OutputQueue:
    """At its bound, it calls `on_full` and drops further outputs."""

    __slots__ = ("_error", "_items", "_most", "_on_full", "_size", "_waiter")

    def __init__(self, on_full: Callable[[], None] = lambda: None, sequences: int = 1) -> None:
        self._on_full = on_full
        self._most = MAX_WAITING + sequences * MAX_OF_SEQUENCE
        self._items: list[Output] = []
        self._size = 0
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None

    async def ready(self) -> None:
        if not self._items and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    async def get(self) -> list[Output]:
        """Return at least one output. After the last, raise the error of `fail`."""
        if not self._items and self._error is None:
            await self.ready()
        if len(self._items) > _TAKEN:
            await asyncio.sleep(0)
        if self._items:
            items, self._items = self._items[:_TAKEN], self._items[_TAKEN:]
            self._size -= sum(map(_size, items))
            return items
        assert self._error is not None
        raise self._error

    def put(self, output: Output) -> None:
        if self._error is not None or self._size > self._most:
            return
        self._items.append(output)
        self._size += _size(output)
        if self._size > self._most:
            # Deferred, because the client is delivering the outputs of a step.
            asyncio.get_running_loop().call_soon(self._on_full)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _size(output: Output) -> int:
    return 1 if output.detail is None else 2 + len(output.detail.chosen.top)


@dataclass(slots=True, eq=False)
class EngineSequence:
    """`params` have a seed, so that another engine samples the same tokens.

    `deaths` are engine crashes while it ran, and `stuck` those since its last token that it may have caused.
    """

    request: Request
    params: SamplingParams
    mailbox: OutputQueue
    index: int
    label: str = ""
    owner: str = ""
    adapter: str = ""
    on_start: Callable[[], None] | None = None
    on_end: OnEnd | None = None
    cached_tokens: int = 0
    patience: asyncio.TimerHandle | None = None
    scores: list[TokenLogprob] = field(default_factory=list)
    alarm: asyncio.TimerHandle | None = None
    has_begun: bool = False
    deaths: int = 0
    stuck: int = 0

    @property
    def id(self) -> int:
        return self.request.id

    def started(self, cached_tokens: int) -> None:
        self.has_begun = True
        if not self.request.progress.output:  # otherwise another engine reported the hits
            self.cached_tokens = cached_tokens
        if self.on_start is not None:
            self.on_start()

    def message(self, now: float) -> Add:
        request, params = self.request, self.params
        if request.progress.output and params.prompt_logprobs is not None:
            params = replace(params, prompt_logprobs=None)  # the client got them with the first token
        return Add(
            id=request.id,
            prompt=list(request.prompt),
            params=params,
            options=request.options,
            output=list(request.progress.output),
            age_s=now - request.arrival,
            forecast=request.progress.forecast,
        )
