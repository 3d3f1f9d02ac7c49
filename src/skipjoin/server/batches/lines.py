from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from skipjoin.config import ServerConfig
from skipjoin.core.request import RequestOptions, ServiceClass
from skipjoin.sampling import SEED_MIN, SamplingParams
from skipjoin.server.api.errors import ApiError, bad_request
from skipjoin.server.api.generation import Endpoint
from skipjoin.server.api.jobs import Job, Origin
from skipjoin.server.api.limits import Admission
from skipjoin.server.api.options import allowed_priority, allowed_tier, cache_salt, client_of
from skipjoin.server.api.protocol import RequestBody
from skipjoin.server.api.responses import Usage
from skipjoin.server.batches.records import Line, LineResult, LineState, request_id

# Longer lines are parsed in a thread, so that streams do not stall.
_LARGE = 8192
_NO_USAGE = Usage(0, 0, 0)


class _Fields(msgspec.Struct):
    body: msgspec.Raw


@dataclass(frozen=True, slots=True)
class LineJob:
    job: Job
    has_own_deadline: bool


async def prepare(endpoint: Endpoint[Any], line: Line, data: bytes, left_s: float, queue: Admission) -> LineJob:
    service = endpoint.service
    raw = await service.in_thread(body_of, data) if len(data) > _LARGE else body_of(data)
    body = await service.parse(raw, endpoint.body_type)
    options, has_own = line_options(body, left_s, service.config, line.owner)
    job = await endpoint.prepare(body, Origin(options=options, queue=queue, owner=line.owner))
    return LineJob(replace(job, params=seeded(line, job.params)), has_own)


def body_of(data: bytes) -> bytes:
    try:
        return bytes(msgspec.json.decode(data, type=_Fields).body)
    except msgspec.DecodeError as error:
        raise bad_request(f"the line is not a JSON object with a body: {error}") from error


def line_options(body: RequestBody, left_s: float, config: ServerConfig, owner: str) -> tuple[RequestOptions, bool]:
    """Return the options, and whether the line ends before its batch. Raise 400 as for a request."""
    allowed_tier(body, config, owner)
    asked_s = left_s if body.any_deadline_ms is None else body.any_deadline_ms / 1000
    options = RequestOptions(
        service=ServiceClass.BEST_EFFORT,
        priority=allowed_priority(body, config, owner),
        deadline_s=min(asked_s, left_s),
        client=client_of(owner, config, body.user),
        cache_salt=cache_salt(body, owner),
    )
    return options, asked_s < left_s


def seeded(line: Line, params: Sequence[SamplingParams]) -> list[SamplingParams]:
    """Add seeds, so that a rerun samples the same tokens."""
    return [
        param if param.seed is not None else replace(param, seed=seed_of(line, choice))
        for choice, param in enumerate(params)
    ]


def seed_of(line: Line, choice: int) -> int:
    text = "\n".join((line.batch_id, str(choice), line.custom_id))
    return SEED_MIN + int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


def ended(line: Line, status: int, body: bytes, usage: Usage = _NO_USAGE) -> LineResult:
    """Status 200 goes to the output file, all others to the error file."""
    custom_id = msgspec.json.encode(line.custom_id)
    head = f'"response":{{"status_code":{status},"request_id":"{uuid.uuid4().hex}","body":'.encode()
    name = f'{{"id":"{request_id(line.batch_id, line.custom_id)}","custom_id":'.encode()
    return LineResult(
        line=line,
        state=LineState.DONE if status == 200 else LineState.FAILED,
        body=b"".join((name, custom_id, b",", head, body, b'},"error":null}')),
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.prompt_tokens_details.cached_tokens,
    )


def over_quota(line: Line, max_bytes: int) -> LineResult:
    why = f"the answer does not fit into the files of this key, which may have {max_bytes} bytes: delete files"
    return ended(line, 429, ApiError(429, why, code="quota_exceeded").body())
