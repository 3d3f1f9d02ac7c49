"""The engine's side of the socket: requests from messages into a loop, what its steps bring into messages.

Free of torch: what it drives is a `Loop`, the real one or a stand-in for tests.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from skipjoin.config import ConfigError
from skipjoin.core.engine import EngineCore, RequestTooLargeError
from skipjoin.core.events import Arrived, Event, Finished, Started, Token
from skipjoin.core.request import DEFAULT_OPTIONS, Request, RequestOptions
from skipjoin.model.config import ModelError
from skipjoin.observe.metrics import EngineMetrics
from skipjoin.observe.timeline import Timeline
from skipjoin.sampling import ParameterError, SamplingParams, TokenDetail
from skipjoin.server.engines.engine_program import ORPHANED
from skipjoin.server.engines.link import NoAnswerError, connect
from skipjoin.server.engines.messages import (
    Abort,
    Add,
    DescribeRequests,
    EngineFailed,
    FromEngine,
    ListenerKey,
    LoadProgress,
    Ready,
    Refused,
    RequestState,
    RequestStates,
    Setup,
    Shutdown,
    Stats,
    StepOutputs,
    ToEngine,
)

# How often an idle engine wakes to see whether its parent lives, and how often a busy one tells its numbers.
HEARTBEAT_S = 1.0
# A turn of the loop that is shorter ran no step.
SPIN_S = 2e-4
# Longest that what is left of a socket may hold up the end of the process, in seconds.
_DESTROY_S = 2.0
_PR_SET_PDEATHSIG = 1


class Loop(Protocol):
    """What this process needs of an engine: `skipjoin.engine.loop.EngineLoop`, or a stand-in for tests."""

    core: EngineCore

    def add(
        self,
        request_id: int,
        prompt: list[int],
        params: SamplingParams,
        *,
        options: RequestOptions = DEFAULT_OPTIONS,
        output: Sequence[int] = (),
        age_s: float = 0.0,
    ) -> None: ...
    def abort(self, request_id: int) -> bool: ...
    @property
    def idle(self) -> bool: ...
    def step(self) -> list[Event]: ...
    def close(self) -> None: ...


OnProgress = Callable[[str, float], None]
LoadEngine = Callable[[Setup, OnProgress], tuple[Loop, Ready]]


class Digest:
    """Folds the core's events into one `StepOutputs` per engine step."""

    def __init__(self) -> None:
        self._new: set[int] = set()  # requests that have not run yet

    def fold(self, events: Iterable[Event]) -> StepOutputs | None:
        """What the API process must know of these events; None if that is nothing."""
        ids: list[int] = []
        tokens: list[int] = []
        details: dict[int, TokenDetail] = {}
        ended: list[tuple[int, str]] = []
        started: list[int] = []
        errors: dict[int, str] = {}
        for event in events:
            if isinstance(event, Token):
                if event.detail is not None:
                    details[len(ids)] = event.detail  # type: ignore[assignment]
                ids.append(event.request.id)
                tokens.append(event.token)
            elif isinstance(event, Finished):
                self._new.discard(event.request.id)
                ended.append((event.request.id, event.reason.value))
                if event.detail:
                    errors[event.request.id] = event.detail
            elif isinstance(event, Started):
                if event.request.id in self._new:
                    self._new.remove(event.request.id)
                    started.append(event.request.id)
            elif isinstance(event, Arrived):
                self._new.add(event.request.id)
        if ids or ended or started:
            return StepOutputs(ids=ids, tokens=tokens, details=details, ended=ended, started=started, errors=errors)
        return None


def describe(core: EngineCore, now: float) -> list[RequestState]:
    """The requests that are not complete, in the scheduler's order. now: seconds, on the engine's clock.

    The order is read from `Ordering.rank`, which changes nothing; `Ordering.ranked` may promote requests.
    """
    requests = sorted(core.requests.values(), key=core.scheduler.policies.ordering.rank)
    return [_describe(core, request, place, now) for place, request in enumerate(requests)]


