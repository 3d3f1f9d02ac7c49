"""A scripted OpenAI-compatible server in a thread of the test process."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

from aiohttp import web

Handler = Callable[["OpenAiStub", web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def token(finish: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": "x", "finish_reason": finish}], usage=None)


def usage(tokens: int) -> bytes:
    return event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": tokens})


DONE = b"data: [DONE]\n\n"


async def stream(request: web.Request, *chunks: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for chunk in chunks:
        await response.write(chunk)
    return response


def whole(tokens: int) -> tuple[bytes, ...]:
    return (*[token()] * (tokens - 1), token("length"), usage(tokens), DONE)


async def complete(stub: OpenAiStub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return await stream(request, *whole(body["max_tokens"]))


class OpenAiStub:
    """Server that runs within a `with` statement."""

    def __init__(self, handler: Handler = complete, *, api_key: str | None = None, metrics: str = "") -> None:
        self.bodies: list[dict[str, Any]] = []
        self._handler = handler
        self._api_key = api_key
        self._metrics = metrics
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._connections: set[asyncio.Transport] = set()

    def __enter__(self) -> OpenAiStub:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def die(self) -> None:
        """Close all connections and refuse new ones. Call this from a handler."""
        self._site._server.close()  # type: ignore[union-attr]
        for transport in self._connections:
            transport.abort()

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._show_metrics)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        self._runner = web.AppRunner(app, shutdown_timeout=0, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await self._site.start()
        host, port = self._runner.addresses[0]
        self.url = f"http://{host}:{port}"

    async def _models(self, request: web.Request) -> web.Response:
        if self._api_key and request.headers.get("Authorization") != f"Bearer {self._api_key}":
            return web.json_response({"error": {"message": "no key"}}, status=401)
        return web.json_response({"data": [{"id": "stub", "max_model_len": 4096}]})

    async def _show_metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self._metrics, status=200 if self._metrics else 404)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        if isinstance(request.transport, asyncio.Transport):
            self._connections.add(request.transport)
        body = await request.json()
        self.bodies.append(body)
        return await self._handler(self, request, body)
