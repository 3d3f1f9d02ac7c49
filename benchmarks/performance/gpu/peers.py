"""The part `peers`: Skipjoin and vLLM on one card over HTTP, loaded in turns by one client.

vLLM and the packages of both servers come from the folder `BENCH_PACKAGES` (`run.py` says how to bring them). In a
rehearsal another Skipjoin, with the recipe `fcfs`, stands in for vLLM.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from common import ROOT, Figures, Task, folder_of, shape_of, significant

import harness
from random_model import write_words
from servers import NO_REFUSALS, Server, free_port

MODEL, DTYPE = "llama-3-8b", "bfloat16"
OURS, PEER = "skipjoin", "peer"
# Name, options of `skipjoin bench`, and the figure that counts; a mean is better if smaller, a throughput if larger.
_CARD = (
    ("decode 1", ("--lengths", "fixed:1024,256", "--requests", 1), "tpot_s"),
    ("decode 64", ("--lengths", "fixed:1024,256", "--requests", 64), "tpot_s"),
    ("decode 256", ("--lengths", "fixed:1024,128", "--requests", 256), "tpot_s"),
    ("256 x 256+128", ("--lengths", "fixed:256,128", "--requests", 256), "throughput_tps"),
    ("ShareGPT, 24/s", ("--lengths", "sharegpt", "--rates", 24, "--duration", 15), "normalized_latency_s"),
    ("ShareGPT, 48/s", ("--lengths", "sharegpt", "--rates", 48, "--duration", 15), "normalized_latency_s"),
)
_REHEARSAL = (
    ("decode 4", ("--lengths", "fixed:16,8", "--requests", 4), "tpot_s"),
    ("ShareGPT, 8/s", ("--lengths", "sharegpt*0.05", "--rates", 8, "--duration", 1), "normalized_latency_s"),
)
# A burst: all requests at once.
_AT_ONCE = ("--rates", 100_000)
# Each server's share of the card's memory, and turns of each load.
_SHARE, _TURNS, _RUN_S = 0.45, 2, 90.0


def measure(task: Task) -> Figures:
    loads = _REHEARSAL if task.is_rehearsal else _CARD
    shape = shape_of(task, MODEL, max_positions=256 if task.is_rehearsal else 4096)
    figures: Figures = {"model": MODEL, "target": {"ratio": 1.0, "overload": 0.5}, "loads": {}}
    with ExitStack() as stack:
        folder = stack.enter_context(folder_of(shape, DTYPE))
        write_words(folder, shape.vocab)
        servers = {OURS: stack.enter_context(_ours(task, folder, "fastserve"))}
        servers[PEER] = stack.enter_context(_ours(task, folder, "fcfs") if task.is_rehearsal else _vllm(folder))
        for name, options, figure in loads:
            if task.left_s < 0:
                figures["skipped"] = name
                break
            figures["loads"][name] = _compared(servers, options, figure, 1 if task.is_rehearsal else _TURNS)
            task.keep(figures)
    return figures


def _compared(servers: Mapping[str, Server], options: tuple[object, ...], figure: str, turns: int) -> Figures:
    runs: dict[str, list[Any]] = {name: [] for name in servers}
    for turn in range(turns):
        for name in harness.in_turn(servers, turn):
            arguments = (*options, *(() if "--rates" in options else _AT_ONCE), "--seeds", turn)
            runs[name].append(_bench(servers[name], *arguments))
    found: Figures = {"figure": figure, "runs": runs}
    medians = {name: statistics.median(_value(run, figure) for run in of) for name, of in runs.items()}
    better, worse = (OURS, PEER) if figure.startswith("throughput") else (PEER, OURS)
    # At least 1 if Skipjoin is as good.
    return found | {"ratio": significant(medians[better] / medians[worse])}


def _value(run: Figures, figure: str) -> float:
    value = run[figure]
    return float(value["mean"] if isinstance(value, dict) else value)


def _bench(server: Server, *options: object) -> Figures:
    with harness.scratch() as scratch:
        out = scratch / "records.json"
        command = [str(part) for part in (*_command("bench"), "--base-url", server.url, *options, "--out", out)]
        subprocess.run(command, env=os.environ | _environment(), stdout=sys.stderr, timeout=_RUN_S, check=True)
        (record,) = json.loads(out.read_text())
    return {name: value for name, value in record.items() if name not in ("series", "quantiles", "slo")}


def _ours(task: Task, folder: Path, recipe: str) -> Server:
    port = free_port()
    command = [*_command("serve"), folder, "--port", port, "--batch-dir", "none", "--recipe", recipe, *NO_REFUSALS]
    command += ["--no-enable-prefix-caching"]
    command += ["--load-format", "dummy", "--dtype", DTYPE, "--device", task.device, "--profile", "off"]
    command += ["--kv-cache-gib", 0.01] if task.is_rehearsal else ["--gpu-memory-utilization", _SHARE]
    return Server(command, port, _environment())


def _vllm(folder: Path) -> Server:
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--port", port]
    command += ["--load-format", "dummy", "--dtype", DTYPE, "--gpu-memory-utilization", _SHARE]
    command += ["--max-model-len", 4096, "--max-num-seqs", 256, "--no-enable-prefix-caching"]
    return Server(command, port, _environment() | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"})


def _command(name: str) -> list[object]:
    return [sys.executable, "-m", "skipjoin", name]


def _environment() -> dict[str, str]:
    """Return the variables of a server or client, which finds the packages that were brought last."""
    paths = (str(ROOT / "src"), os.environ.get("BENCH_PACKAGES", ""))
    return {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
