"""Table of endpoints, which the server, relay, load tests and the middleware for vLLM read.

Handlers and bodies are "module:name", so that reading it imports none of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skipjoin.config import ServerConfig

_VIEWS = ("batches", "forecasts", "memory", "now", "objectives", "replicas", "request", "timeline", "whatif")
_ASSETS = (
    *("style.css", "icon.svg"),
    *("main.js", "chat.js", "conversation.js", "data.js", "dom.js", "format.js", "charts.js", "markdown.js"),
    "perfetto.js",
    *(f"views/{name}.js" for name in _VIEWS),
)
# Pages for browsers: files of the folder `console` by path.
PAGES = {"/": "chat.html", "/console": "console.html", **{f"/console/{name}": name for name in _ASSETS}}
# The servers that the pages show, as JSON.
SERVERS_PATH = "/console/servers.json"
# Names the program of a call, in at most `MAX_PROGRAM` printable characters of ASCII.
PROGRAM_HEADER, MAX_PROGRAM = "x-program-id", 512
# Bytes of an upload besides the file, mostly boundaries of the form.
FORM_BYTES = 64 << 10


def is_program_name(text: str) -> bool:
    return 0 < len(text) <= MAX_PROGRAM and text.isascii() and text.isprintable()


class Access(Enum):
    KEY = "any API key"
    METRICS = "any API key, and the keys of metrics"
    OPEN = "anyone"
    PROBE = "anyone, even if the server has no room for another connection"


class Part(Enum):
    API = "api"
    CONSOLE = "console"
    BATCHES = "batches"


@dataclass(frozen=True, slots=True)
class Frames:
    """How the events of a stream are separated.

    Attributes:
        end: Data of the event that ends each complete stream, if there is one.
    """

    media_type: str
    prefix: bytes
    suffix: bytes
    end: bytes = b""

    def frame(self, data: bytes, name: str = "") -> bytes:
        if not name:
            return self.prefix + data + self.suffix
        return b"event: " + name.encode() + b"\n" + self.prefix + data + self.suffix


SERVER_SENT = Frames("text/event-stream; charset=utf-8", b"data: ", b"\n\n")
NDJSON = Frames("application/x-ndjson", b"", b"\n")
OPENAI_EVENTS = Frames(SERVER_SENT.media_type, SERVER_SENT.prefix, SERVER_SENT.suffix, end=b"[DONE]")


@dataclass(frozen=True, kw_only=True)
class Route:
    """One endpoint.

    Attributes:
        path: Path with `{name}` for a segment and `{name:segments}` for several.
        handler: Function of a Starlette request, or a subclass of `server.api.generation.Endpoint`.
        body: Request model of a function, for the schema.
        load_name: Name in load tests, empty if they do not know its bodies.
        prompt: Field with the prompt, which load tests fill and errors name.
        is_relayed: The console relays it to its servers.
        body_limit: Returns the maximum size of the body, if it is not `max_body_bytes`.
        is_listed: The schema shows it.
        has_any_type: Bodies need no media type of JSON, as in examples for Ollama.
        error_body, error_status: Functions of an error, or "module:name" of them; None is OpenAI's format.
    """

    path: str
    handler: Any
    method: str = "GET"
    body: str | None = None
    access: Access = Access.KEY
    part: Part = Part.API
    frames: Frames | None = None
    load_name: str = ""
    prompt: str = "prompt"
    in_batches: bool = False
    is_relayed: bool = False
    body_limit: Callable[[ServerConfig], int] | None = None
    is_listed: bool = True
    has_any_type: bool = False
    is_endless: bool = False
    error_body: Callable[[Any], bytes] | str | None = None
    error_status: Callable[[Any], int] | str | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.method, self.path

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        pieces = re.split(r"(\{\w+(?::segments)?\})", self.path)
        return re.compile("".join(map(_pattern, pieces)))


def _pattern(piece: str) -> str:
    if not piece.startswith("{"):
        return re.escape(piece)
    return ".+" if piece.endswith(":segments}") else "[^/]+"


def resolved(name: Any) -> Any:
    """Return the object that "module:name" names, or other objects as they are."""
    if not isinstance(name, str):
        return name
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


_API, _BATCHES = "skipjoin.server.api", "skipjoin.server.batches"


def _console(path: str, name: str, **more: Any) -> Route:
    handler = f"{_API}.debug:{name}"
    return Route(path=f"/debug/{path}", handler=handler, part=Part.CONSOLE, is_relayed=True, **more)


def _files(path: str, name: str, **more: Any) -> Route:
    return Route(path=f"/v1/files{path}", handler=f"{_BATCHES}.files:{name}", part=Part.BATCHES, **more)


def _batches(path: str, name: str, **more: Any) -> Route:
    return Route(path=f"/v1/batches{path}", handler=f"{_BATCHES}.routes:{name}", part=Part.BATCHES, **more)


def _generation(path: str, handler: str, **more: Any) -> Route:
    return Route(path=path, handler=handler, **{"method": "POST", "frames": OPENAI_EVENTS, "in_batches": True, **more})


METRICS = Route(path="/metrics", handler=f"{_API}.status:show_metrics", access=Access.METRICS)
CHAT = _generation(
    "/v1/chat/completions", f"{_API}.chat:ChatEndpoint", load_name="chat", prompt="messages", is_relayed=True
)
COMPLETIONS = _generation("/v1/completions", f"{_API}.completions:CompletionEndpoint", load_name="completions")
RESPONSES = _generation(
    "/v1/responses",
    f"{_API}.dialects.responses:ResponsesEndpoint",
    load_name="responses",
    prompt="input",
    frames=SERVER_SENT,
)


def _responses(path: str, name: str, **more: Any) -> Route:
    return Route(
        path=f"/v1/responses/{{response_id}}{path}", handler=f"{_API}.dialects.stored_responses:{name}", **more
    )


_MESSAGES = f"{_API}.dialects.messages"
_ANTHROPIC: dict[str, Any] = {"error_body": f"{_MESSAGES}:error_body", "error_status": f"{_MESSAGES}:error_status"}
MESSAGES = _generation(
    "/v1/messages",
    f"{_MESSAGES}:MessagesEndpoint",
    load_name="messages",
    prompt="messages",
    frames=SERVER_SENT,
    **_ANTHROPIC,
)
_POOLED = f"{_API}.pooled"


def _pooled(path: str, name: str, prompt: str, **more: Any) -> Route:
    return Route(path=path, handler=f"{_POOLED}:{name}", method="POST", prompt=prompt, **more)


EMBEDDINGS = _pooled("/v1/embeddings", "EmbeddingEndpoint", "input", in_batches=True)
RERANK = _pooled("/v1/rerank", "RerankEndpoint", "documents", in_batches=True)
SCORE = _pooled("/v1/score", "ScoreEndpoint", "text_2", in_batches=True)
_OLLAMA = f"{_API}.dialects.ollama"


def _ollama(path: str, name: str, **more: Any) -> Route:
    handler, error_body = f"{_OLLAMA}:{name}", f"{_OLLAMA}:error_body"
    return Route(path=f"/api/{path}", handler=handler, error_body=error_body, has_any_type=True, **more)


OLLAMA_CHAT = _ollama("chat", "OllamaChatEndpoint", method="POST", prompt="messages", frames=NDJSON)
OLLAMA_GENERATE = _ollama("generate", "OllamaGenerateEndpoint", method="POST", frames=NDJSON)
OLLAMA_EMBED = _ollama("embed", "OllamaEmbedEndpoint", method="POST", prompt="input")
OLLAMA_EMBEDDINGS = _ollama("embeddings", "OllamaEmbeddingsEndpoint", method="POST")
# Whose errors have the paths below that are no endpoints.
_DIALECTS = {"/api/": OLLAMA_CHAT, "/v1/messages": MESSAGES}

_ROWS = (
    Route(path="/health", handler=f"{_API}.status:health", access=Access.PROBE),
    Route(path="/ready", handler=f"{_API}.status:ready", access=Access.PROBE),
    Route(path="/live", handler=f"{_API}.status:live", access=Access.PROBE),
    Route(path="/v1/models", handler=f"{_API}.status:list_models", is_relayed=True),
    Route(path="/v1/models/{model:segments}", handler=f"{_API}.status:show_model"),
    *(
        Route(
            path=f"/v1/{order}_lora_adapter",
            handler=f"{_API}.adapters:{order}_adapter",
            method="POST",
            body=f"{_API}.adapters:{order.title()}AdapterRequest",
        )
        for order in ("load", "unload")
    ),
    METRICS,
    Route(path="/version", handler=f"{_API}.status:show_version"),
    Route(path="/load", handler=f"{_API}.status:show_load"),
    CHAT,
    COMPLETIONS,
    RESPONSES,
    Route(
        path="/v1/responses/input_tokens",
        handler=f"{_API}.dialects.responses:count_input_tokens",
        method="POST",
        body=f"{_API}.dialects.responses_body:ResponsesRequest",
    ),
    _responses("", "show_response"),
    _responses("", "delete_response", method="DELETE"),
    _responses("/input_items", "list_input_items"),
    MESSAGES,
    Route(
        path="/v1/messages/count_tokens",
        handler=f"{_MESSAGES}:count_tokens",
        method="POST",
        body=f"{_API}.dialects.messages_body:MessagesRequest",
        **_ANTHROPIC,
    ),
    EMBEDDINGS,
    RERANK,
    SCORE,
    # Paths of Jina, Cohere and vLLM.
    *(replace(RERANK, path=path, in_batches=False) for path in ("/rerank", "/v2/rerank")),
    replace(SCORE, path="/score", in_batches=False),
    OLLAMA_CHAT,
    OLLAMA_GENERATE,
    OLLAMA_EMBED,
    OLLAMA_EMBEDDINGS,
    _ollama("tags", "list_models"),
    _ollama("ps", "list_running"),
    _ollama("show", "show_model", method="POST", body=f"{_OLLAMA}_body:ShowRequest"),
    Route(path="/api/version", handler=f"{_API}.status:show_version", error_body=f"{_OLLAMA}:error_body"),
    Route(path="/v1/requests/{name:segments}", handler=f"{_API}.replies:cancel_request", method="DELETE"),
    Route(path="/tokenizer_info", handler=f"{_API}.tokens:show_tokenizer"),
    Route(path="/tokenize", handler=f"{_API}.tokens:tokenize", method="POST", body=f"{_API}.chat_body:TokenizeRequest"),
    Route(
        path="/detokenize",
        handler=f"{_API}.tokens:detokenize",
        method="POST",
        body=f"{_API}.chat_body:DetokenizeRequest",
    ),
    _console("requests", "show_requests"),
    _console("events", "stream_events", is_endless=True),
    _console("histories", "show_histories"),
    _console("arrivals", "show_arrivals"),
    _console("replay", "replay", method="POST"),
    _console("requests/{name:segments}", "explain_request"),
    *(
        Route(path=path, handler=f"{_API}.pages:show", access=Access.OPEN, part=Part.CONSOLE, is_listed=False)
        for path in (*PAGES, SERVERS_PATH)
    ),
    _files("", "upload_file", method="POST", body_limit=lambda config: config.batch_max_file_bytes + FORM_BYTES),
    _files("", "list_files"),
    _files("/{file_id}", "show_file"),
    _files("/{file_id}/content", "read_file"),
    _files("/{file_id}", "delete_file", method="DELETE"),
    _batches("", "create_batch", method="POST", body=f"{_BATCHES}.routes:BatchRequest"),
    _batches("", "list_batches", is_relayed=True),
    _batches("/{batch_id}", "show_batch"),
    _batches("/{batch_id}/cancel", "cancel_batch", method="POST"),
)
ROUTES: dict[tuple[str, str], Route] = {route.key: route for route in _ROWS}


def dialect_of(method: str, path: str) -> Route | None:
    """Return the endpoint that a request is for, or one whose errors have the form that the client expects."""
    found = ROUTES.get((method, path))
    return found or next((route for begin, route in _DIALECTS.items() if path.startswith(begin)), None)


def paths(*access: Access) -> frozenset[str]:
    return frozenset(route.path for route in ROUTES.values() if route.access in access)


def generating() -> list[Route]:
    return [route for route in ROUTES.values() if route.frames is not None]
