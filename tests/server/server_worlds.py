"""Scripted engine inside the test process, and servers in their own processes."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import struct
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import tiny_model as tiny
from forked_servers import ForkedServer
from msgspec.structs import replace

from skipjoin.config import ServerConfig
from skipjoin.core.request import FinishReason
from skipjoin.engine.forecasting import ForecastKeeper
from skipjoin.model.tokenizer import Tokenizer, load_tokenizer
from skipjoin.policies.cost import LinearCost
from skipjoin.sampling import TokenDetail, TokenLogprob
from skipjoin.server.api.app import build_app
from skipjoin.server.api.auth import AccessGuard
from skipjoin.server.api.length_server import ForecastRequests, LengthServer
from skipjoin.server.api.service import Service
from skipjoin.server.engines.connected_engine import ConnectedEngine
from skipjoin.server.engines.engine_client import EngineClient
from skipjoin.server.engines.messages import (
    Abort,
    AdapterLoaded,
    Add,
    DescribeRequests,
    FromEngine,
    LoadAdapter,
    Ready,
    Reforecast,
    StepOutputs,
    ToEngine,
    UnloadAdapter,
)
from skipjoin.server.metrics import Metrics
from support.waiting import until

HERE = Path(__file__).parent
BLOCKS = 4096
# Age that /metrics may have, and some more.
METRICS_AGE_S = 0.3
JSON = {"Content-Type": "application/json"}
DIMENSIONS = tiny.VOCAB
COST = LinearCost(floor=0.01, prefill_token=1e-5, decode=1e-3)

READY = Ready(
    model="tiny",
    folder="",
    max_model_len=tiny.CONTEXT,
    vocab_size=tiny.VOCAB,
    device_blocks=BLOCKS,
    cpu_blocks=0,
    block_size=16,
    block_bytes=1024,
    cpu_block_bytes=1024,
    swap_dtype="auto",
    recipe="fcfs",
    dtype="none",
    device="none",
    cost=COST,
)

# -- in this process --------------------------------------------------------------------------------------------


class ScriptedEngine:
    """Stands in for an engine process: the n-th output token repeats the n-th token of the prompt.

    It runs one step in each iteration of the event loop.
    """

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.replica: ConnectedEngine | None = None
        self.live: dict[int, tuple[Add, int]] = {}
        self.added: list[Add] = []
        self.aborted: list[int] = []
        self.reforecasts: list[Reforecast] = []
        self.asked: list[int] = []
        self.adapters: list[int] = []
        self.paused = False

    def join(self, ready: Ready) -> None:
        """Register with the client, which may then send requests."""
        self.replica = self.client.join(ready, self.send)

    def tell(self, message: FromEngine) -> None:
        assert self.replica is not None
        self.client.receive(self.replica, message)

    def send(self, message: ToEngine) -> None:
        if isinstance(message, Add):
            self.live[message.id] = (message, len(message.output))
            self.added.append(message)
            if len(self.live) == 1:
                asyncio.get_running_loop().call_soon(self._iterate)
        elif isinstance(message, Abort):
            self.aborted.extend(message.ids)
            for request_id in message.ids:
                self.live.pop(request_id, None)
        elif isinstance(message, Reforecast):
            self.reforecasts.append(message)
        elif isinstance(message, DescribeRequests):
            self.asked.append(message.id)
        elif isinstance(message, LoadAdapter):
            error = "" if Path(message.adapter.folder).is_dir() else f"{message.adapter.folder} is not a folder"
            self.adapters.append(message.adapter.number)
            asyncio.get_running_loop().call_soon(self.tell, AdapterLoaded(message.id, error))
        elif isinstance(message, UnloadAdapter):
            self.adapters.remove(message.number)

    def die(self) -> None:
        assert self.replica is not None
        self.live.clear()
        self.client.lose(self.replica)

    def _iterate(self) -> None:
        if not self.paused:
            self.step()
        if self.live:
            asyncio.get_running_loop().call_later(0.01 if self.paused else 0, self._iterate)

    def step(self) -> None:
        ids, tokens, details, ended, started = [], [], {}, [], []
        for request_id, (add, count) in list(self.live.items()):
            token = add.prompt[count % len(add.prompt)]
            if add.params.pooling is not None:
                details[len(ids)] = TokenDetail(TokenLogprob(token, None), vector=scripted_vector(add))
            elif add.params.logprobs is not None:
                details[len(ids)] = _detail(add, token, first=count == 0)
            if count == len(add.output):
                started.append(request_id)
            ids.append(request_id)
            tokens.append(token)
            self.live[request_id] = (add, count + 1)
            stops = {*add.params.stop_token_ids, *(() if add.params.ignore_eos else (tiny.EOS,))}
            if token in stops or count + 1 == add.params.max_tokens:
                reason = FinishReason.STOP if token in stops else FinishReason.LENGTH
                ended.append((request_id, reason.value))
                del self.live[request_id]
        self.tell(StepOutputs(ids, tokens, details, ended, started))

    def end_all(self, reason: FinishReason, error: str = "") -> None:
        """Everything that is there ends without a token."""
        ended = [(request_id, reason.value) for request_id in self.live]
        errors = dict.fromkeys(self.live, error) if error else {}
        self.live.clear()
        self.tell(StepOutputs(ended=ended, errors=errors))


async def end_next(api: Api, error: str) -> None:
    """Let the engine's next request fail."""
    await until(lambda: api.engine.live)
    api.engine.end_all(FinishReason.ERROR, error)


