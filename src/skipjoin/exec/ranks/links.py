"""Authenticated TCP connections between an engine and its ranks. Nothing is pickled."""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from queue import SimpleQueue

from skipjoin.exec.base import RankError

# Host and port.
Address = tuple[str, int]

# A connection breaks after this many seconds without a packet from the other machine. The other process may be busy,
# since its kernel acknowledges packets.
_SILENCE_S = 4
# Maximum seconds for a connection to prove that it knows the secret.
_GREETING_S = 2.0
# Interval in seconds at which finished handshakes are collected.
_LOOK_S = 0.02
# Seconds in which a process that lost its connection may exit by itself.
_GRACE_S = 2.0
_NUMBER = struct.Struct("<I")


class RankListener:
    def __init__(self, ip: str) -> None:
        self._listener = socket.create_server((ip, 0), family=socket.AF_INET6 if ":" in ip else socket.AF_INET)
        self.address: Address = self._listener.getsockname()[:2]
        self.secret = secrets.token_bytes(32)

    def accept(self, ranks: int, timeout_s: float) -> list[TcpLink]:
        """Accept the links to all ranks, in rank order. Connections without the secret delay no others."""
        links: dict[int, TcpLink] = {}
        greeted: SimpleQueue[tuple[Connection, int]] = SimpleQueue()
        deadline = time.monotonic() + timeout_s
        while len(links) < ranks:
            left = deadline - time.monotonic()
            if left <= 0:
                for link in links.values():
                    link.close()
                missing = min(set(range(ranks)) - set(links))
                raise RankError(f"rank {missing} did not connect within {timeout_s:g} s")
            self._accept_one(greeted, min(left, _LOOK_S))
            while not greeted.empty():
                connection, number = greeted.get()
                links[number] = TcpLink(connection, number)
        return [links[number] for number in range(ranks)]

    def close(self) -> None:
        self._listener.close()

    def _accept_one(self, greeted: SimpleQueue[tuple[Connection, int]], timeout_s: float) -> None:
        self._listener.settimeout(timeout_s)
        with suppress(TimeoutError):
            accepted, _ = self._listener.accept()
            threading.Thread(target=self._greet, args=(accepted, greeted), daemon=True).start()

    def _greet(self, accepted: socket.socket, greeted: SimpleQueue[tuple[Connection, int]]) -> None:
        guard = accepted.dup()  # has its own file descriptor, which no other connection can reuse meanwhile
        clock = threading.Timer(_GREETING_S, _cut, (guard,))
        clock.start()
        connection = _prepared(accepted)
        try:
            deliver_challenge(connection, self.secret)
            answer_challenge(connection, self.secret)
            (number,) = _NUMBER.unpack(connection.recv_bytes(_NUMBER.size))
        except (AuthenticationError, OSError, EOFError, struct.error):
            connection.close()
        else:
            greeted.put((connection, number))
        finally:
            clock.cancel()
            clock.join()
            guard.close()


def connect(address: Address, secret: bytes, rank: int) -> Connection:
    connection = _prepared(socket.create_connection(address, _SILENCE_S))
    try:
        answer_challenge(connection, secret)
        deliver_challenge(connection, secret)
    except AuthenticationError as error:
        raise RankError(f"the engine refused the connection of rank {rank}: {error}") from error
    connection.send_bytes(_NUMBER.pack(rank))
    return connection


def end_with(connection: Connection) -> None:
    """Exit this process `_GRACE_S` after the connection breaks, because it may wait for another lost rank."""
    if sys.platform != "linux":
        return

    def watch() -> None:
        broken = select.poll()
        broken.register(connection.fileno(), select.POLLRDHUP)
        broken.poll()
        time.sleep(_GRACE_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class TcpLink:
    def __init__(self, connection: Connection, rank: int) -> None:
        self._connection = connection
        self._rank = rank

    def send(self, message: bytes) -> None:
        """Queue a message without blocking; a lost rank raises in `receive`, not here."""
        with suppress(OSError):
            self._connection.send_bytes(message)

    def is_ready(self) -> bool:
        try:
            return self._connection.poll()
        except OSError:  # `receive` raises it
            return True

    def receive(self, timeout_s: float) -> bytes:
        """Wait for the next answer; raise `RankError` if the rank is lost, and `TimeoutError`."""
        try:
            if self._connection.poll(timeout_s):
                return self._connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise RankError(f"rank {self._rank} was lost: its connection broke") from error
        raise TimeoutError

    def close(self) -> None:
        self._connection.close()


def _prepared(plain: socket.socket) -> Connection:
    plain.settimeout(None)
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for option, value in (
            (socket.TCP_KEEPIDLE, 1),
            (socket.TCP_KEEPINTVL, 1),
            (socket.TCP_KEEPCNT, _SILENCE_S - 1),
            (socket.TCP_USER_TIMEOUT, 1000 * _SILENCE_S),
        ):
            plain.setsockopt(socket.IPPROTO_TCP, option, value)
    return Connection(plain.detach())


def _cut(connection: socket.socket) -> None:
    """Shut down a connection, which also wakes threads that wait for it to send."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
