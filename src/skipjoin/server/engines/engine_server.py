from __future__ import annotations

import ctypes
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec
import zmq

from skipjoin.config import ConfigError
from skipjoin.core.engine import RequestTooLargeError
from skipjoin.core.events import Event
from skipjoin.core.step import StepPlan
from skipjoin.kv_format import SWAP_FORMATS
from skipjoin.model.errors import AdapterError, ModelError
from skipjoin.model.folder import model_id
from skipjoin.observe.metrics import EngineMetrics
from skipjoin.recipes import located_errors
from skipjoin.sampling import ParameterError, TokenDetail
from skipjoin.server import logs
from skipjoin.server.engines import messages
from skipjoin.server.engines.engine_observer import EngineObserver, EventBuffer
from skipjoin.server.engines.engine_program import ORPHANED, describe_error
from skipjoin.server.engines.heartbeat import Heartbeat, print_stacks
from skipjoin.server.engines.link import NoAnswerError, connect
from skipjoin.server.engines.self_checks import StallWatch, recover_blocks
from skipjoin.server.engines.timeline_writer import TimelineWriter
from skipjoin.system.garbage import resume_garbage_collection
from skipjoin.system.machine import resident_bytes

if TYPE_CHECKING:
    from skipjoin.adapters import Adapter
    from skipjoin.engine.loop import EngineLoop
from skipjoin.core.events import Finished, Token


class StepOutputsBuilder:
    """It sends the ids of new requests before their step: the suspects if the engine crashes."""

    def __init__(self) -> None:
        self._new: set[int] = set()  # requests that have not run yet

    def arrived(self, request_id: int) -> None:
        self._new.add(request_id)

    def begin(self, plan: StepPlan) -> messages.StepOutputs | None:
        new = [slice_ for slice_ in plan.slices if slice_.request.id in self._new] if self._new else []
        started = [slice_.request.id for slice_ in new]
        self._new.difference_update(started)
        # The first slice of a request begins after its prefix-cache hits.
        cached = {slice_.request.id: slice_.start for slice_ in new if slice_.start}
        return messages.StepOutputs(started=started, cached=cached) if started else None

    def fold(self, events: Iterable[Event]) -> messages.StepOutputs | None:
        out = messages.StepOutputs()
        for event in events:
            if isinstance(event, Token):
                if event.detail is not None:
                    out.details[len(out.ids)] = event.detail  # type: ignore[assignment]
                out.ids.append(event.request.id)
                out.tokens.append(event.token)
            elif isinstance(event, Finished):
                self._new.discard(event.request.id)
                out.ended.append((event.request.id, event.reason.value))
                if event.detail:
                    out.errors[event.request.id] = event.detail
                if event.is_refused:
                    out.refused.append(event.request.id)
        return out if out.ids or out.ended else None


logger = logging.getLogger(__name__)

# Interval in which an idle engine checks its parent, and a busy one sends its metrics.
HEARTBEAT_S = 1.0
# A loop iteration that is shorter than this ran no step.
SPIN_S = 2e-4
# Maximum tokens of a `PromptScores` message, which take 2 ms to decode with all alternatives.
SCORES_AT_ONCE = 512
# Maximum time that an open socket can delay the exit of the process.
_DESTROY_S = 2.0
_PR_SET_PDEATHSIG = 1


OnProgress = Callable[[str, float], None]
LoadEngine = Callable[[messages.Setup, OnProgress], "tuple[EngineLoop, messages.Ready]"]


