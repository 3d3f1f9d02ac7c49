from __future__ import annotations

import math
from collections.abc import Mapping

from skipjoin.config import MAX_DEADLINE_MS, ServerConfig
from skipjoin.config.key_files import ANY_LATER, AS_ALL
from skipjoin.core.request import ProgramId, RequestOptions, ServiceClass, Target, Trace
from skipjoin.routes import MAX_PROGRAM, PROGRAM_HEADER, is_program_name
from skipjoin.server.api.auth import ANONYMOUS
from skipjoin.server.api.errors import bad_request
from skipjoin.server.api.protocol import RequestBody, ServiceTier, Slo

_DEADLINE_HEADER = "x-request-deadline-ms"
# Header by which gateways of llm-d tell flows apart.
_FLOW_HEADER = "x-llm-d-inference-fairness-id"
_NO_SLO = Slo()
_OBJECTIVES: tuple[str, ...] = ("ttft", "tpot", "jct")


def request_options(
    body: RequestBody, headers: Mapping[str, str], config: ServerConfig, owner: str = "", request_id: str = ""
) -> RequestOptions:
    slo, tier = body.slo or _NO_SLO, allowed_tier(body, config, owner)
    deadline_ms = body.any_deadline_ms if body.any_deadline_ms is not None else _deadline_ms(headers)
    is_traced = config.otlp_traces_endpoint is not None
    return RequestOptions(
        service=ServiceClass.BEST_EFFORT if tier == "flex" else ServiceClass.REAL_TIME,
        is_urgent=tier == "priority",
        priority=allowed_priority(body, config, owner),
        deadline_s=deadline_ms / 1000 if deadline_ms is not None else config.default_deadline_s,
        target=_target(slo, headers, config, tier),
        client=client_of(owner, config, body.user),
        cache_salt=cache_salt(body, owner),
        trace=Trace(headers.get("traceparent", ""), request_id) if is_traced else None,
        program=program_of(body, headers, config, owner),
        weight=config.rights_of(owner).weight,
    )


def program_of(
    body: RequestBody, headers: Mapping[str, str], config: ServerConfig, owner: str = ""
) -> ProgramId | None:
    """Return the program of a request; equal names of two keys are two programs.

    Raises:
        ApiError: 400 if the header `x-program-id` is invalid.
    """
    if config.program_by == "none":
        return None
    if (stated := headers.get(PROGRAM_HEADER)) is not None:
        if not is_program_name(stated):
            raise bad_request(f"{PROGRAM_HEADER} must be 1 to {MAX_PROGRAM} printable characters", PROGRAM_HEADER)
        return ProgramId(owner, stated)
    if config.program_by == "header":
        return None
    name = body.session or headers.get(_FLOW_HEADER, "")[:MAX_PROGRAM]
    if not name and config.program_by == "user":
        name = body.user or ""
    return ProgramId(owner, name, is_stated=False) if name else None


def client_of(owner: str, config: ServerConfig, user: str | None = None) -> str:
    """Return the client by which capacity is shared, or ""."""
    if config.sharing == "user":
        return f"{owner}:{user or ''}"
    return owner if config.sharing == "key" else ""


def cache_salt(body: RequestBody, owner: str) -> str:
    """Add the owner to a salt, so that TTFTs reveal nothing about the prompts of other keys."""
    salt = body.cache_salt or ""
    return salt if owner == ANONYMOUS else f"{owner}:{salt}"


def served_tier(options: RequestOptions) -> ServiceTier:
    if options.service is ServiceClass.BEST_EFFORT:
        return "flex"
    return "priority" if options.is_urgent else "default"


def allowed_tier(body: RequestBody, config: ServerConfig, owner: str) -> ServiceTier | None:
    """Raise 400 for priority, which preempts others, unless the key has that right."""
    if body.service_tier == "priority" and not config.rights_of(owner).tier:
        which = "this API key" if _has_own(config, owner, "tier") else "this server"
        raise bad_request(
            f"service_tier must be auto, default, flex or null: {which} has no tier priority (--priority-tier)",
            "service_tier",
        )
    return body.service_tier


def allowed_priority(body: RequestBody, config: ServerConfig, owner: str) -> int:
    asked = body.priority or 0
    low, high = bounds = config.rights_of(owner).priorities or ANY_LATER
    if not asked or low <= asked <= high:
        return asked
    allowed = f"must be 0 or an integer in [{low}, {high}]"
    if bounds == ANY_LATER:
        allowed = "must be 0 or more"
    elif bounds == (0, 0):
        allowed = "must be 0 or null"
    which = "with this API key" if _has_own(config, owner, "priorities") else "on this server (--priority-range)"
    raise bad_request(f"priority {allowed} {which}, got {asked}", "priority")


def _has_own(config: ServerConfig, owner: str, right: str) -> bool:
    return getattr(config.key_rights.get(owner, AS_ALL), right) is not None


def _deadline_ms(headers: Mapping[str, str]) -> int | None:
    text = headers.get(_DEADLINE_HEADER)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 12 and 1 <= int(text) <= MAX_DEADLINE_MS):
        raise bad_request(f"{_DEADLINE_HEADER} must be an integer in [1, {MAX_DEADLINE_MS}]", _DEADLINE_HEADER)
    return int(text)


def _target(slo: Slo, headers: Mapping[str, str], config: ServerConfig, tier: ServiceTier | None) -> Target:
    asked_ms = {name: _asked_ms(name, slo, headers, config) for name in _OBJECTIVES}
    kept = _OBJECTIVES
    if tier == "flex":
        _check_flex(slo)
        # Gateways set headers for all requests, so headers for other objectives are ignored rather than refused.
        kept = ("jct",)
    found = {}
    for name in kept:
        given = asked_ms[name]
        wanted = config.default_ms(name, is_urgent=tier == "priority") if given is None else given
        found[f"{name}_s"] = math.inf if wanted is None else wanted / 1000
    return Target(**found)


def _check_flex(slo: Slo) -> None:
    for field, asked in (("slo.ttft_ms", slo.ttft_ms), ("slo.tpot_ms", slo.tpot_ms)):
        if asked is not None:
            raise bad_request(f"{field} must be null with service_tier flex, whose tokens have no time to keep", field)


def _asked_ms(name: str, slo: Slo, headers: Mapping[str, str], config: ServerConfig) -> float | None:
    field, asked_ms = f"slo.{name}_ms", getattr(slo, f"{name}_ms")
    if asked_ms is None:
        # llm-d's name of the header, and the earlier one.
        names = (f"x-llm-d-slo-{name}-ms", f"x-slo-{name}-ms")
        if (header := next((name for name in names if name in headers), None)) is None:
            return None
        field, asked_ms = header, _number(headers[header])
    low, high = config.asked_bounds_ms(name)
    if not ((asked_ms > 0 if low is None else asked_ms >= low) and asked_ms <= high):
        least = "(0" if low is None else f"[{low:.15g}"
        raise bad_request(f"{field} must be a number in {least}, {high:.15g}]", field)
    return float(asked_ms)


def _number(text: str) -> float:
    try:
        return float(text) if text.isascii() else math.nan
    except ValueError:
        return math.nan
