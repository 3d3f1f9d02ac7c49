"""Measure the cost of sending a plan to several ranks by transport, and the overhead of a step without its model.

`ways`: a message of a plan's size is sent to every rank, and each rank answers: by Ray actor calls, through a compiled
Ray graph, and over the engine's links. A compiled graph runs in a separate process, which is killed if it does not
exit.

`steps`: `empty` is a plan without slices through the built-in model's executor, in this process, on one rank, with TP 2
and with TP 2 x PP 2. `control` is what the ranks add to it. `decode` is a step of eight requests; it includes the
model, its collectives between processes, and waiting for a core where there are more ranks than cores.

`starts` (alone with `--starts`): seconds until two ranks of the built-in model take plans, as processes of this one and
on a new Ray cluster, and the times of `steps` with TP 2 on both.

`sums`: the sum of a float32 tensor over ranks, in the order of ranks as `TorchGroup` adds it from three ranks on, and
by Gloo's `all_reduce`, whose order depends on an element's place. `--sums` measures these only.

All variants take turns. Figures are medians and quartiles in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing

from skipjoin.core.decide.scheduler import Scheduler
from skipjoin.core.engine import EngineCore
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.request import Request
from skipjoin.core.step import StepPlan
from skipjoin.exec.base import LargestStep
from skipjoin.exec.local import LocalExecutor
from skipjoin.exec.rank_model import RankModel
from skipjoin.exec.rank_spec import make_store
from skipjoin.exec.ranks.cluster import Cluster, import_ray
from skipjoin.exec.ranks.launch import GroupSizes, Launcher
from skipjoin.exec.ranks.links import Address, RankListener, connect
from skipjoin.exec.ranks.own_ranks import OwnLauncher
from skipjoin.exec.ranks.ranks import RankGroup
from skipjoin.exec.ranks.ray_ranks import RayLauncher
from skipjoin.exec.sampling import Sampling
from skipjoin.model.folder import model_folder
from skipjoin.model.load_spec import LoadSpec
from skipjoin.model.loader import load_model
from skipjoin.model.torch_group import add_in_rank_order
from skipjoin.policies.cost import LinearCost
from skipjoin.recipes import Settings, build
from skipjoin.sampling import SamplingParams

sys.path.insert(0, str(Path(__file__).parents[2]))
import harness

MESSAGE, ANSWER = bytes(981), bytes(100)  # sizes of a plan of 64 decodes and of its result
ROUNDS, CALLS = 10, 200
REQUESTS, BLOCKS, BLOCK_SIZE = 8, 512, 16
SIZES = {"one process": None, "one rank": GroupSizes(1, 1), "TP 2": GroupSizes(2, 1), "TP 2 x PP 2": GroupSizes(2, 2)}
GRAPH_S = 120
# Rows and columns: eight decodes, and a step with prompts.
SHAPES = ((8, 768), (512, 4096))

Clocked = dict[str, list[float]]


class Echo:
    def answer(self, message: bytes) -> bytes:
        return ANSWER

    def serve(self, address: Address, secret: bytes, rank: int) -> None:
        connection = connect(address, secret, rank)
        while connection.recv_bytes():
            connection.send_bytes(ANSWER)


def quartiles(times: Sequence[float]) -> dict[str, float]:
    return harness.quartiles([1e3 * one for one in times], 4)


def clock(call: Callable[[], Any], times: list[float]) -> None:
    times += [harness.seconds_of(call) for _ in range(CALLS)]


def echoes(count: int, **options: Any) -> list[Any]:
    actor = import_ray().remote(num_cpus=1, **options)(Echo)
    return [actor.remote() for _ in range(count)]


def linked(cluster: Cluster, count: int) -> Callable[[], Any]:
    listener = RankListener(cluster.ip)
    for rank, actor in enumerate(echoes(count)):
        actor.serve.remote(listener.address, listener.secret, rank)
    links = listener.accept(count, 30)

    def call() -> None:
        for link in links:
            link.send(MESSAGE)
        for link in links:
            link.receive(30)

    return call


def ways(cluster: Cluster) -> dict[str, Any]:
    ray = import_ray()
    calls: dict[str, Callable[[], Any]] = {}
    for count in (2, 4):
        plain = echoes(count)
        calls[f"actor calls to {count}"] = lambda actors=plain: ray.get([one.answer.remote(MESSAGE) for one in actors])
        calls[f"links to {count}"] = linked(cluster, count)
    times: Clocked = {name: [] for name in calls}
    for call in calls.values():
        clock(call, [])
    for _ in range(ROUNDS):
        for name, call in calls.items():
            clock(call, times[name])
    return {name: quartiles(found) for name, found in times.items()} | graphs()


def graphs() -> dict[str, Any]:
    """Measure compiled graphs in separate processes, because their teardown may hang."""
    found = {}
    for count in (2, 4):
        command = [sys.executable, __file__, "--graph", str(count)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            try:
                output, _ = process.communicate(timeout=GRAPH_S)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
        lines = output.splitlines()
        name = f"compiled graph to {count}"
        found[name] = json.loads(lines[0]) if lines else {"error": "the graph did not run"}
        found[name]["teardown_s"] = float(lines[1]) if len(lines) > 1 else None
    return found


def graph(count: int) -> None:
    """Measure a compiled graph and print its figures, and then the seconds of its teardown."""
    cluster = Cluster.start(count)
    from ray.dag import InputNode, MultiOutputNode  # noqa: PLC0415 (Ray must be set up first)

    with InputNode() as sent:
        dag = MultiOutputNode([actor.answer.bind(sent) for actor in echoes(count)])
    compiled = dag.experimental_compile()
    ray, times = import_ray(), []
    for keep in range(ROUNDS + 1):
        clock(lambda: ray.get(compiled.execute(MESSAGE)), times if keep else [])
    print(json.dumps(quartiles(times)), flush=True)
    begin = time.perf_counter()
    compiled.teardown()
    print(time.perf_counter() - begin, flush=True)
    cluster.close()


class Decoder:
    """Eight requests on an executor that each get one token per step."""

    def __init__(self, executor: Any) -> None:
        self.executor = executor
        self._core = EngineCore(
            Scheduler(build("fcfs", Settings(LinearCost(0.01, 1e-4), 64, 4096)), KVLedger(BLOCKS, 0, BLOCK_SIZE))
        )
        self._core.on_finished = executor.on_finished
        self._number = 0

    def empty(self) -> None:
        self.executor.submit(StepPlan(-1, ()), 0.0).result()

    def token(self) -> None:
        core = self._core
        while len(core.requests) < REQUESTS:
            sampling = Sampling(SamplingParams(temperature=0), 0, ())
            core.add(Request(self._number, 0.0, [7, 8, 9], 900, sampling=sampling), 0.0)
            self._number += 1
        plan = core.start_step(0.0)
        core.finish_step(self.executor.submit(plan, 0.0).result(), 0.0)
        core.take_events()


def started(launcher: Launcher, sizes: GroupSizes) -> RankGroup:
    largest = LargestStep(BLOCKS * BLOCK_SIZE, BLOCKS, BLOCKS * BLOCK_SIZE)
    model = RankModel(str(model_folder("tally")), LoadSpec(dtype="float32"), largest, BLOCK_SIZE, threads=1)
    return RankGroup(launcher, model, sizes, lambda rank_specs, budgets: (BLOCKS, 0), lambda what, share: None)


def starts(turns: int) -> dict[str, Any]:
    found: dict[str, dict[str, Clocked]] = {name: {} for name in ("own processes", "Ray")}
    for _ in range(turns):
        for name, times in found.items():
            begin = time.perf_counter()
            launcher = RayLauncher(Cluster.start(2)) if name == "Ray" else OwnLauncher()
            group = started(launcher, GroupSizes(2, 1))
            times.setdefault("start", []).append(time.perf_counter() - begin)
            decoder = Decoder(group.executor)
            clock(decoder.token, [])
            for what, call in (("empty", decoder.empty), ("decode", decoder.token)):
                clock(call, times.setdefault(what, []))
            group.close()
            launcher.close()
    return {
        name: {what: {"n": len(one)} | quartiles(one) for what, one in times.items()} for name, times in found.items()
    }


def executors(launcher: Launcher) -> dict[str, tuple[Any, Any]]:
    """Return executors by name, each with the rank group that must stay referenced."""
    made: dict[str, tuple[Any, Any]] = {}
    folder = model_folder("tally")
    for name, sizes in SIZES.items():
        if sizes is None:
            model = load_model(folder, LoadSpec(dtype="float32"))
            executor = LocalExecutor(model, make_store(model, BLOCKS, 0, BLOCK_SIZE), threads=1)
            made[name] = executor, None
            continue
        group = started(launcher, sizes)
        made[name] = group.executor, group
    return made


def steps() -> dict[str, Any]:
    kept = executors(OwnLauncher())
    decoders = {name: Decoder(executor) for name, (executor, _) in kept.items()}
    empty: Clocked = {name: [] for name in decoders}
    decode: Clocked = {name: [] for name in decoders}
    for keep in range(ROUNDS + 1):
        for name, decoder in decoders.items():
            clock(decoder.empty, empty[name] if keep else [])
            clock(decoder.token, decode[name] if keep else [])
    here = statistics.median(empty["one process"])
    found = {
        name: {
            "empty": quartiles(empty[name]),
            "control": round(1e3 * (statistics.median(empty[name]) - here), 4),
            "decode": quartiles(decode[name]),
        }
        for name in decoders
    }
    for executor, group in kept.values():
        (group or executor).close()
    return found


def sums() -> dict[str, Any]:
    found = {}
    for ranks in (3, 4):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out"
            multiprocessing.spawn(add_up, (ranks, f"file://{folder}/meeting", out), nprocs=ranks)
            found[f"{ranks} ranks"] = json.loads(out.read_text())
    return found


def add_up(rank: int, ranks: int, meeting: str, out: Path) -> None:
    """Measure the sums of one rank; rank 0 writes its figures."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    group, found = distributed.group.WORLD, {}
    for rows, columns in SHAPES:
        x = torch.zeros((rows, columns))
        ways: dict[str, Callable[[], object]] = {
            "in rank order": lambda x=x: add_in_rank_order(x, ranks, group),
            "all_reduce": lambda x=x: distributed.all_reduce(x),
        }
        times: Clocked = {name: [] for name in ways}
        for keep in range(ROUNDS + 1):
            for name, call in ways.items():
                distributed.barrier()
                took = [harness.seconds_of(call) for _ in range(CALLS // 40)]
                times[name] += took if keep else []
        found[f"{rows} x {columns}"] = {name: quartiles(one) for name, one in times.items()}
    distributed.destroy_process_group()
    if rank == 0:
        out.write_text(json.dumps(found))


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--graph", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--sums", action="store_true", help="measure sums only")
    parser.add_argument("--starts", type=int, metavar="TURNS", help="measure starts only")
    args = parser.parse_args()
    if args.starts:
        harness.report(harness.new_record(starts=starts(args.starts)), args.out)
        return
    if args.graph:
        graph(args.graph)
        return
    if args.sums:
        harness.report(harness.new_record(sums=sums()), args.out)
        return
    record = harness.new_record()
    cluster = Cluster.start(24)
    try:
        record |= {"steps": steps(), "ways": ways(cluster), "sums": sums()}
    finally:
        cluster.close()
    harness.report(record, args.out)


if __name__ == "__main__":
    main()