class Recorder(Protocol):
    """`flush` is called when the engine becomes idle."""

    def observe(self, events: Iterable[Event]) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class EngineServer:
    def __init__(
        self,
        socket: zmq.Socket[bytes],
        parent: int,
        is_linked: Callable[[], bool] = lambda: True,
        heartbeat: Heartbeat | None = None,
        stall_s: float = math.inf,
    ) -> None:
        self.heartbeat = heartbeat or Heartbeat(None, math.inf)
        self._stalls = StallWatch(stall_s)
        self._socket = socket
        self._parent = parent
        self._is_linked = is_linked
        self._is_cut = False
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(messages.ToEngine)
        self._builder = StepOutputsBuilder()
        self._observer = EngineObserver()
        self._events = EventBuffer()
        self._sent: messages.Stats | None = None
        self._sent_at = 0.0
        self._stopping = False

    def send(self, message: messages.FromEngine) -> None:
        """Queue a message without blocking; without a connection it is lost."""
        try:
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            self._is_cut = True

    def progress(self, what: str, share: float) -> None:
        self.heartbeat.turned()
        self.send(messages.LoadProgress(what, share))

    @property
    def is_alone(self) -> bool:
        return self._is_cut or not self._is_linked()

    def run(self, loop: EngineLoop, metrics: EngineMetrics, recorders: Sequence[Recorder] = ()) -> None:
        loop.on_plan = self._begin
        observe = (metrics.observe, self._observer.observe, *(recorder.observe for recorder in recorders))
        self._events = EventBuffer(observe)
        try:
            while not self._stopping and os.getppid() == self._parent and not self.is_alone:
                # After an abort of the last request the engine is idle, but has events to send first.
                self._read_inbox(loop, wait=loop.idle and not loop.core.scheduler.events)
                self._turn(loop, metrics, recorders)
        finally:
            self._events.flush()

    def _turn(self, loop: EngineLoop, metrics: EngineMetrics, recorders: Sequence[Recorder]) -> None:
        self.heartbeat.turned()
        begin = time.monotonic()
        events = loop.step()
        done = not loop.core.requests
        step = self._builder.fold(events)
        if step is not None and not done:
            # First, so that the API process works while the engine is between two steps and leaves cores idle.
            self._send_step(step)
        self._events.add(events)
        # Read messages before planning, so that the next step includes new requests.
        self._read_inbox(loop, wait=False)
        loop.submit()
        self._stalls.check(loop.core)
        self._send_stats(loop, metrics, at_once=done)
        if step is not None and done:
            # After the metrics, so that they are complete once all requests have been answered.
            self._send_step(step)
        if loop.idle:
            self._events.flush()
            for recorder in recorders:
                recorder.flush()
        if not events and not loop.idle and time.monotonic() - begin < SPIN_S:
            self._socket.poll(1)  # nothing can run until a deadline or a message, so do not spin

    def _send_step(self, step: messages.StepOutputs) -> None:
        for position, (chosen, prompt, vector) in list(step.details.items()):
            for at in range(0, len(prompt), SCORES_AT_ONCE):
                self.send(messages.PromptScores(step.ids[position], list(prompt[at : at + SCORES_AT_ONCE])))
            step.details[position] = TokenDetail(chosen, vector=vector)
        self.send(step)

    def _begin(self, plan: StepPlan) -> None:
        if (begun := self._builder.begin(plan)) is not None:
            self.send(begun)

    def _read_inbox(self, loop: EngineLoop, *, wait: bool) -> None:
        if wait and not self._socket.poll(int(HEARTBEAT_S * 1000)):
            self._calibrate(loop)
            return
        while not self._stopping:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(loop, self._decoder.decode(frame))

    def _calibrate(self, loop: EngineLoop) -> None:
        """Measure steps until a message arrives, in half of the idle time."""
        until = time.monotonic() + HEARTBEAT_S
        while not self._socket.poll(0) and loop.calibrate() and time.monotonic() < until:
            self.heartbeat.turned()

    def _handle(self, loop: EngineLoop, message: messages.ToEngine) -> None:
        if isinstance(message, messages.Add):
            self._add(loop, message)
        elif isinstance(message, messages.Abort):
            for request_id in message.ids:
                loop.abort(request_id, message.reason)
        elif isinstance(message, messages.Shutdown):
            self._stopping = True
        elif isinstance(message, messages.Reforecast):
            loop.reforecast(message.id, message.forecast)
        elif isinstance(message, messages.DescribeRequests):
            self._events.flush()
            self.send(self._observer.describe(message, loop.core, time.monotonic(), loop.cost, loop.between_steps_s))
        elif isinstance(message, messages.FindHistories):
            self._events.flush()
            self.send(self._observer.find(message, loop.core, time.monotonic()))
        elif isinstance(message, messages.LoadAdapter):
            self.send(messages.AdapterLoaded(message.id, self._load_adapter(loop, message.adapter)))
        elif isinstance(message, messages.UnloadAdapter):
            loop.unload_adapter(message.number)

    @staticmethod
    def _load_adapter(loop: EngineLoop, adapter: Adapter) -> str:
        try:
            loop.load_adapter(adapter)
        except AdapterError as error:
            logger.warning("%s", error)
            return str(error)
        logger.info("adapter %s is loaded: %.1f MiB", adapter.name, loop.adapter_bytes[adapter.number] / (1 << 20))
        return ""

    def _add(self, loop: EngineLoop, message: messages.Add) -> None:
        try:
            loop.add(
                message.id,
                message.prompt,
                message.params,
                options=message.options,
                forecast=message.forecast,
                output=message.output,
                age_s=message.age_s,
            )
            self._builder.arrived(message.id)
        except ParameterError as error:
            self.send(messages.Refused(message.id, error.param, str(error)))
        except RequestTooLargeError as error:
            self.send(messages.Refused(message.id, "max_tokens", str(error)))

    def _send_stats(self, loop: EngineLoop, metrics: EngineMetrics, *, at_once: bool) -> None:
        now = time.monotonic()
        if now - self._sent_at < HEARTBEAT_S / 4 and not at_once:
            return
        self._events.flush()
        kv, cache = loop.core.kv, loop.core.kv.cache
        metrics.measured({"adapter_bytes": [loop.adapter_bytes.total()]})
        metrics.recovered(recover_blocks(loop.core.scheduler.kv, is_idle=loop.idle))
        if cache is not None:
            metrics.measured(
                {
                    "kv_cached_blocks": [cache.cached_blocks],
                    "kv_leased_blocks": [cache.leased_blocks],
                    "kv_cpu_cached_blocks": [cache.cached_cpu_blocks],
                    "kv_shared_blocks": [cache.shared_blocks],
                }
            )
        if kv.sharing is not None:
            metrics.measured({"kv_bidirectional_blocks": [kv.sharing.bidirectional_blocks]})
        if (measured := loop.core.scheduler.policies.measured) is not None:
            metrics.measured(measured.measure(now))
        stats = messages.Stats(kv.device_total - kv.device_free, metrics.snapshot())
        if stats != self._sent or now - self._sent_at >= HEARTBEAT_S:
            self.send(stats)
            self._sent, self._sent_at = stats, now


