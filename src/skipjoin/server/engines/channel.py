"""A socket to one engine on the event loop: messages out without blocking, messages in as they arrive."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

import msgspec
import zmq

from skipjoin.server.engines.messages import FromEngine, ToEngine

logger = logging.getLogger(__name__)

# Seconds for which messages are read in one go.
_TURN_S = 0.005


class Channel:
    """Made on the event loop, once `socket`, of kind PAIR, is bound. on_message: called with the engine's messages."""

    def __init__(self, socket: zmq.Socket[bytes], on_message: Callable[[FromEngine], None]) -> None:
        self._socket = socket
        self._on_message = on_message
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._loop = asyncio.get_running_loop()
        self._fd = signal_of(socket)
        self._loop.add_reader(self._fd, self.read)
        self._loop.call_soon(self.read)  # a socket signals messages only after it was found empty

    @property
    def closed(self) -> bool:
        """Whether the channel is closed."""
        return bool(self._socket.closed)

    def send(self, message: ToEngine) -> bool:
        """Queue a message; False if no engine is connected."""
        try:
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        # The socket signals messages only once, and sending may have consumed the signal.
        self._loop.call_soon(self.read)
        return True

    def read(self, most_s: float = _TURN_S) -> None:
        """Take the messages that have arrived; after so many seconds the loop goes on in between."""
        end = self._loop.time() + most_s
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
        """Take all messages, before the channel is closed."""
        self.read(math.inf)

    def close(self) -> None:
        """Drop messages that were not sent, and free the socket."""
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close(linger=0)


def signal_of(socket: zmq.Socket[bytes]) -> int:
    """The file descriptor that becomes readable when the state of the socket changes."""
    return int(socket.getsockopt(zmq.FD))
