"""The API process's view of the engine: requests out, tokens in, and what happens when it dies.

`EngineClient` knows no transport: `send` takes what goes to the engine, `receive` gets what comes from it. The real
transport is `EngineHandle` in `engine_handle`; tests put a scripted engine in its place.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from skipjoin.core.request import FinishReason
from skipjoin.observe.metrics import Snapshot
from skipjoin.sampling import SamplingParams
from skipjoin.server.errors import ApiError, bad_request, engine_dead
from skipjoin.server.messages import Abort, Add, FromEngine, Ready, Refused, Stats, Step, ToEngine
from skipjoin.server.metrics import Metrics
from skipjoin.server.outputs import Output


class Mailbox:
    """Where the sequences of one HTTP request put their outputs, and where its handler waits for them."""

    __slots__ = ("_error", "_items", "_waiter")

    def __init__(self) -> None:
        self._items: list[Output] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None

    async def get(self) -> list[Output]:
        """All that came since the last call; waits while that is nothing. Raises what `fail` was given, after
        what came before it."""
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
        """Add an output and wake the handler."""
        self._items.append(output)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: Exception) -> None:
        """Nothing more will come: `get` raises the first error that it is told."""
        if self._error is None:
            self._error = error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Sequence:
    """One request at the engine, from `submit` until it is over."""

    __slots__ = ("id", "index", "mailbox", "on_end", "on_start")

    def __init__(self, request_id: int, mailbox: Mailbox, index: int) -> None:
        self.id = request_id
        self.mailbox = mailbox
        self.index = index
        self.on_start: Callable[[], None] | None = None
        self.on_end: Callable[[], None] | None = None


class EngineClient:
    """Submits requests, hands out their tokens, fails them when the engine dies.

    send: takes messages to the engine; must not block. info: set once the engine is ready.
    """

    def __init__(self, send: Callable[[ToEngine], None], metrics: Metrics) -> None:
        self._send = send
        self._metrics = metrics
        self._sequences: dict[int, Sequence] = {}
        # Ids are ours alone: whatever ids clients choose, two requests never meet.
        self._ids = itertools.count(1)
        self.info: Ready | None = None
        self.stats = Stats(0, Snapshot.zero())
        self.dead = False

    @property
    def active(self) -> int:
        """Sequences at the engine."""
        return len(self._sequences)

    def submit(
        self,
        mailbox: Mailbox,
        index: int,
        prompt: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        on_start: Callable[[], None] | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> Sequence:
        """Start a sequence whose outputs go to `mailbox` as number `index`.

        on_start: called when it first runs, if it does. on_end: called once when it is over, however that comes.
        Raises the error for clients if the engine is dead.
        """
        if self.dead:
            raise engine_dead()
        sequence = Sequence(next(self._ids), mailbox, index)
        sequence.on_start, sequence.on_end = on_start, on_end
        self._sequences[sequence.id] = sequence
        self._send(Add(sequence.id, prompt, params, priority, deadline_s))
        return sequence

    def abort(self, sequences: list[Sequence]) -> None:
        """Give up those of the sequences that are not over; nothing more comes from them."""
        ids = [sequence.id for sequence in sequences if sequence.id in self._sequences]
        if ids:
            for request_id in ids:
                self._close(self._sequences[request_id])
            if not self.dead:
                self._send(Abort(ids))

    def fail_all(self, error: ApiError) -> None:
        """Give up everything: each waiting handler gets the error."""
        sequences = list(self._sequences.values())
        for sequence in sequences:
            sequence.mailbox.fail(error)
        self.abort(sequences)

    def died(self) -> None:
        """The engine process is gone."""
        self.dead = True
        self.stats = Stats(0, self.stats.metrics.at_rest())
        self._metrics.engine(self.stats.metrics)
        self.fail_all(engine_dead())

    def receive(self, message: FromEngine) -> None:
        """Take a message from the engine."""
        if isinstance(message, Step):
            self._deliver(message)
        elif isinstance(message, Stats):
            self.stats = message
            self._metrics.engine(message.metrics)
        elif isinstance(message, Refused):
            if (sequence := self._sequences.get(message.id)) is not None:
                sequence.mailbox.fail(bad_request(message.text, message.param))
                self._close(sequence)
        elif isinstance(message, Ready):
            self.info = message

    def _deliver(self, step: Step) -> None:
        sequences, details = self._sequences, step.details
        for request_id in step.started:
            if (sequence := sequences.get(request_id)) is not None and sequence.on_start is not None:
                sequence.on_start()
        ended = {request_id: FinishReason(reason) for request_id, reason in step.ended}
        for position, (request_id, token) in enumerate(zip(step.ids, step.tokens, strict=True)):
            sequence = sequences.get(request_id)
            if sequence is None:  # aborted while the step ran
                continue
            reason = ended.pop(request_id, None) if ended else None
            detail = details.get(position) if details else None
            sequence.mailbox.put(Output(sequence.index, token, detail, reason))
            if reason is not None:
                self._close(sequence)
        for request_id, reason in ended.items():
            if (sequence := sequences.get(request_id)) is not None:
                sequence.mailbox.put(Output(sequence.index, None, None, reason))
                self._close(sequence)

    def _close(self, sequence: Sequence) -> None:
        del self._sequences[sequence.id]
        if sequence.on_end is not None:
            sequence.on_end()
