from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from skipjoin.config.profile import Transfer
from skipjoin.core.step import Direction
from skipjoin.exec.base import LargestStep, RankError
from skipjoin.exec.graphs import DecodeGraphs, graph_bytes, record_graphs, replays
from skipjoin.exec.kv_store import KVStore
from skipjoin.exec.memory import measure_peak
from skipjoin.exec.rank_spec import (
    MemoryBudget,
    RankSpec,
    make_store,
    measure_transfers,
    memory_budget_of,
    rank_spec_of,
    touch,
)
from skipjoin.exec.ranks.cluster import import_ray
from skipjoin.exec.ranks.links import Address, connect, end_with
from skipjoin.exec.ranks.rank import Rank
from skipjoin.exec.ranks.rank_model import RankModel
from skipjoin.exec.warm_up import warm_up
from skipjoin.exec.worker import Worker
from skipjoin.model.causal_lm import CausalLM
from skipjoin.model.cuda import choose_device
from skipjoin.model.grammars import Grammars, grammars_of
from skipjoin.model.loader import load_model
from skipjoin.model.parallel import Alone, Group, Shard
from skipjoin.model.torch_group import TorchGroup
from skipjoin.system.container import usable_cpus

_SIOCGIFADDR = 0x8915
# Maximum seconds that ranks wait for each other, to join the group and in one step.
GROUP_S = 60.0


class RankProcess:
    """Model, pools and connection of a rank, in its own process.

    Call order: `load`, `make_pools`, `forget_graphs` if one rank has none, `serve`. `progress` may be called during
    `load`, and `touch` and `transfers` after `make_pools`.

    Args:
        ip: Address of this process's node.
        store_socket: Listening socket for the store at which all ranks meet, on rank 0 of several.
    """

    def __init__(self, ip: str, store_socket: socket.socket | None = None) -> None:
        self._ip = ip
        self._store_socket = store_socket
        self._share = 0.0
        self._model: CausalLM | None = None
        self._store: KVStore | None = None
        self._threads = 1
        self._grammars: Grammars | None = None
        self._block_size = 0
        self._swap_dtype = "auto"
        self._link_bytes_per_s: float | None = None
        self._largest: LargestStep | None = None
        self._graph_sizes: Sequence[int] = ()
        self._graphs: DecodeGraphs | None = None

    def load(
        self, model: RankModel, shard: Shard, meeting: Address | None, ranks_here: int
    ) -> tuple[RankSpec, MemoryBudget]:
        device = choose_device(model.device)
        self._threads = model.threads or max(1, usable_cpus() // ranks_here)
        self._block_size, self._swap_dtype, self._largest = model.block_size, model.swap_dtype, model.largest
        self._link_bytes_per_s = model.link_bytes_per_s
        torch.set_num_threads(self._threads)
        group: Group = Alone() if meeting is None else self._join(shard, meeting, device)
        self._model = load_model(
            model.folder,
            dtype=model.dtype,
            device=device,
            attention=model.attention,
            load_format=model.load_format,
            quantization=model.quantization,
            kv_cache_dtype=model.kv_cache_dtype,
            progress=self._note_progress,
            group=group,
            batch_invariant=model.batch_invariant,
        )
        loaded = self._model
        self._grammars = grammars_of(model.folder, loaded.config)
        self._grammars.load()
        loaded.attention.tune(loaded.config, loaded.dtype, loaded.device, model.block_size, loaded.shard)
        peak = measure_peak(loaded, model.largest, model.block_size)
        spec = rank_spec_of(loaded, model.block_size, self._threads, model.swap_dtype)
        self._graph_sizes = model.graph_sizes if replays(loaded) else ()
        graphs_take = graph_bytes(loaded, self._graph_sizes, peak.decodes)
        return spec, memory_budget_of(loaded, model.gpu_share, ranks_here, peak=peak.all, graph_bytes=graphs_take)

    def progress(self) -> float:
        return self._share

    def make_pools(self, device_blocks: int, cpu_blocks: int) -> bool:
        """Allocate the KV pools and capture CUDA graphs; return False if no rank may use graphs.

        On a CPU the system may overcommit, and kill the process when the memory is used.
        """
        model = self._loaded
        try:
            self._store = make_store(
                model,
                device_blocks,
                cpu_blocks,
                self._block_size,
                self._swap_dtype,
                link_bytes_per_s=self._link_bytes_per_s,
            )
        except (RuntimeError, OSError) as error:  # from torch and from mmap
            spec = rank_spec_of(model, self._block_size, self._threads, self._swap_dtype)
            here, there = (
                blocks * size / (1 << 30)
                for blocks, size in ((device_blocks, spec.block_bytes), (cpu_blocks, spec.cpu_block_bytes))
            )
            pools = f"{here:.4g} GiB and, in CPU memory, {there:.4g} GiB"
            why = str(error).partition("\n")[0]
            raise RankError(f"{model.shard.name} cannot allocate {pools} of KV: {why}") from None
        assert self._largest is not None
        warm_up(model, self._store.device, self._largest)
        if self._graph_sizes:
            self._graphs = record_graphs(model, self._store.device, self._graph_sizes, self._largest.positions)
        return self._graphs is not None or not self._graph_sizes

    def forget_graphs(self) -> None:
        self._graphs = None

    def serve(self, address: Address, secret: bytes) -> None:
        assert self._store is not None
        self._loaded.ops.use_threads(self._threads)  # the count is per thread, and this is a different thread
        assert self._grammars is not None
        rank = Rank(Worker(self._loaded, self._store, graphs=self._graphs, grammars=self._grammars))
        with contextlib.suppress(EOFError, OSError, RankError):
            connection = connect(address, secret, self._loaded.shard.rank)
            end_with(connection)
            while True:
                connection.send_bytes(rank.run(connection.recv_bytes()))
        rank.close()
        import_ray().actor.exit_actor()

    def touch(self, blocks: int) -> None:
        assert self._store is not None
        touch(self._store.device, blocks)

    def transfers(self, seconds: float) -> dict[Direction, Transfer]:
        return measure_transfers(self._loaded, self._block_size, seconds, self._swap_dtype)

    @property
    def _loaded(self) -> CausalLM:
        assert self._model is not None
        return self._model

    def _note_progress(self, done: int, total: int) -> None:
        self._share = done / total

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
