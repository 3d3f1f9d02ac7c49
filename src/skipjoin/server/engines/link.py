"""Sockets to engines that run anywhere in a cluster: TCP, encrypted, and open to nobody but this server's own engines.

An engine connects to the `EngineListener` and gets a socket of its own, an `EngineLink`. CurveZMQ encrypts and
authenticates either side by keys that are made at every start; engines get theirs with their setup. A link that breaks
is over: its socket is closed, and its engine ends. So an engine that was given up cannot come back with tokens that
another one generates by now. The end shows within milliseconds where a process ended, and within `SILENCE_S` where a
machine or the network did.

CurveZMQ, and not plain TCP with a challenge: prompts cross the network, and ZeroMQ's own thread keeps sending while the
engine computes, so that the loop is the same for both kinds of sockets.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable

import zmq
from zmq.auth.thread import ThreadAuthenticator

from skipjoin.server.engines.channel import Channel, signal_of
from skipjoin.server.engines.messages import FromEngine, ListenerKey, ToEngine

# An engine whose machine says nothing for so long is given up; ZeroMQ asks every second, and answers while the engine
# computes.
SILENCE_S = 10.0
_HEARTBEAT_S = 1.0
# What an engine has to come in after it knocked, and waits for an answer to its knock. Who does not answer for so long
# is taken to be gone for good.
KNOCK_S = 30.0
# A connection's end is told a moment before its socket knows of it: when to look.
_AFTERMATH_S = (0.002, 0.02, 0.2, 2.0)
# What an engine's only connection ends with.
_ENDS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_ENDS |= zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class EngineListener:
    """Where engines come in. host: this machine's address, as engines reach it. on_link: called with each of them.

    Raises OSError if the address cannot be used.
    """

    def __init__(self, host: str, on_link: Callable[[EngineLink], None]) -> None:
        self._host = host
        self._on_link = on_link
        self._public, self._secret = zmq.curve_keypair()
        self._engines_public, self._engines_secret = zmq.curve_keypair()
        self._context = zmq.Context()
        self._guard = ThreadAuthenticator(self._context)
        self._guard.start()
        self._guard.configure_curve_callback(credentials_provider=_Allowed(self._engines_public))
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
            f"tcp://{host}", port, self._public.decode(), self._engines_public.decode(), self._engines_secret.decode()
        )

    def close(self) -> None:
        """End every link."""
        for link in list(self._links):
            link.close()
        self._loop.remove_reader(self._fd)
        self._end()

    def _end(self) -> None:
        self._socket.close(linger=0)
        self._guard.stop()
        self._context.term()

    def _bind(self, socket: zmq.Socket[bytes]) -> int:
        """Bind to a free port; which one."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self._public, self._secret
        _keep_alive(socket)
        return int(socket.bind_to_random_port(f"tcp://{self._host}"))

    def _answer(self) -> None:
        while not self._socket.closed:
            try:
                self._socket.recv(zmq.NOBLOCK)  # it has the key, which says it all
            except zmq.Again:
                return
            socket = self._context.socket(zmq.PAIR)
            port = self._bind(socket)
            link = EngineLink(socket, on_end=self._links.discard)
            self._links.add(link)
            self._on_link(link)
            self._socket.send(b"%d" % port, zmq.NOBLOCK)


class EngineLink:
    """One engine's socket. Whoever gets it sets `on_message` and `on_lost`: what the engine says, and that it is gone,
    after all that it has said."""

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
        self._loop.call_soon(self._look)  # a socket signals news only from when it was found empty
        self._is_in = False
        self._timer = self._loop.call_later(KNOCK_S, self._lose)

    def send(self, message: ToEngine) -> None:
        """Queue a message; never blocks. If the engine is gone, `on_lost` follows."""
        if not self._channel.closed and not self._channel.send(message) and self._is_in:
            self._loop.call_soon(self._lose)

    def close(self) -> None:
        """Drop the engine, which ends when it sees that; `on_lost` is not called."""
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
        """Something happened to a connection."""
        while not self._channel.closed:
            try:
                event, _ = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if int.from_bytes(event[:2], "little") == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._is_in = True
                self._timer.cancel()
            elif self._is_in:
                # Perhaps a stranger that was turned away: the engine's own end leaves nobody to send to.
                self._check()
                for delay in _AFTERMATH_S:
                    self._loop.call_later(delay, self._check)

    def _check(self) -> None:
        if not self._channel.closed and not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
            self._lose()

    def _lose(self) -> None:
        if not self._channel.closed:
            self._channel.read()  # its last words
            self.close()
            self.on_lost()


class _Allowed:
    """Whom ZeroMQ lets in: whoever has the key of this start's engines."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        """key: the public key that a client has proven to own."""
        return hmac.compare_digest(key, self._public)


# -- the engine's side ----------------------------------------------------------------------------------------


class NoAnswerError(Exception):
    """The API process does not answer: it is gone."""


def connect(context: zmq.Context[zmq.Socket[bytes]], key: ListenerKey) -> tuple[zmq.Socket[bytes], Callable[[], bool]]:
    """A socket of one's own to the API process, and whether it still holds. Raises `NoAnswerError`."""
    door = context.socket(zmq.REQ)
    _lock(door, key)
    door.connect(f"{key.host}:{key.port}")
    try:
        door.send(b"")
        if not door.poll(int(KNOCK_S * 1000)):
            raise NoAnswerError(f"nobody answers at {key.host}:{key.port}")
        port = int(door.recv())
    finally:
        door.close(linger=0)
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
    socket.set_hwm(0)  # a send never blocks; what is on its way is bounded by the requests admitted
    socket.heartbeat_ivl = int(_HEARTBEAT_S * 1000)
    socket.heartbeat_timeout = int(SILENCE_S * 1000)