def die_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        logger.error("the engine ends: the process that started it has exited")
        sys.exit(ORPHANED)


def serve_engine(load: LoadEngine) -> int:
    """Run the engine process with the `Setup` on standard input.

    Return 0 after `Shutdown`, 1 after a failure or a broken link, `ORPHANED` without an API process.
    """
    logs.configure_engine()
    setup = msgspec.json.decode(sys.stdin.buffer.read(), type=messages.Setup)
    die_with_parent(setup.parent)
    print_stacks()
    # Ctrl-C and service managers signal all processes, but the API process decides when the engine stops.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    context = zmq.Context()
    try:
        socket, is_linked = _connect(context, setup.at)
    except NoAnswerError as error:
        logger.error("the engine ends: %s", error)
        return ORPHANED
    server = EngineServer(
        socket, setup.parent, is_linked, Heartbeat(setup.heartbeat_fd, setup.limits.step_s), setup.limits.hang_s
    )
    recorders: list[Recorder] = []
    try:
        if setup.config.timeline is not None:
            recorders.append(TimelineWriter(setup.config.timeline))
        _load_and_run(load, setup, server, recorders)
        if server.is_alone:
            logger.error("the engine ends: its link to the API process is closed")
        code = int(server.is_alone)
        socket.close(linger=0)
        return code
    except Exception as error:
        is_setting = isinstance(error, ConfigError | ModelError)  # the text is enough without a stack trace
        if not is_setting:
            logger.exception("the engine failed")
        server.send(messages.EngineFailed(str(error) if is_setting else describe_error(error)))
        socket.close(linger=1000)
        return 1
    finally:
        for recorder in recorders:
            recorder.close()
        _destroy(context)


def _load_and_run(load: LoadEngine, setup: messages.Setup, server: EngineServer, recorders: list[Recorder]) -> None:
    loop, ready = load(setup, server.progress)
    if setup.config.otlp_traces_endpoint is not None:
        from skipjoin.server.engines.tracing import TraceWriter  # noqa: PLC0415 (needs an extra)

        recorders.append(TraceWriter(setup.config.otlp_traces_endpoint, model_id(ready.model, ready.folder)))
    resume_garbage_collection()
    server.send(ready)
    server.heartbeat.start()
    metrics = EngineMetrics(
        device_blocks=ready.device_blocks,
        block_size=ready.block_size,
        block_bytes=ready.cpu_block_bytes,
        is_compressed=not SWAP_FORMATS[ready.swap_dtype].is_exact,
        resident_bytes=resident_bytes,
    )
    try:
        with located_errors():
            server.run(loop, metrics, recorders)
    finally:
        loop.close()


def _destroy(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """ZeroMQ may block forever on a lost link."""
    ending = threading.Thread(target=context.destroy, kwargs={"linger": 0}, daemon=True)
    ending.start()
    ending.join(_DESTROY_S)


def _connect(
    context: zmq.Context[zmq.Socket[bytes]], at: str | messages.ListenerKey
) -> tuple[zmq.Socket[bytes], Callable[[], bool]]:
    if isinstance(at, messages.ListenerKey):
        return connect(context, at)
    socket = context.socket(zmq.PAIR)
    # Without a high-water mark sends never block. Admission bounds the messages in transit.
    socket.set_hwm(0)
    socket.connect(at)
    return socket, lambda: True  # the API process is the parent, which `run` checks
