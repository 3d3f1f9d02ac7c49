"""Checks of the arguments of `LLM` and `AsyncLLM`."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from numbers import Integral
from typing import Any

from skipjoin.core.request import RequestOptions, ServiceClass, Target
from skipjoin.llm_chat import shown
from skipjoin.sampling import MAX_SALT, ParameterError, SamplingParams

Salts = str | Sequence[str | None] | None


def options_of(service: str, priority: int, target: Target) -> RequestOptions:
    """Return checked options of a request."""
    if service not in tuple(ServiceClass):
        raise ParameterError("service", f"service must be one of {', '.join(ServiceClass)}, got {service!r}")
    for name, seconds in target._asdict().items():
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
            raise ParameterError(f"target.{name}", f"target.{name} must be a number above 0, got {seconds!r}")
        if service == ServiceClass.BEST_EFFORT and name != "jct_s" and seconds < inf:
            raise ParameterError(f"target.{name}", f"target.{name} must not be set with service {service}")
    return RequestOptions(service=ServiceClass(service), priority=priority, target=target)


def salts_of(given: Salts, count: int) -> list[str]:
    salts = [given] * count if given is None or isinstance(given, str) else given
    if not isinstance(salts, list | tuple):
        raise ParameterError(
            "cache_salt", f"cache_salt must be a text, or one of them or None per prompt, got {shown(given)}"
        )
    if len(salts) != count:
        raise ParameterError("cache_salt", f"cache_salt must be one, or one per prompt ({count}), got {len(salts)}")
    return [salt_of(one) for one in salts]


def salt_of(given: Any) -> str:
    """Return a checked salt, empty for None."""
    if given is None:
        return ""
    if not isinstance(given, str):
        raise ParameterError("cache_salt", f"cache_salt must be a text or None, got {shown(given)}")
    if not 1 <= len(given) <= MAX_SALT:
        raise ParameterError("cache_salt", f"cache_salt must have 1 to {MAX_SALT} characters, got {len(given)}")
    if any("\ud800" <= character <= "\udfff" for character in given):
        raise ParameterError("cache_salt", "cache_salt must be Unicode text, and half a surrogate pair is none")
    return given


def prompts_of(prompts: Any) -> list[str | list[int]]:
    """Return one or many prompts as a list."""
    if isinstance(prompts, str):
        return [prompts]
    items = _items(prompts)
    if items and isinstance(items[0], Integral):
        return [_token_ids(items)]
    return [item if isinstance(item, str) else _token_ids(_items(item)) for item in items]


def _items(given: Any) -> list[Any]:
    # A mapping is iterable, but its keys are not prompts.
    if isinstance(given, Mapping | bytes) or not isinstance(given, Iterable):
        raise ParameterError(
            "prompts",
            f"prompts must be a text, token ids, or a list of such prompts, got {shown(given)}",
        )
    return list(given)


def _token_ids(items: list[Any]) -> list[int]:
    for item in items:
        if isinstance(item, bool) or not isinstance(item, Integral):
            raise ParameterError("prompts", f"prompts: token ids must be integers, got {item!r}")
    return [int(item) for item in items]


def params_per_prompt(params: SamplingParams | Iterable[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    each = list(params)
    if isinstance(params, Mapping) or not all(isinstance(one, SamplingParams) for one in each):
        raise ParameterError(
            "params", f"params must be SamplingParams, or one of them per prompt, got {reprlib.repr(params)}"
        )
    if len(each) != count:
        raise ValueError(f"params must be one, or one per prompt ({count}), got {len(each)}")
    return each
