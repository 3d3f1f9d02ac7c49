"""Throughput of replicas behind one server, the pause of streams when one is killed, and the cost of their links.

    python benchmarks/performance/replicas/run.py [--parts rates,latencies,kills,hop] [--kills 12] [--out FILE]

`rates`, in the simulator: the largest arrival rate at which the mean normalized latency stays within 0.3 s per token,
of one replica and of two with each dispatch rule; ShareGPT's lengths, OPT-13B on A100s with a KV pool of 11 GiB, mean
over three seeds. Wanted: two replicas reach at least 1.8 times the rate of one.

`latencies`, in the simulator: four replicas at 0.9 of four times `fcfs`'s rate of one, five seeds, each rule with the
same arrivals. Wanted: least work beats round robin, though it learns lengths from the requests that have ended.

`kills`: the built-in model, twice, on this machine, with `fcfs`; eight streams, greedy and seeded ones alternately; one
of the two engines is killed (SIGKILL) at a random moment in the first half of their time. `still_s` is the longest time
that any stream went without a token, `undisturbed_still_s` the same without a kill, `whole_again_s` the time until two
engines run again, `same` whether all texts equal those of undisturbed streams.

`hop`: a message of 32 tokens to this process and one back, over the ipc socket of a single engine, and over the
encrypted TCP link of a replica; round trips, and the CPU time of this process for one. Every engine step costs at most
one message each way.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
import uvloop
import zmq

sys.path.insert(0, str(Path(__file__).parents[2]))
from machine import describe_machine
from skipjoin.observe.record import Record
from skipjoin.policies.dispatch import DISPATCH_RULES
from skipjoin.report.bound import maximum_rate, parse_bound
from skipjoin.server.engines.channel import Channel
from skipjoin.server.engines.link import EngineLink, EngineListener, connect
from skipjoin.server.engines.messages import Abort, ListenerKey, StepOutputs, ToEngine
from skipjoin.sim.experiments.machines import Machine
from skipjoin.sim.experiments.simulation import Cell, Extent
from skipjoin.sim.experiments.sweep import Grid, RateSearch, sweep
from skipjoin.sim.experiments.system import System
from skipjoin.workload.workload import synthetic

PARTS = ("rates", "latencies", "kills", "hop")
BOUND = parse_bound("normalized_latency_s.mean<=0.3")
RECIPES = "fcfs,fastserve"
DURATION_S = 100.0
START_RPS = 3.0  # of one replica: where searches begin
WORKLOAD = synthetic("sharegpt", "poisson")
STREAMS, TOKENS = 8, 400
BATCH, ROUNDS, TURNS = 32, 3000, 7


def spread(values: list[float], digits: int = 3) -> dict[str, float]:
    """Median and range."""
    return {
        "median": round(statistics.median(values), digits),
        "least": round(min(values), digits),
        "most": round(max(values), digits),
    }


# -- in the simulator -------------------------------------------------------------------------------------------


class Records:
    """What a sweep brought, by (recipe, replicas, rule)."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, int, str | None], list[Record]] = {}

    def begun(self, number: int, cell: Cell) -> None:
        pass

    def share(self, number: int, share: float) -> None:
        pass

    def done(self, number: int, record: Record) -> None:
        settings = record["settings"]
        key = (record["recipe"], settings["replicas"], settings["dispatch"])
        self.found.setdefault(key, []).append(record)
        print(*key, record["workload"]["rate_rps"], BOUND.value(record), file=sys.stderr, flush=True)


def systems() -> list[System]:
    return Machine(hardware="a100-40gb", model="opt-13b", kv_gib=11).systems(RECIPES)


def cells(system: System, rate: float, seeds: int) -> list[Cell]:
    return [Cell(system, WORKLOAD, Extent(rate, DURATION_S, seed)) for seed in range(seeds)]


def measure_rates() -> list[dict[str, Any]]:
    """The largest rates."""
    records, plans = Records(), []
    for system in systems():
        plans.append(RateSearch(cells(system, START_RPS, 3), BOUND))
        for rule in DISPATCH_RULES:
            plans.append(RateSearch(cells(replace(system, replicas=2, dispatch=rule), 2 * START_RPS, 3), BOUND))
    sweep(plans, os.cpu_count() or 1, records)
    best: dict[tuple[str, int, str | None], float] = {}
    for key, found in records.found.items():
        by_rate: dict[float, list[Record]] = {}
        for record in found:
            by_rate.setdefault(record["workload"]["rate_rps"], []).append(record)
        maximum = maximum_rate(by_rate, BOUND)
        assert maximum is not None
        best[key] = maximum.rate_rps
    results = []
    for (recipe, replicas, rule), rate in sorted(best.items(), key=lambda item: (item[0][:2], item[0][2] or "")):
        times = rate / best[recipe, 1, None]
        results.append(
            {
                "recipe": recipe,
                "replicas": replicas,
                "dispatch": rule,
                "rate_rps": round(rate, 3),
                "times": round(times, 3),
            }
        )
        print(results[-1], flush=True)
    return results


