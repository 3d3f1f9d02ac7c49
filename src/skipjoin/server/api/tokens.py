"""POST /tokenize and /detokenize: texts and conversations to token ids, and back."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

from skipjoin.server.api.errors import bad_request
from skipjoin.server.api.protocol import DetokenizeRequest, TokenizeRequest
from skipjoin.server.api.replies import json_response
from skipjoin.server.api.responses import Detokenized, Tokens
from skipjoin.server.api.service import Service

# What the routes read, for the schema.
BODIES: dict[str, type[BaseModel]] = {"/tokenize": TokenizeRequest, "/detokenize": DetokenizeRequest}


def add_routes(app: FastAPI, service: Service) -> None:
    """Add both of them."""

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        """Token ids of a text or a conversation."""
        service.check_open()
        body = await service.parse(await request.body(), TokenizeRequest)
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("give either prompt or messages", "prompt")
        if body.messages is not None:
            ids = await service.encode_chat(body)
        else:
            ids = await service.encode(body.prompt or "", body.add_special_tokens is not False)
        names = [service.tokenizer.token_text(token) for token in ids] if body.return_token_strs else None
        return json_response(Tokens(ids, len(ids), service.info.max_model_len, names))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        """Text of token ids."""
        service.check_open()
        body = await service.parse(await request.body(), DetokenizeRequest)
        service.check_model(body.model)
        service.check_ids("tokens", body.tokens)
        text = await service.in_thread(service.tokenizer.decode, body.tokens, skip_special_tokens=False)
        return json_response(Detokenized(text))
