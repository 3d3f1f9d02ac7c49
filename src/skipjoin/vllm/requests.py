from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from skipjoin.core.prefixes import Key, ReadTokens
from skipjoin.core.request import FinishReason, Request, RequestOptions, ServiceClass, Target

_log = logging.getLogger("vllm.skipjoin")

OBJECTIVES = ("ttft", "tpot", "jct")
# Values of `service_tier` in `vllm_xargs`, as in the OpenAI API.
TIERS = ("auto", "default", "flex", "priority")
# Maximum number of characters of a program's id.
MAX_PROGRAM = 128
_REASONS = {"FINISHED_STOPPED": FinishReason.STOP, "FINISHED_LENGTH_CAPPED": FinishReason.LENGTH}


class FoundByEngine:
    """`Request.prefix` of requests whose prefix-cache hits vLLM finds. No block has a key here."""

    def keys(self, read: ReadTokens, tokens: int, *, reverse: bool = False) -> Sequence[Key]:
        return ()


_FOUND_BY_ENGINE = FoundByEngine()


def mirror_of(request: Any, number: int, now: float, *, max_model_len: int, caches: bool) -> Request:
    prompt = request.prompt_token_ids or range(request.num_prompt_tokens)
    extra = request.sampling_params.extra_args if request.sampling_params is not None else None
    return Request(
        id=number,
        arrival=now,
        prompt=prompt,
        max_tokens=max(1, min(request.max_tokens, max_model_len - len(prompt))),
        options=read_options(extra or {}, request.priority),
        sampling=request,
        prefix=_FOUND_BY_ENGINE if caches else None,
    )


def finish_reason(mirror: Request) -> FinishReason:
    request: Any = mirror.sampling
    return _REASONS.get(request.status.name, FinishReason.ERROR)


def read_options(extra: Mapping[str, Any], priority: int = 0) -> RequestOptions:
    """Return the scheduling options in `vllm_xargs`.

    An invalid value, which the middleware refuses with status 400, is ignored with a warning: an error would end the
    engine.
    """
    tier = extra.get("service_tier", "default")
    if tier not in TIERS:
        _log.warning("vllm_xargs: service_tier must be one of %s, got %r; it is ignored", ", ".join(TIERS), tier)
    program = extra.get("program_id", "")
    if program != "" and not is_program(program):
        _log.warning("vllm_xargs: program_id must be a text of 1 to %d characters; it is ignored", MAX_PROGRAM)
        program = ""
    return RequestOptions(
        client=program,
        service=ServiceClass.BEST_EFFORT if tier == "flex" else ServiceClass.REAL_TIME,
        is_urgent=tier == "priority",
        priority=priority,
        target=Target(*(_objective_s(extra, f"slo_{name}_ms") for name in OBJECTIVES)),
    )


def _objective_s(extra: Mapping[str, Any], name: str) -> float:
    given = extra.get(name)
    if given is None:
        return math.inf
    if (milliseconds := positive(given)) is None:
        _log.warning("vllm_xargs: %s must be a number above 0, got %r; it is ignored", name, given)
        return math.inf
    return milliseconds / 1e3


def is_program(given: object) -> bool:
    return isinstance(given, str) and 0 < len(given) <= MAX_PROGRAM


def positive(given: object) -> float | None:
    if isinstance(given, bool) or not isinstance(given, int | float | str):
        return None
    try:
        value = float(given)
    except (ValueError, OverflowError):
        return None
    return value if 0 < value < math.inf else None
