from __future__ import annotations

from collections.abc import Collection
from types import GenericAlias
from typing import Annotated, Any, get_args, get_origin

from pydantic import Field, Tag

from skipjoin.sampling import INT32, MAX_STOP_LENGTH, Row, SamplingParams, parameters_of
from skipjoin.server.api.fields import Body, one_of

TokenId = Annotated[int, Field(ge=0, le=INT32)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


def shared_rows(params: type[SamplingParams]) -> dict[str, Row]:
    return {name: row for name, row in parameters_of(params).items() if not row.parameter.own}


def sampling_fields(params: type[SamplingParams], *, without: Collection[str] = ()) -> dict[str, Any]:
    rows = shared_rows(params).items()
    return {name: (_type_of(row) | None, None) for name, row in rows if name not in without}


def given(body: Body, params: type[SamplingParams]) -> dict[str, Any]:
    values = {name: (row.kind, getattr(body, name)) for name, row in shared_rows(params).items()}
    return {name: _value(kind, value) for name, (kind, value) in values.items() if value is not None}


def _type_of(row: Row) -> Any:
    kind, parameter = row.kind, row.parameter
    lows = (parameter.low, *(other for other, _ in parameter.means))
    low = min((value for value in lows if value is not None), default=None)
    bounds = Field(gt=low, le=parameter.high) if parameter.is_above else Field(ge=low, le=parameter.high)
    if get_origin(kind) is dict:
        token = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]
        return Annotated[dict[token, Annotated[float, bounds]], Field(max_length=parameter.max_items)]
    if get_origin(kind) is tuple:
        item: Any = StopText if get_args(kind)[0] is str else TokenId
        several: Any = GenericAlias(list, (item,))
        items: Any = Annotated[several, Field(max_length=parameter.max_items), Field(fail_fast=True)]
        if item is TokenId:
            return items
        union = Annotated[StopText, Tag("~text")] | Annotated[items, Tag("~texts")]
        return Annotated[union, one_of(_text_kind, "must be a string or a list of strings")]
    return kind if kind is bool else Annotated[kind, bounds]


def _text_kind(value: Any) -> str | None:
    return "~text" if isinstance(value, str) else "~texts" if isinstance(value, list) else None


def _value(kind: Any, value: Any) -> Any:
    if get_origin(kind) is dict:
        return {int(token): number for token, number in value.items()}
    return tuple(value) if isinstance(value, list) else value
