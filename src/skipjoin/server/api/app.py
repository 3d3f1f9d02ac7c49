"""The routes. `build_app` gives the ASGI application; everything behind the door is in `service`."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from skipjoin.server.api import chat, completions, errors
from skipjoin.server.api.auth import AccessGuard
from skipjoin.server.api.errors import bad_request, unavailable
from skipjoin.server.api.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from skipjoin.server.api.responses import Detokenized, LoadAnswer, ModelCard, ModelList, Tokens, encode
from skipjoin.server.api.service import Phase, Service
from skipjoin.version import VERSION

_BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


def build_app(service: Service) -> AccessGuard:
    """The application around a service. `.app` of what is returned is the FastAPI object inside the door."""
    app = FastAPI(
        title="Skipjoin",
        version=VERSION,
        # The pages would load scripts from elsewhere; a redirect would repeat the client's Host header.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    errors.install(app)
    _add_health(app, service)
    _add_models(app, service)
    _add_generation(app, service)
    _add_tokenizer(app, service)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    config = service.config
    return AccessGuard(
        app,
        api_keys=config.api_keys,
        max_header_bytes=config.max_header_bytes,
        max_body_bytes=config.max_body_bytes,
    )


def _json(content: Any) -> Response:
    return Response(encode(content), media_type="application/json")


def _add_health(app: FastAPI, service: Service) -> None:
    async def health() -> Response:
        """200 while an engine is up."""
        service.check_alive()
        return _json({"status": "ok", **service.count_replicas()})

    async def ready() -> Response:
        """200 while work is taken."""
        service.check_alive()
        if service.phase is not Phase.OPEN:
            raise unavailable(f"the server is {service.phase.value}", "not_ready")
        return _json({"status": "ready", **service.count_replicas()})

    async def live() -> Response:
        """200 while this process answers."""
        return _json({"status": "live"})

    for endpoint in (health, ready, live):
        app.add_api_route(f"/{endpoint.__name__}", endpoint, methods=["GET"])

    @app.get("/version")
    async def show_version() -> Response:
        """The server's version."""
        return _json({"version": VERSION})

    @app.get("/metrics")
    async def show_metrics() -> Response:
        """For Prometheus."""
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4")

    @app.get("/load")
    async def show_load() -> Response:
        """How busy the server is."""
        service.check_alive()
        load, admission = service.client.load(), service.admission
        return _json(LoadAnswer(admission.requests, load.running, load.waiting, admission.tokens, load.usage))


def _add_models(app: FastAPI, service: Service) -> None:
    def card() -> ModelCard:
        info = service.info
        return ModelCard(service.name, service.created, info.max_model_len, info.model)

    @app.get("/v1/models")
    async def list_models() -> Response:
        """The served model."""
        return _json(ModelList([card()]))

    # Names may hold slashes.
    @app.get("/v1/models/{model:path}")
    async def show_model(model: str) -> Response:
        """The served model, by its name."""
        found = card()
        service.check_model(model)
        return _json(found)


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        """The assistant's next message."""
        return await chat.create(request, service)

    @app.post("/v1/completions")
    async def text_completions(request: Request) -> Response:
        """The text after a prompt."""
        return await completions.create(request, service)


def _add_tokenizer(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        """Token ids of a text or a conversation."""
        service.check_open()
        body = await service.parse(request, TokenizeRequest)
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("give either prompt or messages", "prompt")
        if body.messages is not None:
            ids = await service.encode_chat(
                [message.as_template_input() for message in body.messages],
                add_generation_prompt=body.add_generation_prompt is not False,
                **chat.template_variables(body.chat_template_kwargs),
            )
        else:
            ids = await service.encode(body.prompt or "", body.add_special_tokens is not False)
        names = [service.tokenizer.token_text(token) for token in ids] if body.return_token_strs else None
        return _json(Tokens(ids, len(ids), service.info.max_model_len, names))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        """Text of token ids."""
        service.check_open()
        body = await service.parse(request, DetokenizeRequest)
        service.check_model(body.model)
        service.check_ids("tokens", body.tokens)
        text = await service.in_thread(service.tokenizer.decode, body.tokens, skip_special_tokens=False)
        return _json(Detokenized(text))


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's schema, with the bodies that the routes read themselves."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        pairs = [(model, "validation") for model in _BODIES.values()]
        names, definitions = models_json_schema(pairs, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
        components = schema.setdefault("components", {}).setdefault("schemas", {})
        components.update(definitions["$defs"])
        for path, model in _BODIES.items():
            content = {"application/json": {"schema": names[model, "validation"]}}
            schema["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
        app.openapi_schema = schema
    return app.openapi_schema
