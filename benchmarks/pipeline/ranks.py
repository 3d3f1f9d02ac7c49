"""The ranks of a pipeline as processes of one thread each, and the model that they run."""

from __future__ import annotations

import multiprocessing
import os
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import distributed

from skipjoin.exec.guess import guess_cost
from skipjoin.exec.kv_store import KVStore
from skipjoin.exec.rank import Rank
from skipjoin.exec.sharded import RankError, ShardedExecutor
from skipjoin.exec.subject import Facts
from skipjoin.exec.worker import Worker
from skipjoin.model.causal_lm import CausalLM
from skipjoin.model.loader import random_model
from skipjoin.model.parallel import Group, Shard
from skipjoin.model.torch_group import TorchGroup

VOCAB, LAYERS, HIDDEN, BLOCK_SIZE, DEVICE_BLOCKS = 8192, 24, 512, 16, 1500
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HIDDEN // 64,
    "num_key_value_heads": HIDDEN // 64,
    "intermediate_size": 1376,
    "max_position_embeddings": 1024,
}
_PLAN_S, _GROUP_S = 120.0, 60.0


def make_worker(dtype: str, group: Group | None = None) -> tuple[CausalLM, KVStore]:
    """What a rank has of the model, or all of it, and its pool."""
    model = random_model(CONFIG, seed=0, dtype=dtype, group=group)
    store = KVStore(
        model.config,
        model.dtype,
        model.device,
        device_blocks=DEVICE_BLOCKS,
        host_blocks=0,
        block_size=BLOCK_SIZE,
        shard=model.shard,
    )
    return model, store


def make_executor(stages: int, dtype: str, folder: Path) -> tuple[ShardedExecutor, Facts]:
    """The executor over `stages` new processes, and the facts of its model; the one place that knows what carries the
    messages. `close` it."""
    context = multiprocessing.get_context("spawn")
    links = []
    for rank in range(stages):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_serve, args=(rank, stages, dtype, str(folder / "meeting"), theirs), daemon=True
        )
        process.start()
        theirs.close()
        links.append(_PipeLink(process, ours))
    sizes = [tuple(map(int, link.receive(_PLAN_S).split())) for link in links]
    model, _ = make_worker(dtype)
    facts = Facts(
        model.config,
        model.device,
        sum(weights for weights, _ in sizes),
        BLOCK_SIZE,
        DEVICE_BLOCKS,
        sum(block for _, block in sizes),
        guess_cost(model, BLOCK_SIZE),
    )
    return ShardedExecutor(links, tp_size=1, timeout_s=_PLAN_S), facts


def _serve(rank: int, stages: int, dtype: str, meeting_point: str, connection: Connection) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    meeting = distributed.FileStore(meeting_point, stages)
    group = TorchGroup(Shard.of_rank(rank, 1, stages), meeting, timeout_s=_GROUP_S)
    model, store = make_worker(dtype, group)
    served = Rank(Worker(model, store))
    connection.send_bytes(f"{model.weight_bytes} {store.device.block_bytes}".encode())
    with suppress(EOFError):
        while True:
            connection.send_bytes(served.run(connection.recv_bytes()))
    served.close()


class _PipeLink:
    def __init__(self, process: multiprocessing.process.BaseProcess, connection: Connection) -> None:
        self._process, self._connection = process, connection

    def send(self, message: bytes) -> None:
        with suppress(OSError):
            self._connection.send_bytes(message)

    def is_ready(self) -> bool:
        return self._connection.poll()

    def receive(self, timeout_s: float) -> bytes:
        try:
            if not self._connection.poll(timeout_s):
                raise TimeoutError
            return self._connection.recv_bytes()
        except (EOFError, ConnectionError):
            raise RankError(f"process {self._process.pid} is gone") from None

    def close(self) -> None:
        self._connection.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