def _describe(core: EngineCore, request: Request, place: int, now: float) -> RequestState:
    held, wait = core.kv.blocks_of(request), _wait(core, request)
    return RequestState(
        number=request.id,
        state=_state_name(core, request),
        priority=request.options.priority,
        place=place,
        prompt_tokens=len(request.prompt),
        output_tokens=len(request.output),
        computed_tokens=request.computed,
        device_blocks=len(held.device) if held is not None else 0,
        host_blocks=len(held.host) if held is not None else 0,
        wait_reason=wait[0] if wait is not None else None,
        wait_s=now - wait[1] if wait is not None else None,
    )


def _state_name(core: EngineCore, request: Request) -> str:
    """See `RequestState`."""
    if request.last_plan >= core.scheduler.latest_plan:
        return "running"
    held = core.kv.blocks_of(request)
    if held is not None and (held.host or held.moving is not None):
        return "swapped"
    has_run = request.computed or request.evictions or len(request.output) > request.resumed_tokens
    return "preempted" if has_run else "waiting"


def _wait(core: EngineCore, request: Request) -> tuple[str, float] | None:
    """Why the request waits, and since when on the engine's clock; None while it runs."""
    return None


class TimelineWriter:
    """A timeline on the disk. If it cannot be written any more it says so once, and serving goes on without.

    Raises `ConfigError` if it cannot be begun.
    """

    def __init__(self, path: str) -> None:
        try:
            self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 (closed by `_end`)
        except OSError as error:
            raise ConfigError(f"timeline {path} cannot be written: {error.strerror}") from error
        self._timeline: Timeline | None = Timeline(self._file)

    def observe(self, events: Iterable[Event]) -> None:
        """Take what happened."""
        self._write(lambda timeline: timeline.observe(events))

    def flush(self) -> None:
        """Let the file have all that is over."""
        self._write(Timeline.flush)

    def close(self) -> None:
        """End the file."""
        self._write(Timeline.close)
        self._end()

    def _write(self, act: Callable[[Timeline], None]) -> None:
        if self._timeline is None:
            return
        try:
            act(self._timeline)
        except OSError as error:
            print(f"the timeline {self._file.name} ends here: {error.strerror}", file=sys.stderr, flush=True)
            self._end()

    def _end(self) -> None:
        self._timeline = None
        with suppress(OSError):  # what it could not write it cannot write now
            self._file.close()


class EngineServer:
    """Moves messages between the socket and the loop; owns neither's content.

    parent: process id of who started this one. is_linked: whether the API process is there.
    """

    def __init__(self, socket: zmq.Socket[bytes], parent: int, is_linked: Callable[[], bool] = lambda: True) -> None:
        self._socket = socket
        self._parent = parent
        self._is_linked = is_linked
        self._is_cut = False
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._told: Stats | None = None
        self._told_at = 0.0
        self._stopping = False

    def send(self, message: FromEngine) -> None:
        """Queue a message to the API process; never blocks. What nobody is there to take is lost."""
        try:
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            self._is_cut = True

    @property
    def is_alone(self) -> bool:
        """Whether the API process is gone, or has given this one up."""
        return self._is_cut or not self._is_linked()

    def run(self, loop: Loop, metrics: EngineMetrics, recorder: TimelineWriter | None = None) -> None:
        """Serve until told to stop, or the parent or the API process is gone. metrics, recorder: told all that
        happens."""
        digest = Digest()
        while not self._stopping and os.getppid() == self._parent and not self.is_alone:
            # Messages are taken between steps; only an idle engine waits for one.
            self._read_inbox(loop, wait=loop.idle)
            begin = time.monotonic()
            # After an abort of the last request the engine is idle, but its events are still to be told.
            events = loop.step()
            step = digest.fold(events)
            done = not loop.core.requests
            if step is not None and not done:
                self.send(step)
            metrics.observe(events)
            if recorder is not None:
                recorder.observe(events)
                if loop.idle:
                    recorder.flush()
            self._tell_stats(loop, metrics, at_once=done)
            if step is not None and done:
                # After the numbers: whoever asks for them once all requests were answered finds these in them.
                self.send(step)
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

        elif isinstance(message, DescribeRequests):
            self.send(RequestStates(message.id, describe(loop.core, time.monotonic())))

    def _add(self, loop: Loop, message: Add) -> None:
        try:
            loop.add(
                message.id,
                message.prompt,
                message.params,
                options=message.options,
                output=message.output,
                age_s=message.age_s,
            )
        except ParameterError as error:
            self.send(Refused(message.id, error.param, str(error)))
        except RequestTooLargeError as error:
            self.send(Refused(message.id, "max_tokens", str(error)))

    def _tell_stats(self, loop: Loop, metrics: EngineMetrics, *, at_once: bool) -> None:
        """Tell the numbers now and then."""
        now = time.monotonic()
        if now - self._told_at < HEARTBEAT_S / 4 and not at_once:
            return
        kv = loop.core.kv
        stats = Stats(kv.device_total - kv.device_free, metrics.snapshot())
        if stats != self._told or now - self._told_at >= HEARTBEAT_S:
            self.send(stats)
            self._told, self._told_at = stats, now


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends. Where it cannot, the loop sees it within a heartbeat."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the process that started the engine is gone")


