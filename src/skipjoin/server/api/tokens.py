from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import Request, Response
from msgspec import Raw

from skipjoin.server.api.chat_body import DetokenizeRequest, TokenizeRequest
from skipjoin.server.api.chat_prompt import estimate_chat, render_chat
from skipjoin.server.api.errors import bad_request
from skipjoin.server.api.limits import estimate_tokens
from skipjoin.server.api.options import client_of
from skipjoin.server.api.replies import JsonReply, open_body, service_of
from skipjoin.server.api.responses import encode
from skipjoin.server.api.service import Service

# Maximum tokens of a response.
MAX_TOKENS = 1 << 20
# Elements that are encoded at a time, which takes 1 ms.
_CHUNK = 1 << 16


async def tokenize(request: Request) -> Response:
    """Return the token ids of a text or a conversation."""
    service, body = await open_body(request, TokenizeRequest)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt")
    param = "prompt" if body.messages is None else "messages"
    tokens = estimate_tokens(body.prompt or "") + estimate_chat(body)
    return await counted(service, request, tokens, param, lambda: _tokenize(service, body))


async def detokenize(request: Request) -> Response:
    """Return the text of token ids."""
    service, body = await open_body(request, DetokenizeRequest)
    service.check_ids("tokens", body.tokens)
    return await counted(service, request, len(body.tokens), "tokens", lambda: _detokenize(service, body))


async def show_tokenizer(request: Request) -> Response:
    """Return the special tokens and the chat template, under vLLM's names, by which lm-evaluation-harness tokenizes."""
    service = service_of(request)
    tokenizer = service.tokenizer
    template = None if tokenizer.chat_template is None else tokenizer.chat_template.default
    found = {"model_max_length": service.info.max_model_len, "chat_template": template, **tokenizer.named}
    return JsonReply(encode(found))


async def counted(
    service: Service, request: Request, tokens: int, param: str, work: Callable[[], Awaitable[bytes]]
) -> Response:
    client = client_of(request.state.owner, service.config)
    weight = service.config.rights_of(request.state.owner).weight
    (slot,) = service.admission.reserve([tokens], client=client, weight=weight, param=param)
    try:
        return JsonReply(await work(), on_end=slot.ended)
    except BaseException:
        slot.ended()
        raise


async def _tokenize(service: Service, body: TokenizeRequest) -> bytes:
    if body.messages is not None:
        text = await render_chat(service, body)
        ids = await service.encode(text, "messages", add_special_tokens=False, most=MAX_TOKENS)
    else:
        special = body.add_special_tokens is not False
        ids = await service.encode(body.prompt or "", "prompt", add_special_tokens=special, most=MAX_TOKENS)
    spell = service.tokenizer.token_text if body.return_token_strs else None
    return await service.in_thread(_answer, ids, service.info.max_model_len, spell)


def _answer(ids: list[int], max_model_len: int, spell: Callable[[int], str] | None) -> bytes:
    names = None
    if spell is not None:
        texts = {token: spell(token) for token in set(ids)}
        names = _encoded([texts[token] for token in ids])
    return encode({"tokens": _encoded(ids), "count": len(ids), "max_model_len": max_model_len, "token_strs": names})


def _encoded(values: Sequence[Any]) -> Raw:
    """Encode in chunks, so that other threads can run in between."""
    parts = [encode(values[at : at + _CHUNK])[1:-1] for at in range(0, len(values), _CHUNK)]
    return Raw(b"[" + b",".join(parts) + b"]")


async def _detokenize(service: Service, body: DetokenizeRequest) -> bytes:
    return encode({"prompt": await service.decode(body.tokens, skip_special_tokens=False)})