def scripted_vector(add: Add) -> bytes:
    """Return the share of each of the first `DIMENSIONS` tokens in a prompt, or where the second of a pair begins."""
    assert add.params.pooling is not None
    if add.params.pooling.second is not None:
        return struct.pack("<f", add.params.pooling.second / len(add.prompt))
    shares = [add.prompt.count(token) / len(add.prompt) for token in range(DIMENSIONS)]
    return struct.pack(f"<{add.params.pooling.dimensions or DIMENSIONS}f", *shares[: add.params.pooling.dimensions])


def _detail(add: Add, token: int, *, first: bool) -> TokenDetail:
    def top(count: int | None) -> tuple[tuple[int, float], ...]:
        return tuple((other, -1.0 - other) for other in range(count or 0))

    scores: tuple[TokenLogprob, ...] = ()
    if first and add.params.prompt_logprobs is not None:
        later = [TokenLogprob(known, -0.25, top(add.params.prompt_logprobs)) for known in add.prompt[1:]]
        scores = (TokenLogprob(add.prompt[0], None), *later)
    return TokenDetail(TokenLogprob(token, -0.5, top(add.params.logprobs)), scores)


@cache
def shared_tokenizer(folder: Path) -> Tokenizer:
    """Return a tokenizer that no `Api` closes, because the process of its chat template takes 0.3 s to start."""
    tokenizer = load_tokenizer(folder)
    atexit.register(tokenizer.close)
    tokenizer.close = lambda: None  # type: ignore[method-assign]
    return tokenizer


class Api:
    """Application over scripted engines, and an HTTP client that calls it directly."""

    def __init__(
        self, folder: Path, config: ServerConfig, keeper: ForecastKeeper | None = None, context: int = tiny.CONTEXT
    ) -> None:
        self.metrics = Metrics(config.metrics_compat)
        self.client = EngineClient(self.metrics, wanted=config.replicas)
        self.engines = [ScriptedEngine(self.client) for _ in range(config.replicas)]
        self.engine = self.engines[0]
        self.service = Service(config, self.client, self.metrics)
        ready = self.ready = replace(READY, folder=str(folder), max_model_len=context)
        for engine in self.engines:
            engine.join(ready)
        tokenizer = shared_tokenizer(folder)
        self.questions = ForecastRequests(LengthServer(config), self.metrics) if config.forecast_url else None
        ask = self.questions and partial(self.questions.ask, tokenizer.decode)
        self.service.open(ready, tokenizer, keeper, ask)
        self.app: AccessGuard = build_app(self.service)
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"prompt": "abcdef", **body})

    async def chat(self, **body: Any) -> httpx.Response:
        return await self.http.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, **body}
        )

    def is_clean(self) -> bool:
        admission = self.service.admission
        return not (self.engine.client.active or admission.requests or admission.tokens or self.service.busy)


MakeApi = Callable[..., contextlib.AbstractAsyncContextManager[Api]]


# -- in other processes -----------------------------------------------------------------------------------------


class ServerProcess:
    """Server in its own process, over the simulated engine or a real one."""

    def __init__(self, command: list[str], namespace: str = "") -> None:
        self.process = ForkedServer(command, namespace)
        self.errors: list[str] = []
        self._reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader.start()
        ready = self.process.stdout.readline()
        assert "Ready: " in ready, (ready, self.errors)
        self.url = ready.split(" at ")[1].split()[0]
        self.api = psutil.Process(self.process.pid)
        self.engine = self.engines()[0]

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors.extend(self.process.stderr)

    def engines(self) -> list[psutil.Process]:
        found = []
        for child in self.api.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                named = " ".join([child.name(), *child.cmdline()[1:3]])  # those that fork have the server's command
                if child.status() != psutil.STATUS_ZOMBIE and "engine" in named:
                    found.append((child.create_time(), child.pid, child))
        return [child for _, _, child in sorted(found)]

    def metric(self, name: str) -> float:
        """Return the value of a metric without labels, or the sum over its classes."""
        text = httpx.get(f"{self.url}/metrics").text
        start = (f"skipjoin:{name} ", f'skipjoin:{name}{{class="')
        found = [float(line.split()[1]) for line in text.splitlines() if line.startswith(start)]
        assert found, name
        return sum(found)

    def wait_idle(self, seconds: float = 30.0) -> None:
        """Wait until no requests remain, all KV blocks are free and the metrics say so."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            load = httpx.get(f"{self.url}/load").json()
            if not (load["server_load"] or load["running"] or load["waiting"] or load["kv_cache_usage"]):
                time.sleep(METRICS_AGE_S)
                return
            time.sleep(0.05)
        raise AssertionError(f"the server does not become idle: {load}")

    def stop(self) -> None:
        started = self.api.children(recursive=True) if self.process.poll() is None else [self.engine]
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(20)
        finally:
            self.process.kill()
        self.process.wait()
        self._reader.join(5)
        for stream in (self.process.stdout, self.process.stderr):
            stream.close()
        _, left = psutil.wait_procs(started, timeout=15)
        assert not left


StartServer = Callable[..., ServerProcess]


def outcome_of(*command: str) -> tuple[int, str]:
    """Run a server that ends by itself, and return its exit code and what it wrote to stderr; see serve.py."""
    process = ForkedServer(command)
    with process.stdout, process.stderr:
        errors = process.stderr.read()
        return process.wait(60), errors


def simulated_server(
    folder: Path,
    step_s: float,
    blocks: int,
    context: int = tiny.CONTEXT,
    *,
    namespace: str = "",
    **settings: Any,
) -> ServerProcess:
    options = [f"{name}={value}" for name, value in settings.items()]
    return ServerProcess(["simulated", str(folder), str(step_s), str(blocks), str(context), *options], namespace)
