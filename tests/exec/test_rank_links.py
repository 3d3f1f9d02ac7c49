from __future__ import annotations

import socket
import struct
import threading
import time

import pytest

from skipjoin.exec.base import RankError
from skipjoin.exec.ranks import links
from skipjoin.exec.ranks.links import RankListener, connect


def trickle(address: links.Address, ended: threading.Semaphore) -> None:
    """Announce a message of 100 bytes and send one byte every 50 ms until the connection is closed."""
    with socket.create_connection(address) as stranger:
        try:
            stranger.sendall(struct.pack("!i", 100))
            while True:
                stranger.sendall(b"x")
                time.sleep(0.05)
        except OSError:
            ended.release()


def test_slow_unauthenticated_clients_delay_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such clients are disconnected."""
    monkeypatch.setattr(links, "_GREETING_S", 2.0)
    listener, ended = RankListener("127.0.0.1"), threading.Semaphore(0)
    for _ in range(5):
        threading.Thread(target=trickle, args=(listener.address, ended), daemon=True).start()
    time.sleep(0.1)  # the clients connect first
    connections = {}
    ranks = [
        threading.Thread(
            target=lambda rank=rank: connections.update({rank: connect(listener.address, listener.secret, rank)})
        )
        for rank in (1, 0)
    ]
    for rank in ranks:
        rank.start()
    accepted = listener.accept(2, 30.0)
    assert not ended.acquire(blocking=False)  # no client had been disconnected yet
    for rank in ranks:
        rank.join()
    accepted[1].send(b"to rank 1")
    assert connections[1].poll(30.0)
    assert connections[1].recv_bytes() == b"to rank 1"
    assert all(ended.acquire(timeout=30.0) for _ in range(5))
    for link in accepted:
        link.close()
    listener.close()


def test_error_names_the_rank_that_did_not_connect() -> None:
    listener = RankListener("127.0.0.1")
    with socket.create_connection(listener.address), pytest.raises(RankError, match="rank 0 did not connect within"):
        listener.accept(2, 0.1)
    listener.close()
