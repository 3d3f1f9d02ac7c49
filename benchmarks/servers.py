"""Servers under load, Skipjoin's and others, each a process group of its own."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import httpx
import psutil
import torch
from prometheus_client.parser import text_string_to_metric_families

import harness
from harness import SKIPJOIN, Record
from peer_venvs import PeerUnavailableError, python_of
from skipjoin.model.config import ModelConfig
from skipjoin.model.kv_cache import PagedKV

# vLLM compiles its model at the first start, which takes minutes on a few cores.
START_S, STOP_S, BENCH_S = 900.0, 60.0, 900.0
# The smallest block size at which vLLM is fast on a CPU.
VLLM_BLOCK = 32
HERE = Path(__file__).parent
NOTHING: Mapping[str, str] = {}
# Options for comparisons of order, in which no request is refused.
NO_REFUSALS = ("--max-num-queued-reqs", 100_000, "--max-num-queued-tokens", 100_000_000)


class Server:
    """A server that has answered `/health`; as a context manager it is stopped at the end."""

    def __init__(
        self, command: Sequence[object], port: int, environment: Mapping[str, str] = NOTHING, *, key: str = ""
    ) -> None:
        """Start the server and wait until it lists its model.

        Args:
            key: API key to send, if the server asks for one.

        Raises:
            RuntimeError: The server does not start. The end of its output is on standard error.
        """
        # A terminated benchmark stops its servers first.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        self.url = f"http://127.0.0.1:{port}"
        self._output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed by stop)
        self.process = subprocess.Popen(
            [str(part) for part in command],
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        try:
            self.name = self._wait_for_model(key)
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _wait_for_model(self, key: str) -> str:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        end = time.monotonic() + START_S
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                # llama.cpp's server lists its model before it has loaded it; its health says when it has.
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return str(httpx.get(f"{self.url}/v1/models", headers=headers).json()["data"][0]["id"])
            time.sleep(0.3)
        sys.stderr.write(self.log()[-4000:])
        raise RuntimeError(f"{self.process.args[0]} did not start")  # type: ignore[index]

    def log(self) -> str:
        self._output.seek(0)
        return self._output.read()

    def engines(self) -> list[psutil.Process]:
        return self.children("skipjoin.server.engines.engine_process")

    def children(self, text: str) -> list[psutil.Process]:
        """Return the descendants with `text` in their name or command line, oldest first."""
        below = psutil.Process(self.process.pid).children(recursive=True)
        found = [one for one in below if text in one.name() or text in " ".join(one.cmdline())]
        return sorted(found, key=lambda one: one.create_time())

    def metrics(self) -> Counter[str]:
        """Return the samples of `/metrics` except buckets, by name and label values, summed over request classes."""
        found = Counter[str]()
        for family in text_string_to_metric_families(httpx.get(f"{self.url}/metrics").text):
            for sample in family.samples:
                if "le" not in sample.labels:
                    labels = [value for label, value in sample.labels.items() if label != "class"]
                    found[" ".join([sample.name.removeprefix("skipjoin:"), *labels])] += sample.value
        return found

    def metric(self, name: str, **labels: str) -> float:
        return sum(
            sample.value
            for family in text_string_to_metric_families(httpx.get(f"{self.url}/metrics").text)
            for sample in family.samples
            if sample.name == f"skipjoin:{name}" and labels.items() <= sample.labels.items()
        )

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal, wait, and kill what is left of the process group."""
        self.process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Skipjoin(Server):
    """`skipjoin serve` of this environment; batches are off unless `--batch-dir` is among the options."""

    def __init__(self, model: Path | str, *options: object, key: str = "") -> None:
        port = free_port()
        super().__init__([SKIPJOIN, "serve", model, "--port", port, "--batch-dir", "none", *options], port, key=key)


