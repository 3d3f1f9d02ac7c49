"""Start-up, life and shutdown of the server.

The first signal drains the server: new requests get 503, running ones continue for at most `shutdown_timeout_s`, and
batch lines return to the store. The second stops everything. When the engine dies, all requests fail with 503 for
`DEATH_GRACE_S`, so that clients and probes see this.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import uvloop
from rich.console import Console
from rich.progress import Progress, TaskID

from skipjoin.builtin import MODEL_NAME
from skipjoin.config import ConfigError, EngineConfig, ForecastConfig, ServerConfig
from skipjoin.config.access import is_loopback
from skipjoin.engine.forecasting import open_keeper, state_folder
from skipjoin.extras import why_missing
from skipjoin.model.errors import ModelError
from skipjoin.model.folder import check_model
from skipjoin.model.generation_config import sampling_defaults
from skipjoin.model.tokenizer import Tokenizer, load_tokenizer
from skipjoin.pooling import Task
from skipjoin.server import logs
from skipjoin.server.api.app import build_app, build_metrics_app
from skipjoin.server.api.connections import ConnectionLimits
from skipjoin.server.api.errors import DEATH_GRACE_S, unavailable
from skipjoin.server.api.feed import ConsoleStreams
from skipjoin.server.api.http import HttpServer
from skipjoin.server.api.request_log import RequestLogging
from skipjoin.server.api.service import Service
from skipjoin.server.batches.disabled import NoBatches
from skipjoin.server.batches.disk import batch_folder
from skipjoin.server.engines.engine_client import EngineClient
from skipjoin.server.engines.engine_handle import EngineHandle, EngineStartError
from skipjoin.server.engines.engine_program import ENGINE_COMMAND
from skipjoin.server.listeners import connection_limits, open_listeners, url_of
from skipjoin.server.metrics import Metrics
from skipjoin.server.settings import Settings, check_files, check_forecast_server, check_settings
from skipjoin.system.garbage import resume_garbage_collection, without_garbage_collection

if TYPE_CHECKING:
    from skipjoin.server.api.length_server import ForecastRequests
    from skipjoin.server.batches.service import Batches
    from skipjoin.server.engines.replicas import ReplicaSet

logger = logging.getLogger(__name__)

EXIT_OK, EXIT_ENGINE, EXIT_SETTING = 0, 1, 2
DEFAULT_FORECASTS = ForecastConfig()
_OPEN = "any machine that reaches %s may use this server, which asks for no key"
# Limit of the answer to the command that the server prints.
_EXAMPLE_TOKENS = 200
_QUESTION = "What is the capital of France? Answer in one sentence."
# Interval in which the drain checks for open requests.
_POLL_S = 0.05

OnProgress = Callable[[str, float], None]


# Creates the engines of a client. The last argument is called during startup with the name of the stage and its
# completed fraction.
MakeEngines = Callable[[EngineClient, Sequence[str], OnProgress], "EngineHandle | ReplicaSet"]


def run_server(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    forecast_config: ForecastConfig = DEFAULT_FORECASTS,
    *,
    engine_command: Sequence[str] = ENGINE_COMMAND,
    make_engines: MakeEngines = EngineHandle,
    spell: Callable[[str], str] = str,
) -> int:
    logs.configure(server_config.log_level, server_config.log_format, spell)
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_garbage_collection())  # until requests can be served
        try:
            settings, listeners, limits = _prepare(stack, engine_config, server_config, forecast_config)
        except (ConfigError, ModelError) as error:
            logs.fail(f"{error}")
            return EXIT_SETTING
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        return runner.run(Server(settings, limits, engine_command, make_engines).run(*listeners))


def check_server(
    engine: EngineConfig,
    server: ServerConfig,
    forecasts: ForecastConfig,
    check_engine: Callable[[EngineConfig], object],
) -> int:
    """Check what `run_server` would refuse before it loads the weights. Raise `ConfigError` or `ModelError`."""
    with contextlib.ExitStack() as stack:
        settings, listeners, _ = _prepare(stack, engine, server, forecasts)
        tokenizer = load_tokenizer(check_model(engine.model, engine.load_format), chat_template=server.chat_template)
        stack.callback(tokenizer.close)
        if tokenizer.chat_template is not None:
            tokenizer.chat_template.check()
        if server.forecast_url is not None:
            asyncio.run(check_forecast_server(settings.server))
        check_engine(settings.engine)
        addresses = ", ".join(url_of(listener, is_secure=settings.server.is_secure) for listener in listeners)
    print(f"The settings are valid: {engine.model} with recipe {engine.recipe} at {addresses}")
    return EXIT_OK


def _prepare(
    stack: contextlib.ExitStack, engine: EngineConfig, server: ServerConfig, forecasts: ForecastConfig
) -> tuple[Settings, list[socket.socket], ConnectionLimits]:
    settings = check_settings(engine, server, forecasts)
    limits = connection_limits(settings.server)
    check_files(engine, server)
    # Before the model is loaded, so that a port in use is reported immediately.
    listeners = open_listeners(settings.server)
    for listener in listeners:
        stack.enter_context(listener)
    config = settings.server
    if config.metrics_port is not None and config.api_keys and not config.metrics_keys:
        logger.warning(
            "--metrics-port %d answers without a key, unlike the other routes: set --metrics-key-file, or let a "
            "firewall protect it",
            listeners[-1].getsockname()[1],
        )
    if config.fair_by == "auto" and config.sharing == "key":
        count = len(set(config.api_keys))
        logger.info("%d API keys share the service fairly; --fair-by none turns this off", count)
    if not (settings.server.api_keys or is_loopback(listeners[0].getsockname()[0])):
        why = _OPEN % settings.server.host
        if not settings.server.allow_no_key:
            remedy = "set api_key_file or SKIPJOIN_API_KEY, listen on 127.0.0.1, or set allow_no_key"
            raise ConfigError(f"host: {why}: {remedy}")
        logger.warning("%s", why)
    return settings, listeners, limits


class Server:
    def __init__(
        self, settings: Settings, limits: ConnectionLimits, command: Sequence[str], make_engines: MakeEngines
    ) -> None:
        self._config = config = settings.server
        self._forecasts = settings.forecasts
        self._progress = ProgressDisplay(has_bars=config.log_format == "text")
        metrics = Metrics(config.metrics_compat)
        client = EngineClient(metrics, wanted=config.replicas, seed=settings.engine.seed)
        self._engine = make_engines(client, command, self._progress.update)
        self._service = Service(config, client, metrics, settings.engine.lora_modules)
        most = config.batch_inflight or 2 * settings.engine.max_num_seqs * config.replicas
        self._batches = _batches(self._service, most)
        # After failures of the others, one engine may hold all admitted requests.
        live_requests = config.max_queued_requests + self._batches.live_requests
        self._engine_config = replace(
            settings.engine, max_live_requests=live_requests, learned_dir=state_folder(settings.forecasts)
        )
        self._streams = ConsoleStreams(self._service, has_batches=self._batches.is_enabled)
        app = build_app(self._service, self._batches, self._streams)
        apps = [app] if config.metrics_port is None else [app, build_metrics_app(self._service)]
        refused = partial(metrics.count, "connections_refused_total")
        proxies = config.forwarded_allow_ips
        self._http = [HttpServer(RequestLogging(app), limits, refused, proxies, config.tls) for app in apps]
        self._questions: ForecastRequests | None = None
        self._signals = 0
        self._stop = asyncio.Event()

    async def run(self, *listeners: socket.socket) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        # Serve 503 while the model is loaded, so that probes can distinguish loading from dead.
        serving = [
            asyncio.create_task(http.serve(sockets=[listener]))
            for http, listener in zip(self._http, listeners, strict=True)
        ]
        try:
            code = await self._serve([url_of(listener, is_secure=self._config.is_secure) for listener in listeners])
        finally:
            self._streams.close()
            for http in self._http:
                http.should_exit = True
            await self._batches.close()
            await asyncio.gather(*serving)
            await self._engine.stop()
            if self._questions is not None:
                await self._questions.close()
            self._service.close()
        return code

    def _on_signal(self) -> None:
        self._signals += 1
        self._stop.set()
        self._service.drain()
        if self._signals > 1:
            self._engine.kill()
            for http in self._http:
                http.force_exit = True

    async def _serve(self, urls: Sequence[str]) -> int:
        try:
            tokenizer = await self._start()
        except (EngineStartError, ModelError) as error:
            logs.fail(f"{error}")
            return EXIT_ENGINE
        except ConfigError as error:
            logs.fail(f"{error}")
            return EXIT_SETTING
        finally:
            self._progress.close()
        if tokenizer is None:
            return EXIT_OK
        self._announce(*urls)
        await _first(self._stop.wait(), self._engine.died.wait())
        # A signal may have arrived since, and a second one kills the engine.
        if self._engine.died.is_set() and self._signals < 2:
            logger.error("the engine has died: %s", self._engine.cause)
            if not self._stop.is_set():
                logger.error("this server exits in %g s", DEATH_GRACE_S)
                await _first(self._stop.wait(), asyncio.sleep(DEATH_GRACE_S))
            return EXIT_ENGINE
        await self._drain()
        return EXIT_OK

    async def _start(self) -> Tokenizer | None:
        await self._batches.open()
        if self._config.forecast_url is not None and not await self._try_questions():
            return None
        starting = asyncio.create_task(self._engine.start(self._engine_config, self._config.hang_limits))
        if not await self._unless_stopped(starting):
            self._engine.kill()
            await asyncio.wait((starting,))
            starting.exception()  # retrieved and dropped: the engine was killed on purpose
            return None
        info = starting.result()
        template = self._config.chat_template
        tokenizer = await self._service.in_thread(load_tokenizer, info.folder, chat_template=template)
        if tokenizer.chat_template is not None:
            await self._service.in_thread(tokenizer.chat_template.check)
        defaults = sampling_defaults(info.folder, self._engine_config.generation_config)
        if defaults:
            shown = ", ".join(f"{name} {value}" for name, value in defaults.items())
            logger.info("sampling defaults of the model's generation_config.json: %s", shown)
        keeper = None
        if self._forecasts is not None:
            source = {"model": info.model, "folder": info.folder, "text_of": tokenizer.decode}
            # An encoder of texts leaves the other cores to the engine.
            source |= {"owners": len(set(self._config.api_keys)), "threads": 1}
            keeper = await self._service.in_thread(open_keeper, self._forecasts, **source)
        ask = None if self._questions is None else partial(self._questions.ask, tokenizer.decode)
        self._service.open(info, tokenizer, keeper, ask, sampling_defaults=defaults)
        resume_garbage_collection()
        return tokenizer

    async def _unless_stopped(self, work: asyncio.Task[Any]) -> bool:
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        return work.done()

    async def _try_questions(self) -> bool:
        # Imported only when needed, because it imports aiohttp.
        from skipjoin.server.api.length_server import KEY_VARIABLE, ForecastRequests, LengthServer  # noqa: PLC0415

        server = LengthServer(self._config, os.environ.get(KEY_VARIABLE))
        self._questions = ForecastRequests(server, self._service.metrics)
        check = asyncio.create_task(server.check())
        if not await self._unless_stopped(check):
            check.cancel()
            await asyncio.wait((check,))
            return False
        check.result()
        return True

    def _announce(self, url: str, metrics_url: str | None = None) -> None:
        info = self._service.info
        can_chat = info.task is Task.GENERATE and self._service.tokenizer.chat_template is not None
        logs.announce(
            f"Ready: {self._service.name} at {url} ({self._count()}recipe {info.recipe}, "
            f"context {info.max_model_len} tokens, "
            f"{info.device_blocks} KV blocks of {info.block_size} and {info.cpu_blocks} in CPU memory"
            f"{'' if info.swap_dtype == 'auto' else f' as {info.swap_dtype}'}, "
            f"{info.dtype} on {info.device})\n"
            f"Try: {self._example(url)}"
            + (f"\nChat in a browser: {url}/" if self._config.console and can_chat else "")
            + (f"\nMetrics: {metrics_url}/metrics" if metrics_url else ""),
            url=url,
            model=self._service.name,
            recipe=info.recipe,
        )

    def _count(self) -> str:
        replicas = self._config.replicas
        return f"{replicas} replicas, each with " if replicas > 1 else ""

    def _example(self, url: str) -> str:
        service, config = self._service, self._config
        limit = min(_EXAMPLE_TOKENS, service.info.max_model_len // 2)
        path, asked = "completions", {"prompt": "Once upon a time", "max_tokens": limit, "stream": True}
        if service.info.task is Task.EMBED:
            path, asked = "embeddings", {"input": _QUESTION}
        elif service.info.task is Task.SCORE:
            path, asked = "rerank", {"query": _QUESTION, "documents": ["It is Paris.", "It rains."]}
        elif service.tokenizer.chat_template is not None:
            text = "Count from 3 to 12" if service.info.model == MODEL_NAME else _QUESTION
            messages = [{"role": "user", "content": text}]
            path, asked = "chat/completions", {"messages": messages, "max_tokens": limit, "stream": True}
        body = json.dumps({"model": service.name, **asked}, ensure_ascii=False)
        options = " --cert CLIENT.pem" if config.ssl_ca_certs else ""
        options += " -H 'Authorization: Bearer KEY'" if config.api_keys else ""
        return f"curl -N {url}/v1/{path}{options} -H 'Content-Type: application/json' -d {shlex.quote(body)}"

    async def _drain(self) -> None:
        service = self._service
        limit_s = self._config.shutdown_timeout_s
        closing = asyncio.create_task(self._batches.close())  # returns their lines to the store
        logger.info("draining: %d requests run, for at most %g s more", service.admission.requests, limit_s)
        end = asyncio.get_running_loop().time() + limit_s
        while (
            (service.busy or service.admission.requests)
            and self._signals < 2
            and asyncio.get_running_loop().time() < end
        ):
            await asyncio.sleep(_POLL_S)
        await closing
        service.client.fail_all(unavailable("the server is shutting down", "shutting_down"))


def _batches(service: Service, most: int) -> Batches | NoBatches:
    why = why_missing("this endpoint", "batches")
    if batch_folder(service.config) is None:
        why = "it was started with batch_dir none"
    if why is not None:
        if service.config.store_responses:
            raise ConfigError(f"store_responses: responses cannot be stored: {why}")
        return NoBatches(why)
    # Imported only when needed, because it imports an optional package, which takes a third of the start.
    from skipjoin.server.batches.service import Batches  # noqa: PLC0415

    return Batches(service, most=most)


async def _first(*waits: Coroutine[Any, Any, Any]) -> None:
    tasks = [asyncio.create_task(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


class ProgressDisplay:
    def __init__(self, *, has_bars: bool = True) -> None:
        is_terminal = has_bars and sys.stderr.isatty()
        self._bars = Progress(console=Console(stderr=True), transient=True) if is_terminal else None
        self._tasks: dict[str, TaskID] = {}
        self._seen: set[str] = set()

    def update(self, what: str, share: float) -> None:
        if self._bars is None:
            if what not in self._seen:
                logger.info("%s ...", what)
            self._seen.add(what)
            return
        if what not in self._tasks:
            self._bars.start()
            self._tasks[what] = self._bars.add_task(what, total=1.0)
        self._bars.update(self._tasks[what], completed=share)

    def close(self) -> None:
        if self._bars is not None:
            self._bars.stop()
