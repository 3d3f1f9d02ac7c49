"""A socket to one engine on the event loop: messages out without blocking, messages in as they arrive."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec
import zmq

from skipjoin.server.engines.messages import FromEngine, ToEngine

logger = logging.getLogger(__name__)


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

    def read(self) -> None:
        """Take all messages that have arrived."""
        while not self._socket.closed:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._on_message(self._decoder.decode(frame))
            except Exception:
                logger.exception("a message from the engine was not handled")

    def close(self) -> None:
        """Drop messages that were not sent, and free the socket."""
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close(linger=0)


def signal_of(socket: zmq.Socket[bytes]) -> int:
    """The file descriptor that becomes readable when the state of the socket changes."""
    return int(socket.getsockopt(zmq.FD))
