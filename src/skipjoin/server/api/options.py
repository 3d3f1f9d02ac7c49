"""The one place where a client's wishes to the scheduler become `RequestOptions`."""

from __future__ import annotations

import math
from collections.abc import Mapping

from skipjoin.config import MAX_DEADLINE_MS, ServerConfig
from skipjoin.core.request import RequestOptions, Target
from skipjoin.server.api.errors import bad_request
from skipjoin.server.api.protocol import GenerationBody, Slo

_DEADLINE_HEADER = "x-request-deadline-ms"
_NO_SLO = Slo()


def request_options(body: GenerationBody, headers: Mapping[str, str], config: ServerConfig) -> RequestOptions:
    """What the body asks for, or else the headers, or else the server's default. Raises 400 for a header that is out of
    bounds."""
    slo = body.slo or _NO_SLO
    deadline_ms = body.deadline_ms if body.deadline_ms is not None else slo.deadline_ms
    if deadline_ms is None:
        deadline_ms = _deadline_ms(headers)
    return RequestOptions(
        priority=body.priority or 0,
        deadline_s=deadline_ms / 1000 if deadline_ms is not None else config.default_deadline_s,
        target=Target(
            ttft_s=_objective_s(slo.ttft_ms, headers, "x-slo-ttft-ms", config.slo_ttft_ms),
            tpot_s=_objective_s(slo.tpot_ms, headers, "x-slo-tpot-ms", config.slo_tpot_ms),
            jct_s=_objective_s(slo.jct_ms, headers, "x-slo-jct-ms", config.slo_jct_ms),
        ),
    )


def _deadline_ms(headers: Mapping[str, str]) -> int | None:
    text = headers.get(_DEADLINE_HEADER)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 12 and 1 <= int(text) <= MAX_DEADLINE_MS):
        raise bad_request(f"{_DEADLINE_HEADER} must be an integer in [1, {MAX_DEADLINE_MS}]", _DEADLINE_HEADER)
    return int(text)


def _objective_s(asked_ms: float | None, headers: Mapping[str, str], header: str, default_ms: float | None) -> float:
    """Seconds by the body's value, or else by the header's, or else by default; inf: there is none of them."""
    if asked_ms is not None:
        return asked_ms / 1000
    if (text := headers.get(header)) is None:
        return math.inf if default_ms is None else default_ms / 1000
    milliseconds = _number(text)
    if not 0 < milliseconds <= MAX_DEADLINE_MS:
        raise bad_request(f"{header} must be a number in (0, {MAX_DEADLINE_MS}]", header)
    return milliseconds / 1000


def _number(text: str) -> float:
    """The number that a text spells; NaN for any other text."""
    try:
        return float(text) if text.isascii() else math.nan
    except ValueError:
        return math.nan
