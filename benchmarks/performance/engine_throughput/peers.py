"""The engines that are compared, behind one call that runs jobs and returns the seconds."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

import servers
from harness import show
from peer_venvs import PeerUnavailableError, python_of
from skipjoin import LLM, SamplingParams
from workload import FILL_UP, SLOTS, WARM_UP, Job

HERE = Path(__file__).parent
# More bytes than a response has.
_NEVER = 1 << 20


# Size of the tier on the CPU. All sets fit the pool, and a share of the free memory would leave none for other engines.
SWAP_GIB = 0.25


def limits(kv_gib: float) -> tuple[str | float, ...]:
    return "--max-num-seqs", SLOTS, "--kv-cache-gib", kv_gib, "--swap-space", SWAP_GIB


class Engine(Protocol):
    """An engine that runs jobs.

    Attributes:
        warm_up: Returns jobs that touch the engine's code and memory before the first measurement.
    """

    warm_up: Callable[[int], list[Job]]

    def run(self, jobs: list[Job]) -> float: ...


class Ours:
    warm_up = FILL_UP

    def __init__(self, folder: Path, kv_gib: float) -> None:
        self.llm = LLM(str(folder), progress=False, max_num_seqs=SLOTS, kv_cache_gib=kv_gib, swap_space_gib=SWAP_GIB)
        self.weight_bytes = self.llm.engine.info.weight_bytes

    def run(self, jobs: list[Job]) -> float:
        params = [SamplingParams(max_tokens=job.output, temperature=0, ignore_eos=True) for job in jobs]
        start = time.perf_counter()
        results = self.llm.generate([job.prompt for job in jobs], params)
        seconds = time.perf_counter() - start
        assert [len(result.token_ids) for result in results] == [job.output for job in jobs]
        return seconds

    def scheduling_share(self, jobs: list[Job]) -> float:
        core = self.llm.engine.core
        spent = 0.0
        originals = core.start_step, core.finish_step

        def timed(inner):
            def call(*args):
                nonlocal spent
                start = time.perf_counter()
                try:
                    return inner(*args)
                finally:
                    spent += time.perf_counter() - start

            return call

        core.start_step, core.finish_step = map(timed, originals)
        try:
            seconds = self.run(jobs)
        finally:
            core.start_step, core.finish_step = originals
        return spent / seconds


class OverHttp:
    """A server, with one stream per request."""

    def __init__(self, server: servers.Server, warm_up: Callable[[int], list[Job]] = FILL_UP) -> None:
        self.server, self.warm_up = server, warm_up
        self._port = int(server.url.rsplit(":", 1)[1])

    def run(self, jobs: list[Job]) -> float:
        return asyncio.run(self._run(jobs))

    async def _run(self, jobs: list[Job]) -> float:
        start = time.perf_counter()
        counts = await asyncio.gather(*(self._stream(job) for job in jobs))
        seconds = time.perf_counter() - start
        assert counts == [job.output for job in jobs], counts
        return seconds

    async def _stream(self, job: Job) -> int:
        """Return the tokens of a streamed completion from the usage at its end."""
        body = json.dumps(
            {
                "model": self.server.name,
                "prompt": job.prompt,
                "max_tokens": job.output,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        # A client takes processor time from the server. So this is a bare socket, whose reader wakes at the end only.
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _NEVER)
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json"
        writer.write(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        tail = b""
        while piece := await reader.read(1 << 16):
            tail = (tail + piece)[-2048:]
        writer.close()
        if b'"completion_tokens"' not in tail:
            raise RuntimeError(f"the server ended a stream with {tail!r}")
        usage = tail[tail.rindex(b'"completion_tokens"') :]
        return int(usage.split(b":", 1)[1].split(b",")[0].split(b"}")[0])


class Program:
    """An engine in another process, which reads a line for each list of jobs and answers with the seconds."""

    warm_up = WARM_UP

    def __init__(self, process: subprocess.Popen[str], engine: str = "") -> None:
        """Use a process of `program`; engine: which of its engines, if it has several."""
        self.process, self._engine = process, engine

    def run(self, jobs: list[Job]) -> float:
        task = {"engine": self._engine, "jobs": [(job.prompt, job.output) for job in jobs]}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        return float(_line(self.process))


@contextmanager
def program(peer: str, *options: object) -> Iterator[subprocess.Popen[str]]:
    """Run `PEER_peer.py` in the peer's environment and yield its process once it has loaded the model.

    Raises:
        PeerUnavailableError: The peer cannot be installed.
    """
    command = [python_of(peer), HERE / f"{peer}_peer.py", *options]
    process = subprocess.Popen(
        [str(part) for part in command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": ""},
        start_new_session=True,
    )
    try:
        _line(process)
        yield process
    finally:
        process.kill()
        process.wait()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    if not (line := process.stdout.readline()):
        raise RuntimeError("the process of a peer exited")
    return line


@contextmanager
def engines(
    folder: Path, dtype: str, names: list[str], kv_gib: float
) -> Iterator[tuple[dict[str, Engine], dict[str, str]]]:
    found: dict[str, Engine] = {}
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        ours = Ours(folder, kv_gib)
        stack.callback(ours.llm.close)
        found["skipjoin LLM"] = ours
        found["skipjoin HTTP"] = OverHttp(stack.enter_context(servers.Skipjoin(folder, *limits(kv_gib))))
        for name in names:
            try:
                found |= _peer(stack, name, folder, dtype, kv_gib)
            except (PeerUnavailableError, RuntimeError) as error:
                missing[name] = str(error)
                show(f"{name} is left out: {error}")
        yield found, missing


def _peer(stack: ExitStack, name: str, folder: Path, dtype: str, kv_gib: float) -> dict[str, Engine]:
    if name == "transformers":
        process = stack.enter_context(program("transformers", folder, "--dtype", dtype))
        return {
            "transformers generate": Program(process, "generate"),
            "transformers continuous batching": Program(process, "continuous"),
        }
    if name == "llamacpp":
        server = servers.llamacpp(python_of("llamacpp"), folder, seqs=SLOTS)
        return {"llama.cpp HTTP": OverHttp(stack.enter_context(server), WARM_UP)}
    if not name.startswith("vllm"):
        raise PeerUnavailableError(f"{name} is not compared here")
    is_eager = name == "vllm-eager"
    server = servers.vllm(python_of("vllm"), folder, seqs=SLOTS, dtype=dtype, kv_gib=kv_gib, is_eager=is_eager)
    return {"vLLM eager HTTP" if is_eager else "vLLM HTTP": OverHttp(stack.enter_context(server))}
