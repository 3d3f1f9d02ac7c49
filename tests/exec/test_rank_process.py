"""The process of a rank."""

from __future__ import annotations

import shutil
import socket
import struct
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from skipjoin.builtin import builtin_model_path
from skipjoin.core.request import Request
from skipjoin.core.step import Slice, StepPlan
from skipjoin.exec import rank_model
from skipjoin.exec.base import LargestStep, RankError
from skipjoin.exec.rank_model import RankModel
from skipjoin.exec.ranks import links, rank_process
from skipjoin.exec.ranks.links import RankListener, connect
from skipjoin.exec.ranks.rank_process import RankProcess
from skipjoin.exec.ranks.sharded import ShardedExecutor
from skipjoin.exec.sampling import Sampling
from skipjoin.model.load_spec import LoadSpec
from skipjoin.model.parallel import Shard
from skipjoin.sampling import SamplingParams
from skipjoin.structured_output import StructuredOutput


def test_a_rank_generates_dummy_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(builtin_model_path() / "config.json", tmp_path)
    dummy = LoadSpec(dtype="float32", attention="torch", load_format="dummy")
    of = RankModel(str(tmp_path), dummy, LargestStep(64, 4, 64), 16, threads=1)
    rank = RankProcess("127.0.0.1")
    part, room = rank.load(of, Shard(), None, 1)
    saved, _ = RankProcess("127.0.0.1").load(
        of._replace(folder=str(builtin_model_path()), load=replace(dummy, load_format="auto")),
        Shard(),
        None,
        ranks_here=1,
    )
    assert part == saved
    assert room.ram > 0
    # A rank that cannot record its decode steps reports so, and all ranks run them eagerly.
    assert rank.make_pools(4, 0)
    monkeypatch.setattr(rank_model, "replays", lambda model: True)
    monkeypatch.setattr(
        rank_model, "record_graphs", lambda model, pool, sizes, longest, note: found if sizes == (1, 4) else 0
    )
    for found, recorded in ((None, False), ("graphs", True)):
        rank.load(of._replace(graph_sizes=(1, 4)), Shard(), None, 1)
        assert rank.make_pools(4, 0) is recorded
        assert rank._loaded.graphs == found
    rank.forget_graphs()
    assert rank._loaded.graphs is None
    with pytest.raises(RankError, match=r"cannot allocate .* GiB and, in CPU memory, 0 GiB of KV"):
        rank.make_pools(1 << 40, 0)


def test_a_rank_answers_orders_and_plans_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_process, "end_with", lambda connection: None)  # which ends this process
    rank = RankProcess("127.0.0.1")
    load = LoadSpec(dtype="float32", attention="torch")
    rank.load(RankModel(str(builtin_model_path()), load, LargestStep(64, 4, 64), 16, threads=1), Shard(), None, 1)
    rank.make_pools(4, 0)
    listener = RankListener("127.0.0.1")
    serving = threading.Thread(target=rank.serve, args=(listener.address, listener.secret))
    serving.start()
    executor = ShardedExecutor(listener.accept(1, 30.0), tp_size=1, timeout_s=30.0)
    listener.close()
    params = SamplingParams(temperature=0, structured_outputs=StructuredOutput(kind="regex", text="[0-9]{4}"))
    request = Request(0, 0.0, [5, 6], 4, sampling=Sampling(params, 1, (0,)))
    started = executor.ahead.start(request)
    executor.ahead.wait([started], 30.0)
    assert started.result().uncharged_s > 0
    result = executor.submit(StepPlan(0, (Slice(request, 0, 2, True, False, (0,)),)), 0.0).result()
    assert result.tokens[0] is not None
    executor.close()
    serving.join(30)
    assert not serving.is_alive()


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