def measure_latencies(rates: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Four replicas near the limit of `fcfs`. rates: that of one replica is among them."""
    (alone,) = [entry["rate_rps"] for entry in rates if entry["replicas"] == 1 and entry["recipe"] == "fcfs"]
    rate = round(0.9 * 4 * alone, 3)
    records, plans = Records(), []
    for system in systems():
        for rule in DISPATCH_RULES:
            plans.append(Grid(cells(replace(system, replicas=4, dispatch=rule), rate, 5)))
    sweep(plans, os.cpu_count() or 1, records)
    results = []
    for (recipe, _, rule), found in sorted(records.found.items()):
        by_seed = sorted(found, key=lambda record: record["workload"]["seed"])
        result: dict[str, Any] = {"recipe": recipe, "dispatch": rule, "rate_rps": by_seed[0]["workload"]["rate_rps"]}
        for name in ("normalized_latency_s", "ttft_s"):
            for figure in ("mean", "p95"):
                result[f"{name}.{figure}"] = [round(record[name][figure], 4) for record in by_seed]
        results.append(result)
        print(result, flush=True)
    return results


# -- kills ------------------------------------------------------------------------------------------------------


class Server:
    """`skipjoin serve` with two replicas."""

    def __init__(self, port: int) -> None:
        options = ["--profile", "off", "--kv-cache-gib", "0.1", "--threads", "1", "--dtype", "float32"]
        # Under `fcfs` no request is preempted for another, so that a pause is due to the kill.
        options += ["--recipe", "fcfs"]
        program = [sys.executable, "-c", "from skipjoin.cli import app; app()"]
        command = [*program, "serve", "--port", str(port), "--replicas", "2", *options]
        self.url = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    async def wait(self) -> float:
        """Seconds until both replicas take requests."""
        begin = time.monotonic()
        async with aiohttp.ClientSession() as session:
            while True:
                try:
                    async with session.get(f"{self.url}/health") as answer:
                        if answer.status == 200 and (await answer.json())["replicas_alive"] == 2:
                            return time.monotonic() - begin
                except aiohttp.ClientError:
                    pass
                if self._process.poll() is not None:
                    raise RuntimeError("the server did not start")
                await asyncio.sleep(0.02)

    def engines(self) -> list[psutil.Process]:
        """Their processes, oldest first."""
        children = psutil.Process(self._process.pid).children(recursive=True)
        found = [child for child in children if "skipjoin.server.engines.engine_process" in child.cmdline()]
        return sorted(found, key=lambda child: child.create_time())

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)


async def stream(session: aiohttp.ClientSession, url: str, number: int) -> tuple[str, float]:
    """One stream's text, and the longest time in which it brought nothing."""
    body: dict[str, Any] = {"prompt": f"Count from {number + 3} to {number + 300}", "max_tokens": TOKENS}
    body |= {"stream": True, "ignore_eos": True}
    body |= {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0.0}
    text, times = "", []
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        async for line in answer.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    return f"{text} {event['error']}", 0.0
                text += event["choices"][0]["text"]
                times.append(time.monotonic())
    return text, max(later - earlier for earlier, later in itertools.pairwise(times))


async def streams(server: Server, kill_after: float | None, victim: int) -> tuple[list[str], float, float]:
    """The texts of all streams, the longest that one of them stood still, and until both replicas were there."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        running = asyncio.gather(*(stream(session, server.url, number) for number in range(STREAMS)))
        whole_again = 0.0
        if kill_after is not None:
            await asyncio.sleep(kill_after)
            server.engines()[victim].kill()
            begin = time.monotonic()
            while (await (await session.get(f"{server.url}/health")).json())["replicas_alive"] == 2:
                await asyncio.sleep(0.001)
            await server.wait()
            whole_again = time.monotonic() - begin
        found = await running
    return [text for text, _ in found], max(gap for _, gap in found), whole_again


async def measure_kills(kills: int, port: int) -> dict[str, Any]:
    draw = random.Random(1)
    server = Server(port)
    try:
        started = await server.wait()
        await streams(server, None, 0)
        begin = time.monotonic()
        expected, _, _ = await streams(server, None, 0)
        usual = time.monotonic() - begin
        undisturbed = [(await streams(server, None, 0))[1] for _ in range(kills)]
        still, again, same = [], [], 0
        for _ in range(kills):
            texts, gap, whole = await streams(server, draw.uniform(0.1, 0.5) * usual, draw.randrange(2))
            still.append(gap)
            again.append(whole)
            same += texts == expected
            print(f"still for {gap:.3f} s, whole again after {whole:.1f} s, {texts == expected}", flush=True)
    finally:
        server.close()
    return {
        "kills": kills,
        "streams": STREAMS,
        "tokens": TOKENS,
        "same": same,
        "start_s": round(started, 1),
        "undisturbed_s": round(usual, 2),
        "undisturbed_still_s": spread(undisturbed),
        "still_s": spread(still),
        "whole_again_s": spread(again, 1),
    }


# -- the way to the engine --------------------------------------------------------------------------------------


def echo(where: str) -> None:
    """An engine that answers each message with a step of `BATCH` tokens. where: a key as JSON, or an ipc address."""
    context = zmq.Context()
    if where.startswith("{"):
        socket, _ = connect(context, msgspec.json.decode(where, type=ListenerKey))
    else:
        socket = context.socket(zmq.PAIR)
        socket.connect(where)
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(ToEngine)
    socket.send(encoder.encode(StepOutputs()))
    while True:
        decoder.decode(socket.recv())
        socket.send(encoder.encode(StepOutputs(list(range(BATCH)), list(range(BATCH)))))


class Player:
    """Sends a message whenever one comes, so many times."""

    def __init__(self) -> None:
        self.send: Callable[[ToEngine], object] = lambda message: None
        self.is_in = asyncio.Event()
        self._left = 0
        self._done = asyncio.Event()

    def receive(self, message: object) -> None:
        self.is_in.set()
        if self._left == 0:
            self._done.set()
            return
        self._left -= 1
        self.send(Abort([1]))

    async def play(self, rounds: int) -> tuple[float, float]:
        """Microseconds of a round trip, and of this process's CPU in it."""
        self._left, self._done = rounds, asyncio.Event()
        begin, cpu = time.perf_counter(), time.process_time()
        self.receive(None)
        await self._done.wait()
        return (time.perf_counter() - begin) / rounds * 1e6, (time.process_time() - cpu) / rounds * 1e6


async def measure_hop() -> dict[str, Any]:
    ipc, tcp = Player(), Player()
    folder = tempfile.TemporaryDirectory(prefix="skipjoin-")
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    address = f"ipc://{folder.name}/engine"
    socket.bind(address)
    channel = Channel(socket, ipc.receive)
    ipc.send = channel.send

    def admit(link: EngineLink) -> None:
        link.on_message = tcp.receive
        tcp.send = link.send

    door = EngineListener("127.0.0.1", admit)
    wheres = (address, msgspec.json.encode(door.key).decode())
    engines = [subprocess.Popen([sys.executable, __file__, "--echo", where]) for where in wheres]
    try:
        await asyncio.gather(ipc.is_in.wait(), tcp.is_in.wait())
        times: dict[str, list[tuple[float, float]]] = {"ipc": [], "tcp": []}
        for turn in range(TURNS + 1):
            for name, player in (("ipc", ipc), ("tcp", tcp)):
                taken = await player.play(ROUNDS)
                if turn:  # the first one warms up
                    times[name].append(taken)
    finally:
        for engine in engines:
            engine.kill()
            engine.wait()
        channel.close()
        door.close()
        context.term()
        folder.cleanup()
    found: dict[str, Any] = {"tokens": BATCH, "rounds": ROUNDS, "turns": TURNS}
    for name, pairs in times.items():
        found[f"{name}_round_trip_us"] = spread([whole for whole, _ in pairs], 1)
        found[f"{name}_cpu_us"] = spread([cpu for _, cpu in pairs], 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="the other parts stay as the file has them")
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--port", type=int, default=8918)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--echo", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.echo is not None:
        echo(arguments.echo)
        return
    wanted = arguments.parts.split(",")
    found: dict[str, Any] = {"bound": str(BOUND), "duration_s": DURATION_S}
    if arguments.out is not None and arguments.out.exists():
        found |= json.loads(arguments.out.read_text())
    if {"kills", "hop"} & set(wanted):  # the simulator's figures are of no machine
        found["machine"] = describe_machine()
    if "rates" in wanted:
        found["rates"] = measure_rates()
    if "latencies" in wanted:
        found["latencies"] = measure_latencies(found["rates"])
    if "kills" in wanted:
        found["kills"] = asyncio.run(measure_kills(arguments.kills, arguments.port))
    if "hop" in wanted:
        found["hop"] = uvloop.run(measure_hop())
    text = json.dumps(found, indent=1)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