def vllm(
    python: Path,
    model: Path,
    *,
    seqs: int,
    dtype: str = "bfloat16",
    kv_gib: float = 2,
    is_eager: bool = False,
    has_priorities: bool = False,
    cores: str = "",
    chunk_tokens: int | None = None,
    max_len: int = 1024,
    options: Sequence[object] = (),
    python_path: str = "",
) -> Server:
    """Start vLLM's server, compiled unless `is_eager`.

    Args:
        chunk_tokens: Token budget of a step, to which prompts are cut; vLLM's default if None.
        kv_gib: Size of the KV pool. vLLM takes whole GiB; for other sizes it gets the number of blocks that fit.
        has_priorities: Requests run by their `priority`, the lowest first.
        cores: Cores of the model's threads, such as "0-3"; all available ones by default.
        options: Further options of the command.
        python_path: Folder from which vLLM imports a plugin.
    """
    port = free_port()
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", "127.0.0.1"]
    command += ["--port", port, "--dtype", dtype, "--max-model-len", max_len, "--max-num-seqs", seqs, *options]
    command += ["--enforce-eager"] if is_eager else []
    command += ["--scheduling-policy", "priority"] if has_priorities else []
    if chunk_tokens is not None:
        command += ["--enable-chunked-prefill", "--max-num-batched-tokens", chunk_tokens]
    if kv_gib % 1:
        size = PagedKV.bytes_per_block(ModelConfig.from_folder(model), VLLM_BLOCK, getattr(torch, dtype))
        command += ["--block-size", VLLM_BLOCK, "--num-gpu-blocks-override", int(kv_gib * 2**30) // size]
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": f"{math.ceil(kv_gib)}",
        "VLLM_CPU_OMP_THREADS_BIND": cores or ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "PYTHONPATH": python_path,
    }
    return Server(command, port, environment)


def start_vllm(
    stack: ExitStack,
    names: Iterable[str],
    model: Path,
    *,
    seqs: int,
    kv_gib: float,
    chunk_tokens: int | None = None,
) -> tuple[dict[str, Server], dict[str, str]]:
    """Start the vLLM peers among `names` on a stack, and return them and the reasons for the missing ones."""
    found: dict[str, Server] = {}
    missing: dict[str, str] = {}
    for name in names:
        try:
            server = vllm(
                python_of(name),
                model,
                seqs=seqs,
                kv_gib=kv_gib,
                is_eager=name == "vllm-eager",
                has_priorities=name == "vllm-priority",
                chunk_tokens=chunk_tokens,
            )
            found[name] = stack.enter_context(server)
        except (PeerUnavailableError, RuntimeError) as error:
            missing[name] = str(error)
            print(f"{name} is left out: {error}", file=sys.stderr, flush=True)
    return found, missing


def stop_in_turn(stack: ExitStack, group: subprocess.Popen[str]) -> None:
    """Stop a process group by a signal until `running`, and let it go on when the stack ends."""
    os.killpg(group.pid, signal.SIGSTOP)
    # A stopped process ignores the signal that ends it.
    stack.callback(os.killpg, group.pid, signal.SIGCONT)


@contextlib.contextmanager
def running(group: subprocess.Popen[str]) -> Iterator[None]:
    """Let a process group run that `stop_in_turn` has stopped."""
    os.killpg(group.pid, signal.SIGCONT)
    try:
        yield
    finally:
        os.killpg(group.pid, signal.SIGSTOP)


def bench(server: Server, *options: object) -> Record:
    (record,) = harness.records_of("bench", "--base-url", server.url, *options, timeout_s=BENCH_S)
    return dict(record)


def bench_requests(server: Server, *options: object) -> tuple[Record, list[Record]]:
    with harness.scratch() as folder:
        lines = folder / "requests.jsonl"
        record = bench(server, *options, "--record-requests", lines)
        return record, [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]


def full_rate(requests: Iterable[Record]) -> float:
    """Return the requests per second that finish in the middle of a burst, while many wait."""
    ends = sorted(one["ended_s"] for one in requests)
    first, last = len(ends) // 5, len(ends) * 4 // 5
    return float((last - first) / (ends[last] - ends[first]))


def llamacpp(python: Path, model: Path, *, seqs: int) -> Server:
    """Start llama.cpp's server with weights of the model's type."""
    port = free_port()
    command = [python, HERE / "llamacpp_server.py", model, "--port", port, "--parallel", seqs]
    return Server(command, port, {"PYTHONPATH": ""})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
