from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")
from typer.testing import CliRunner

from skipjoin.cli import app
from skipjoin.version import VERSION

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]
START_S = 600.0
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


@dataclass
class Server:
    """A running server."""

    port: int
    metrics: int
    log: Path

    def complete(self, engine: int, name: str, tokens: int) -> dict[str, Any]:
        body = {"prompt": [7] * 20, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        headers = {"content-type": "application/json", "x-request-id": name, "x-data-parallel-rank": str(engine)}
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as response:
            return dict(json.load(response))

    def explain(self, engine: int, name: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["explain", name, "--url", f"http://127.0.0.1:{self.metrics + engine}"])
        return done.exit_code, done.output


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    import torch  # noqa: PLC0415

    from random_model import make_model  # noqa: PLC0415

    folder = tmp_path_factory.mktemp("server")
    make_model(
        folder / "model",
        torch.float32,
        num_hidden_layers=2,
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=2,
    )
    port, (metrics, _) = ports(1)[0], ports(2)
    chosen = {"skipjoin": {"recipe": "fastserve", "metrics_port": metrics}}
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder / "model"),
        *("--host", "127.0.0.1", "--port", port, "--dtype", "float32", "--enforce-eager", "--max-model-len", 512),
        *("--max-num-seqs", 1, "--data-parallel-size", 2, "--served-model-name", "m"),
        *("--scheduler-cls", "skipjoin.vllm.Scheduler", "--additional-config", json.dumps(chosen)),
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [str(part) for part in command], env={**os.environ, **ENVIRONMENT}, stdout=log, stderr=log
        )
        made = Server(port, metrics, folder / "log")
        try:
            wait_for(made, process)
            yield made
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            finally:
                process.kill()


def ports(count: int) -> list[int]:
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = probe.getsockname()[1]
        found = list(range(first, first + count))
        try:
            for port in found[1:]:
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return found


def wait_for(server: Server, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while True:
        assert process.poll() is None, server.log.read_text()[-3000:]
        assert time.monotonic() < deadline, server.log.read_text()[-3000:]
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health").close()
            return
        except OSError:
            time.sleep(0.2)


def test_each_data_parallel_engine_has_a_scheduler_with_metrics_and_explanations(server: Server) -> None:
    with ThreadPoolExecutor(6) as pool:
        sent = {
            name: pool.submit(server.complete, engine, name, 100)
            for engine in (0, 1)
            for name in (f"first-{engine}", f"second-{engine}", f"third-{engine}")
        }
        answers = {name: one.result() for name, one in sent.items()}
    texts = {answer["choices"][0]["text"] for answer in answers.values()}
    assert len(texts) == 1  # equal prompts, preempted or not
    for engine in (0, 1):
        with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics + engine}/metrics") as response:
            text = response.read().decode()
        assert f'skipjoin:scheduler_info{{recipe="fastserve",version="{VERSION}",vllm="' in text
        assert 'skipjoin:num_requests_waiting{reason="no_slot"} 0.0' in text
        (steps,) = (line for line in text.splitlines() if line.startswith("skipjoin:steps_total"))
        assert float(steps.split()[1]) >= 300
        waited = [server.explain(engine, f"{name}-{engine}") for name in ("first", "second", "third")]
        assert [code for code, _ in waited] == [0, 0, 0]
        assert sum("longest for: no slot." in shown for _, shown in waited) >= 2
        assert all("ended (length)" in shown and "100 of at most 100 output tokens" in shown for _, shown in waited)
        code, shown = server.explain(engine, answers[f"first-{1 - engine}"]["id"])
        assert code == 1
        assert "is live or finished" in shown
        assert server.explain(engine, answers[f"first-{engine}"]["id"])[0] == 0
    log = server.log.read_text()
    assert log.count(f"Skipjoin {VERSION} schedules vLLM") == 2
    assert "recipe fastserve, forecasts none" in log
    assert "Not supported: pipeline parallelism" in log
