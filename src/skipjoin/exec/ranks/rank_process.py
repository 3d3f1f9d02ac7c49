from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from skipjoin.config.profile import Transfer
from skipjoin.core.step import Direction
from skipjoin.exec.base import RankError
from skipjoin.exec.rank_model import LOADING, LoadedRank, RankModel
from skipjoin.exec.rank_spec import MemoryBudget, RankSpec
from skipjoin.exec.ranks.links import Address, connect, end_with
from skipjoin.exec.ranks.rank import Rank
from skipjoin.model.cuda import choose_device
from skipjoin.model.grammars import Grammars, grammars_of
from skipjoin.model.parallel import Group, Shard
from skipjoin.model.torch_group import TorchGroup
from skipjoin.system.container import usable_cpus

_SIOCGIFADDR = 0x8915
# Maximum seconds that ranks wait for each other, to join the group and in one step.
GROUP_S = 60.0


class RankProcess:
    """Model, pools and connection of a rank. Rank 0 of several has `store_socket`, at which all ranks meet.

    Call order: `load`, with `progress` meanwhile, `make_pools`, `forget_graphs` if a rank has none, `serve`.
    """

    def __init__(self, ip: str, store_socket: socket.socket | None = None) -> None:
        self._ip = ip
        self._store_socket = store_socket
        self._share = 0.0
        self._rank: LoadedRank | None = None
        self._grammars: Grammars | None = None

    def load(
        self, model: RankModel, shard: Shard, meeting: Address | None, ranks_here: int
    ) -> tuple[RankSpec, MemoryBudget]:
        threads = model.threads or max(1, usable_cpus() // ranks_here)
        device = choose_device(model.load.device)
        group: Group = Group() if meeting is None else self._join(shard, meeting, device)
        self._rank = loaded = LoadedRank(model, threads, self._note_progress, group=group, ranks_here=ranks_here)
        self._grammars = grammars_of(model.folder, loaded.model.config)
        self._grammars.load()
        return loaded.spec, loaded.budget

    def progress(self) -> float:
        return self._share

    def make_pools(self, device_blocks: int, cpu_blocks: int) -> bool:
        return self._loaded.make_pools(device_blocks, cpu_blocks)

    def forget_graphs(self) -> None:
        self._loaded.forget_graphs()

    def serve(self, address: Address, secret: bytes) -> None:
        """Answer the engine's plans until the connection breaks; nothing may be called after that."""
        loaded = self._loaded
        loaded.model.ops.use_threads(loaded.threads)  # the count is per thread, and this is a different thread
        assert self._grammars is not None
        with contextlib.suppress(EOFError, OSError, RankError):
            connection = connect(address, secret, loaded.model.shard.rank)
            end_with(connection)
            rank = Rank(
                loaded.model, loaded.store, connection.send_bytes, grammars=self._grammars, graphs=loaded.graphs
            )
            with contextlib.closing(rank):
                while True:
                    rank.run(connection.recv_bytes())

    def touch(self, blocks: Sequence[int]) -> None:
        self._loaded.touch(blocks)

    def transfers(self, seconds: float) -> dict[Direction, Transfer]:
        return self._loaded.transfers(seconds)

    @property
    def _loaded(self) -> LoadedRank:
        assert self._rank is not None
        return self._rank

    def _note_progress(self, what: str, share: float) -> None:
        if what == LOADING:
            self._share = share

    def _join(self, shard: Shard, meeting: Address, device: str) -> TorchGroup:
        interface = _interface(self._ip)
        if interface is not None:
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(name, interface)
        host, port = meeting
        opened = self._store_socket
        timeout = timedelta(seconds=GROUP_S)
        make_store = dist.TCPStore  # type: ignore[attr-defined]  # torch exports it only at run time
        if opened is None:
            store = make_store(host, port, shard.ranks, is_master=False, timeout=timeout)
        else:
            number = opened.detach()  # the store owns it from here on
            store = make_store(
                host,
                port,
                shard.ranks,
                is_master=True,
                timeout=timeout,
                master_listen_fd=number,
                wait_for_workers=False,
            )
        backend = "nccl" if device.startswith("cuda") else "gloo"
        return TorchGroup(shard, store, backend=backend, timeout_s=GROUP_S)


def _interface(ip: str) -> str | None:
    if ip.startswith("127."):
        return "lo"
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            if socket.inet_ntoa(answer[20:24]) == ip:
                return name
    return None
