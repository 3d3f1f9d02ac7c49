"""The engine's side of the socket: requests from messages into a loop, what its steps bring into messages.

Free of torch: what it drives is a `Loop`, the real one or a stand-in for tests.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec
import zmq

from skipjoin.config import ConfigError
from skipjoin.core.engine import EngineCore, RequestTooLargeError
from skipjoin.core.events import Event, Finished, Preempted, Started, Token
from skipjoin.model.config import ModelError
from skipjoin.sampling import ParameterError, SamplingParams, TokenDetail
from skipjoin.server.messages import (
    Abort,
    Add,
    Failed,
    FromEngine,
    Progress,
    Ready,
    Refused,
    Setup,
    Shutdown,
    Stats,
    Step,
    ToEngine,
)

# How often an idle engine wakes to see whether its parent lives, and how often a busy one tells its numbers.
HEARTBEAT_S = 1.0
# A turn of the loop that is shorter ran no step.
SPIN_S = 2e-4
_PR_SET_PDEATHSIG = 1


class Loop(Protocol):
    """What this process needs of an engine: `skipjoin.server.loop.EngineLoop`, or a stand-in for tests."""

    core: EngineCore

    def add(
        self,
        request_id: int,
        prompt: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> None: ...
    def abort(self, request_id: int) -> bool: ...
    @property
    def idle(self) -> bool: ...
    def step(self) -> list[Event]: ...
    def close(self) -> None: ...


OnProgress = Callable[[str, float], None]
Load = Callable[[Setup, OnProgress], tuple[Loop, Ready]]


class Digest:
    """Folds the core's events into one `Step` per engine step, and keeps the numbers that `Stats` tells."""

    def __init__(self) -> None:
        self.running: set[int] = set()
        self.preemptions = 0
        self.steps = 0
        self._arrived: dict[int, float] = {}  # of requests that have not run yet

    def arrived(self, request_id: int, now: float) -> None:
        """The request was added."""
        self._arrived[request_id] = now

    def fold(self, events: Iterable[Event]) -> Step | None:
        """What the API process must know of these events; None if that is nothing."""
        ids: list[int] = []
        tokens: list[int] = []
        details: dict[int, TokenDetail] = {}
        ended: list[tuple[int, str]] = []
        started: list[tuple[int, float]] = []
        for event in events:
            if isinstance(event, Token):
                if event.detail is not None:
                    details[len(ids)] = event.detail  # type: ignore[assignment]
                ids.append(event.request.id)
                tokens.append(event.token)
            elif isinstance(event, Finished):
                self.running.discard(event.request.id)
                self._arrived.pop(event.request.id, None)
                ended.append((event.request.id, event.reason.value))
            elif isinstance(event, Started):
                self.running.add(event.request.id)
                if (arrival := self._arrived.pop(event.request.id, None)) is not None:
                    started.append((event.request.id, event.now - arrival))
            elif isinstance(event, Preempted):
                self.running.discard(event.request.id)
                self.preemptions += 1
        if ids:
            self.steps += 1
        if ids or ended or started:
            return Step(ids, tokens, details, ended, started)
        return None

    def stats(self, core: EngineCore) -> Stats:
        """The numbers as of now."""
        running = len(self.running)
        waiting = max(0, len(core.requests) - running)
        used = core.kv.device_total - core.kv.device_free
        return Stats(running, waiting, used, self.preemptions, self.steps)


class EngineServer:
    """Moves messages between the socket and the loop; owns neither's content."""

    def __init__(self, socket: zmq.Socket[bytes], parent: int) -> None:
        self._socket = socket
        self._parent = parent
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._digest = Digest()
        self._told: Stats | None = None
        self._told_at = 0.0
        self._stopping = False

    def send(self, message: FromEngine) -> None:
        """Queue a message to the API process; never blocks."""
        self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)

    def run(self, loop: Loop) -> None:
        """Serve until told to stop or the parent is gone."""
        while not self._stopping and os.getppid() == self._parent:
            # Messages are taken between steps; only an idle engine waits for one.
            self._read_inbox(loop, wait=loop.idle)
            begin = time.monotonic()
            # After an abort of the last request the engine is idle, but its events are still to be told.
            events = loop.step()
            if events and (step := self._digest.fold(events)) is not None:
                self.send(step)
            self._tell_stats(loop)
            if not events and not loop.idle and time.monotonic() - begin < SPIN_S:
                self._socket.poll(1)  # nothing can run until a deadline or a message: do not spin

    def _read_inbox(self, loop: Loop, *, wait: bool) -> None:
        if wait and not self._socket.poll(int(HEARTBEAT_S * 1000)):
            return
        while not self._stopping:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(loop, self._decoder.decode(frame))

    def _handle(self, loop: Loop, message: ToEngine) -> None:
        if isinstance(message, Add):
            self._add(loop, message)
        elif isinstance(message, Abort):
            for request_id in message.ids:
                loop.abort(request_id)
        elif isinstance(message, Shutdown):
            self._stopping = True

    def _add(self, loop: Loop, message: Add) -> None:
        try:
            loop.add(
                message.id,
                message.prompt,
                message.params,
                priority=message.priority,
                deadline_s=message.deadline_s,
            )
        except ParameterError as error:
            self.send(Refused(message.id, error.param, str(error)))
        except RequestTooLargeError as error:
            self.send(Refused(message.id, "max_tokens", str(error)))
        else:
            self._digest.arrived(message.id, time.monotonic())

    def _tell_stats(self, loop: Loop) -> None:
        """Tell the numbers now and then while busy, and at once when the engine falls idle."""
        now = time.monotonic()
        if now - self._told_at < HEARTBEAT_S / 4 and not loop.idle:
            return
        stats = self._digest.stats(loop.core)
        if stats != self._told or now - self._told_at >= HEARTBEAT_S:
            self.send(stats)
            self._told, self._told_at = stats, now


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends. Where it cannot, the loop sees it within a heartbeat."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the API process is gone")


def serve_engine(load: Load) -> int:
    """Be the engine process, to its end: 0 if told to end, 1 if the engine could not start or failed.

    The setup is read from standard input; `load` makes the loop from it.
    """
    setup = msgspec.json.decode(sys.stdin.buffer.read(), type=Setup)
    die_with_parent(setup.parent)
    # Ctrl-C and service managers signal every process; when to end is the API process's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    # Without a high-water mark a send never blocks; what is in flight is bounded by the requests admitted.
    socket.set_hwm(0)
    socket.connect(setup.endpoint)
    server = EngineServer(socket, setup.parent)
    try:
        loop, ready = load(setup, lambda what, share: server.send(Progress(what, share)))
        server.send(ready)
        server.run(loop)
        loop.close()
        socket.close(linger=0)
    except (ConfigError, ModelError) as error:  # a setting or a model that cannot be used: its text says it all
        server.send(Failed(str(error)))
        socket.close(linger=1000)
        return 1
    except Exception as error:
        traceback.print_exc()
        server.send(Failed(f"{type(error).__name__}: {error}"))
        socket.close(linger=1000)
        return 1
    finally:
        context.term()
    return 0
