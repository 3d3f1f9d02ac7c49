from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

import msgspec
import zmq

from skipjoin.server.engines.messages import FromEngine, ToEngine

logger = logging.getLogger(__name__)

# Maximum time in which messages are read without a return to the event loop.
_TURN_S = 0.005


class Channel:
    """Non-blocking messages to and from one engine. Create it on the event loop."""

    def __init__(self, socket: zmq.Socket[bytes], on_message: Callable[[FromEngine], None]) -> None:
        self._socket = socket
        self._on_message = on_message
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._loop = asyncio.get_running_loop()
        self._fd = signal_of(socket)
        self._loop.add_reader(self._fd, self.read)
        self._loop.call_soon(self.read)  # a socket signals messages only after a read found it empty

    @property
    def closed(self) -> bool:
        return bool(self._socket.closed)

    def send(self, message: ToEngine) -> bool:
        try:
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        # The socket signals messages only once, and sending may consume the signal.
        self._loop.call_soon(self.read)
        return True

    def read(self, max_s: float = _TURN_S) -> None:
        end = self._loop.time() + max_s
        while not self._socket.closed:
            if self._loop.time() > end:
                self._loop.call_soon(self.read)
                return
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._on_message(self._decoder.decode(frame))
            except Exception:
                logger.exception("a message from the engine was not handled")

    def read_last(self) -> None:
        self.read(math.inf)

    def close(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close(linger=0)


def signal_of(socket: zmq.Socket[bytes]) -> int:
    return int(socket.getsockopt(zmq.FD))