def serve_engine(load: LoadEngine) -> int:
    """Be the engine process, to its end: 0 if told to end, 1 if the engine could not start or failed, or its link is
    over, `ORPHANED` if nobody answers at the API process's door.

    The setup is read from standard input; `load` makes the loop from it.
    """
    setup = msgspec.json.decode(sys.stdin.buffer.read(), type=Setup)
    die_with_parent(setup.parent)
    # Ctrl-C and service managers signal every process; when to end is the API process's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    context = zmq.Context()
    try:
        socket, is_linked = _connect(context, setup)
    except NoAnswerError as error:
        print(f"the engine ends: {error}", file=sys.stderr, flush=True)
        return ORPHANED
    server = EngineServer(socket, setup.parent, is_linked)
    recorder: TimelineWriter | None = None
    try:
        if setup.config.timeline is not None:
            recorder = TimelineWriter(setup.config.timeline)
        loop, ready = load(setup, lambda what, share: server.send(LoadProgress(what, share)))
        server.send(ready)
        if setup.ready_fd is not None:
            os.write(setup.ready_fd, b".")
        metrics = EngineMetrics(
            device_blocks=ready.device_blocks, block_size=ready.block_size, block_bytes=ready.block_bytes
        )
        try:
            server.run(loop, metrics, recorder)
        finally:
            loop.close()
        if server.is_alone:
            print("the engine ends: its link to the API process is over", file=sys.stderr, flush=True)
        code = int(server.is_alone)
        socket.close(linger=0)
        return code
    except (ConfigError, ModelError) as error:  # a setting or a model that cannot be used: its text says it all
        server.send(EngineFailed(str(error)))
        socket.close(linger=1000)
        return 1
    except Exception as error:
        traceback.print_exc()
        server.send(EngineFailed(f"{type(error).__name__}: {error}"))
        socket.close(linger=1000)
        return 1
    finally:
        if recorder is not None:
            recorder.close()
        _destroy(context)


def _destroy(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """End the context; but not wait long for it: ZeroMQ may wait for ever for a link that was lost while it was being
    made again, and this process must end."""
    ending = threading.Thread(target=context.destroy, kwargs={"linger": 0}, daemon=True)
    ending.start()
    ending.join(_DESTROY_S)


def _connect(context: zmq.Context[zmq.Socket[bytes]], setup: Setup) -> tuple[zmq.Socket[bytes], Callable[[], bool]]:
    """The socket to the API process, and whether that is there. Raises `NoAnswerError`."""
    if isinstance(setup.at, ListenerKey):
        return connect(context, setup.at)
    socket = context.socket(zmq.PAIR)
    # Without a high-water mark a send never blocks; what is in flight is bounded by the requests admitted.
    socket.set_hwm(0)
    socket.connect(setup.at)
    return socket, lambda: True  # it is the parent, too
