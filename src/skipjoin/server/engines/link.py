"""Encrypted TCP links (CurveZMQ) between the API process and the engines of a cluster.

A broken link is never restored, because another engine may have taken over the lost one's requests.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
from collections.abc import Callable

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from skipjoin.server.engines.messages import FromEngine, ListenerKey, ToEngine

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

    def close(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close(linger=0)


def signal_of(socket: zmq.Socket[bytes]) -> int:
    return int(socket.getsockopt(zmq.FD))


# Time without traffic after which an engine is lost. ZeroMQ's threads exchange pings even while the engine computes.
SILENCE_S = 10.0
_HEARTBEAT_S = 1.0
# Time for the listener to answer a request for a link, and for the engine to open that link.
CONNECT_S = 30.0
# Delays after a disconnect event at which to check the socket, because its state changes after the event.
_AFTERMATH_S = (0.002, 0.02, 0.2, 2.0)
# Events that mean the loss of an engine's only connection.
_ENDS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_ENDS |= zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class EngineListener:
    def __init__(self, host: str, on_link: Callable[[EngineLink], None]) -> None:
        self._host = host
        self._on_link = on_link
        self._public, self._secret = zmq.curve_keypair()
        self._engines_public, self._engines_secret = zmq.curve_keypair()
        self._context = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(credentials_provider=self)
        self._socket = self._context.socket(zmq.REP)
        try:
            port = self._bind(self._socket)
        except zmq.ZMQError as error:
            self._end()
            raise OSError(error.errno, f"cannot listen on {host} for engines: {error.strerror}") from error
        self._links: set[EngineLink] = set()
        self._loop = asyncio.get_running_loop()
        self._fd = signal_of(self._socket)
        self._loop.add_reader(self._fd, self._answer)
        self._loop.call_soon(self._answer)
        self.key = ListenerKey(
            host=f"tcp://{host}",
            port=port,
            server=self._public.decode(),
            public=self._engines_public.decode(),
            secret=self._engines_secret.decode(),
        )

    def callback(self, domain: str, key: bytes) -> bool:
        """Tell the authenticator whether the owner of a key may connect."""
        return hmac.compare_digest(key, self._engines_public)

    def close(self) -> None:
        for link in list(self._links):
            link.close()
        self._loop.remove_reader(self._fd)
        self._end()

    def _end(self) -> None:
        self._socket.close(linger=0)
        self._authenticator.stop()
        self._context.term()

    def _bind(self, socket: zmq.Socket[bytes]) -> int:
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self._public, self._secret
        _keep_alive(socket)
        return int(socket.bind_to_random_port(f"tcp://{self._host}"))

    def _answer(self) -> None:
        while not self._socket.closed:
            try:
                self._socket.recv(zmq.NOBLOCK)  # empty: the handshake has authenticated the sender
            except zmq.Again:
                return
            socket = self._context.socket(zmq.PAIR)
            port = self._bind(socket)
            link = EngineLink(socket, on_end=self._links.discard)
            self._links.add(link)
            self._on_link(link)
            self._socket.send(b"%d" % port, zmq.NOBLOCK)


class EngineLink:
    """Connection to one engine. `on_lost` is called after the last message."""

    def __init__(self, socket: zmq.Socket[bytes], *, on_end: Callable[[EngineLink], None]) -> None:
        self.on_message: Callable[[FromEngine], None] = lambda message: None
        self.on_lost: Callable[[], None] = lambda: None
        self._on_end = on_end
        self._socket = socket
        self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._channel = Channel(socket, self._receive)
        self._loop = asyncio.get_running_loop()
        self._fd = signal_of(self._monitor)
        self._loop.add_reader(self._fd, self._look)
        self._loop.call_soon(self._look)  # a socket signals messages only after a read found it empty
        self._is_connected = False
        self._timer = self._loop.call_later(CONNECT_S, self._lose)

    def send(self, message: ToEngine) -> None:
        if not self._channel.closed and not self._channel.send(message) and self._is_connected:
            self._loop.call_soon(self._lose)

    def close(self) -> None:
        if self._channel.closed:
            return
        self._timer.cancel()
        self._loop.remove_reader(self._fd)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._channel.close()
        self._on_end(self)

    def _receive(self, message: FromEngine) -> None:
        self.on_message(message)

    def _look(self) -> None:
        while not self._channel.closed:
            try:
                event, _ = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if int.from_bytes(event[:2], "little") == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._is_connected = True
                self._timer.cancel()
            elif self._is_connected:
                # The event may be about a refused stranger. The socket cannot send if the engine itself is gone.
                self._check()
                for delay in _AFTERMATH_S:
                    self._loop.call_later(delay, self._check)

    def _check(self) -> None:
        if not self._channel.closed and not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
            self._lose()

    def _lose(self) -> None:
        if not self._channel.closed:
            self._channel.read(math.inf)  # the last messages
            self.close()
            self.on_lost()


# -- the engine's side ----------------------------------------------------------------------------------------


class NoAnswerError(Exception):
    pass


def connect(context: zmq.Context[zmq.Socket[bytes]], key: ListenerKey) -> tuple[zmq.Socket[bytes], Callable[[], bool]]:
    """Return a socket to the API process, and a function that returns whether it is connected.

    Raises:
        NoAnswerError: After `CONNECT_S`.
    """
    listener = context.socket(zmq.REQ)
    _lock(listener, key)
    listener.connect(f"{key.host}:{key.port}")
    try:
        listener.send(b"")
        if not listener.poll(int(CONNECT_S * 1000)):
            raise NoAnswerError(f"the API process does not answer at {key.host}:{key.port}")
        port = int(listener.recv())
    finally:
        listener.close(linger=0)
    socket = context.socket(zmq.PAIR)
    _lock(socket, key)
    socket.reconnect_ivl = -1
    monitor = socket.get_monitor_socket(_ENDS)
    socket.connect(f"{key.host}:{port}")
    return socket, lambda: not int(monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN


def _lock(socket: zmq.Socket[bytes], key: ListenerKey) -> None:
    socket.curve_serverkey = key.server.encode()
    socket.curve_publickey, socket.curve_secretkey = key.public.encode(), key.secret.encode()
    _keep_alive(socket)


def _keep_alive(socket: zmq.Socket[bytes]) -> None:
    socket.set_hwm(0)  # sends never block, and admission bounds the messages in transit
    socket.heartbeat_ivl = int(_HEARTBEAT_S * 1000)
    socket.heartbeat_timeout = int(SILENCE_S * 1000)
