"""The servers that are loaded, Skipjoin's and others: each a context that yields a `Server`."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch

from skipjoin.model.config import ModelConfig
from skipjoin.model.kv_cache import PagedKV

# vLLM compiles its model at the first start, which takes minutes on a few cores.
START_S, STOP_S = 900.0, 60.0
# The smallest that it is fast with on a CPU.
VLLM_BLOCK = 32
HERE = Path(__file__).parent
NOTHING: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers. name: of its model. pid: of its first process."""

    url: str
    name: str
    pid: int


@contextmanager
def skipjoin(model: Path, *options: object, key: str = "") -> Iterator[Server]:
    """`skipjoin serve` of this environment. key: one that it takes, if it asks for one."""
    port = free_port()
    program = Path(sys.executable).with_name("skipjoin")
    with running([program, "serve", model, "--port", port, "--batch-dir", "none", *options], port, key=key) as server:
        yield server


@contextmanager
def vllm(
    python: Path,
    model: Path,
    *,
    seqs: int,
    dtype: str = "bfloat16",
    kv_gib: float = 2,
    is_eager: bool = False,
    cores: str = "",
) -> Iterator[Server]:
    """vLLM's server, compiled unless `is_eager`. kv_gib: it takes whole GiB; of others it gets as many blocks as fit.
    cores: of the model's threads, such as "0-3"; all that may be used."""
    port = free_port()
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", "127.0.0.1"]
    command += ["--port", port, "--dtype", dtype, "--max-model-len", 1024, "--max-num-seqs", seqs]
    command += ["--enforce-eager"] if is_eager else []
    if kv_gib % 1:
        size = PagedKV.bytes_per_block(ModelConfig.from_folder(model), VLLM_BLOCK, getattr(torch, dtype))
        command += ["--block-size", VLLM_BLOCK, "--num-gpu-blocks-override", int(kv_gib * 2**30) // size]
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": f"{math.ceil(kv_gib)}",
        "VLLM_CPU_OMP_THREADS_BIND": cores or ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "PYTHONPATH": "",
    }
    with running(command, port, environment) as server:
        yield server


@contextmanager
def llamacpp(python: Path, model: Path, *, seqs: int) -> Iterator[Server]:
    """llama.cpp's server, with weights of the model's type."""
    port = free_port()
    command = [python, HERE / "llamacpp_server.py", model, "--port", port, "--parallel", seqs]
    with running(command, port, {"PYTHONPATH": ""}) as server:
        yield server


@contextmanager
def running(
    command: Sequence[object], port: int, environment: Mapping[str, str] = NOTHING, *, key: str = ""
) -> Iterator[Server]:
    """A server's processes, from the time that it lists its model to its end. Raises RuntimeError if it does not start;
    the end of what it wrote is on stderr then."""
    # Whatever is told to end ends its servers first.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            name = model_of(url, process, key)
            if name is None:
                output.seek(0)
                sys.stderr.write(output.read()[-4000:])
                raise RuntimeError(f"{command[0]} did not start")
            yield Server(url, name, process.pid)
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server and all processes of its session."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def model_of(url: str, process: subprocess.Popen[bytes], key: str) -> str | None:
    """The model that the server lists, once it does and can answer; None if it ends, or takes too long."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            # llama.cpp's server lists its model before it has loaded it, and says so of its health.
            if httpx.get(f"{url}/health").status_code == 200:
                return str(httpx.get(f"{url}/v1/models", headers=headers).json()["data"][0]["id"])
        time.sleep(0.3)
    return None


def free_port() -> int:
    """A port of this machine that no server has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
