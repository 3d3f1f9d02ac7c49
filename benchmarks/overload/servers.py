"""The servers that are loaded: each a context that yields its URL and the name of its model."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from skipjoin.builtin import builtin_model_path

START_S = 300.0


@contextmanager
def skipjoin(places: int) -> Iterator[tuple[str, str]]:
    """`skipjoin serve` of the built-in model. The model gets one core, the other is for HTTP and for the client."""
    port = free_port()
    program = str(Path(sys.executable).with_name("skipjoin"))
    options = ["--port", str(port), "--threads", "1", "--kv-cache-gib", "0.5", "--batch-dir", "none"]
    with running([program, "serve", *options, "--max-num-queued-reqs", str(places)], port, {}) as found:
        yield found


@contextmanager
def peer(python: Path) -> Iterator[tuple[str, str]]:
    """vLLM's server of the same model."""
    port = free_port()
    options = ["--port", str(port), "--dtype", "bfloat16", "--max-model-len", "1024", "--max-num-seqs", "128"]
    command = [
        str(python),
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(builtin_model_path()),
    ]
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0",
        "PYTHONPATH": "",
    }
    with running([*command, "--host", "127.0.0.1", *options, "--enforce-eager"], port, environment) as found:
        yield found


@contextmanager
def running(command: Sequence[str], port: int, environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """A server's process, from the time that it lists its model to its end."""
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **environment}
    )
    try:
        url = f"http://127.0.0.1:{port}"
        yield url, model_of(url, process)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def model_of(url: str, process: subprocess.Popen[bytes]) -> str:
    """The model that the server lists, once it does."""
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            answer = httpx.get(f"{url}/v1/models")
            if answer.status_code == 200:
                return str(answer.json()["data"][0]["id"])
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise RuntimeError("the server did not start")


def free_port() -> int:
    """A port of this machine that no server has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
