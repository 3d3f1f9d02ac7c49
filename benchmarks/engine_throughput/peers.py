"""The engines that are compared, behind one call: run these jobs, return the seconds it took."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from workload import BATCH, Job

from skipjoin import LLM, SamplingParams


class Ours:
    """`skipjoin.LLM`, in this process."""

    def __init__(self, folder: Path) -> None:
        self._llm = LLM(str(folder), progress=False, max_num_seqs=4 * BATCH)
        self.weight_bytes = self._llm.engine.info.weight_bytes

    def run(self, jobs: list[Job]) -> float:
        params = [SamplingParams(max_tokens=job.output, temperature=0, ignore_eos=True) for job in jobs]
        start = time.perf_counter()
        results = self._llm.generate([job.prompt for job in jobs], params)
        seconds = time.perf_counter() - start
        assert [len(result.token_ids) for result in results] == [job.output for job in jobs]
        return seconds

    def scheduling_share(self, jobs: list[Job]) -> float:
        """Share of a run that the engine core's decisions take."""
        core = self._llm.engine.core
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

    def close(self) -> None:
        self._llm.close()


class OursOverHttp:
    """`skipjoin serve` in processes of its own, one stream per request, as many at a time as the engine batches."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        skipjoin = Path(sys.executable).with_name("skipjoin")
        command = [skipjoin, "serve", folder, "--port", str(self._port), "--max-num-seqs", str(4 * BATCH)]
        self._server = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while not self._ready():
            if self._server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the server did not start")
            time.sleep(0.2)
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/v1/models") as answer:
            self._name = json.load(answer)["data"][0]["id"]

    def _ready(self) -> bool:
        with contextlib.suppress(OSError):
            return urllib.request.urlopen(f"http://127.0.0.1:{self._port}/ready").status == 200
        return False

    def run(self, jobs: list[Job]) -> float:
        return asyncio.run(self._run(jobs))

    async def _run(self, jobs: list[Job]) -> float:
        start = time.perf_counter()
        counts = await asyncio.gather(*(self._stream(job) for job in jobs))
        seconds = time.perf_counter() - start
        assert counts == [job.output for job in jobs], counts
        return seconds

    async def _stream(self, job: Job) -> int:
        """Tokens of one streamed completion, by the usage that the server reports at its end."""
        body = json.dumps(
            {
                "model": self._name,
                "prompt": job.prompt,
                "max_tokens": job.output,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        # A bare socket: a client library would take the processor time that is being measured.
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json"
        writer.write(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        tail = b""
        while piece := await reader.read(1 << 16):
            tail = (tail + piece)[-2048:]
        writer.close()
        usage = tail[tail.rindex(b'"completion_tokens"') :]
        return int(usage.split(b":", 1)[1].split(b",")[0].split(b"}")[0])

    def close(self) -> None:
        self._server.send_signal(signal.SIGTERM)
        self._server.wait(30)


class Generate:
    """transformers' `generate`, in batches of 16 in the order given, padded on the left."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False).eval()

    @torch.inference_mode()
    def run(self, jobs: list[Job]) -> float:
        start = time.perf_counter()
        for first in range(0, len(jobs), BATCH):
            batch = jobs[first : first + BATCH]
            width = max(len(job.prompt) for job in batch)
            ids = torch.tensor([[0] * (width - len(job.prompt)) + job.prompt for job in batch])
            mask = torch.tensor([[0] * (width - len(job.prompt)) + [1] * len(job.prompt) for job in batch])
            longest = max(job.output for job in batch)
            self.model.generate(
                ids, attention_mask=mask, max_new_tokens=longest, min_new_tokens=longest, do_sample=False
            )
        return time.perf_counter() - start

    def close(self) -> None:
        pass


class ContinuousBatching:
    """transformers' continuous batching, with a cache that the jobs fit in."""

    def __init__(self, generate: Generate) -> None:
        self._model = generate.model

    def run(self, jobs: list[Job]) -> float:
        config = GenerationConfig(max_new_tokens=256, do_sample=False, eos_token_id=-1, pad_token_id=0)
        batching = ContinuousBatchingConfig(page_size=32, num_blocks=512, max_batch_tokens=1024)
        manager = self._model.init_continuous_batching(generation_config=config, continuous_batching_config=batching)
        manager.start()
        start = time.perf_counter()
        for job in jobs:
            manager.add_request(job.prompt, max_new_tokens=job.output)
        done, tokens = 0, 0
        while done < len(jobs):
            result = manager.get_result(timeout=60)
            if result is not None and result.is_finished():
                done += 1
                tokens += len(result.generated_tokens)
        seconds = time.perf_counter() - start
        manager.stop(block=True)
        assert tokens == sum(job.output for job in jobs), tokens
        return seconds

    def close(self) -> None:
        pass


def memory_bandwidth() -> float:
    """Bytes per second that all cores read, from sums over a tensor larger than the caches."""
    data = torch.ones(1 << 28, dtype=torch.float32)
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        data.sum()
        best = max(best, data.nbytes / (time.perf_counter() - start))
    return best


os.environ.setdefault("HF_HUB_OFFLINE", "1")
