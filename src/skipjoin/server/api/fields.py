from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import GenericAlias
from typing import Annotated, Any, ClassVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Discriminator, Field, GetCoreSchemaHandler, Tag
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from skipjoin.sampling import INT32, MAX_STOP_LENGTH, Row, SamplingParams, parameters_of

MAX_LABEL = 512
INT64 = 2**63 - 1


class Only:
    """Values that are accepted; `why` ends the error about others."""

    def __init__(self, *values: Any, why: str = "") -> None:
        self.values, self._why = values, f": {why}" if why else ""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: Any) -> dict[str, Any]:
        return {"enum": list(self.values)}

    def _check(self, value: Any) -> Any:
        # Unlike in Python, true is not 1 in JSON.
        if any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in self.values):
            return value
        allowed = " or ".join(json.dumps(known) for known in self.values)
        raise PydanticCustomError(
            "unsupported",
            "this server does not support it: only {allowed}{why}",
            {"allowed": allowed, "why": self._why},
        )


# A field that clients send to every server, and whose value cannot change the output of this one.
NO_EFFECT = "Accepted without effect."
Ignored = Annotated[Any, Field(description=NO_EFFECT)]
Null = Annotated[Any, Only(None)]
Off = Annotated[Any, Only(None, False)]
Label = Annotated[str, Field(max_length=MAX_LABEL)] | None
Text = Annotated[str, Field(min_length=1)]


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Integer:
    """Bounds of an integer, which clients that have only doubles write as 16.0."""

    def __init__(self, low: Any, high: Any) -> None:
        self._low, self._high = low, high

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        exact = core_schema.int_schema(ge=self._low, le=self._high)
        return core_schema.no_info_before_validator_function(_whole, exact)


class Body(BaseModel):
    """JSON body with exact types, finite numbers and no undeclared fields."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())
    # Fields that may be large, by the name of the field in `shapes.LARGE_FIELDS` that has the same form.
    large_fields: ClassVar[Mapping[str, str]] = {}


def one_of(choose: Callable[[Any], str | None], expected: str) -> Discriminator:
    """Let `choose` select the member of a union that errors are about."""
    return Discriminator(choose, custom_error_type="type", custom_error_message=expected)


def tagged(tags: Mapping[type, str]) -> Callable[[Any], str | None]:
    return lambda value: tags.get(type(value))


text_or_list = tagged({str: "~text", list: "~list"})
text_or_object = tagged({str: "~text", dict: "~object"})
TextOrObject = Annotated[
    Annotated[str, Tag("~text")] | Annotated[dict[str, Any], Tag("~object")],
    one_of(text_or_object, "must be an object or a string"),
]


TokenId = Annotated[int, Field(ge=0, le=INT32)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


def shared_rows(params: type[SamplingParams]) -> dict[str, Row]:
    return {name: row for name, row in parameters_of(params).items() if not row.parameter.own}


def sampling_fields(params: type[SamplingParams]) -> dict[str, Any]:
    return {name: (_type_of(row) | None, None) for name, row in shared_rows(params).items()}


def given(body: Body, params: type[SamplingParams]) -> dict[str, Any]:
    values = {name: (row.kind, getattr(body, name)) for name, row in shared_rows(params).items()}
    return {name: _value(kind, value) for name, (kind, value) in values.items() if value is not None}


def _type_of(row: Row) -> Any:
    kind, parameter = row.kind, row.parameter
    lows = (parameter.low, *(other for other, _ in parameter.means))
    low = min((value for value in lows if value is not None), default=None)
    bounds = Field(gt=low, le=parameter.high) if parameter.is_above else Field(ge=low, le=parameter.high)
    if get_origin(kind) is dict:
        token = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")]
        return Annotated[dict[token, Annotated[float, bounds]], Field(max_length=parameter.max_items)]
    if get_origin(kind) is tuple:
        item: Any = StopText if get_args(kind)[0] is str else TokenId
        several: Any = GenericAlias(list, (item,))
        items: Any = Annotated[several, Field(max_length=parameter.max_items), Field(fail_fast=True)]
        if item is TokenId:
            return items
        union = Annotated[StopText, Tag("~text")] | Annotated[items, Tag("~list")]
        return Annotated[union, one_of(text_or_list, "must be a string or a list of strings")]
    if kind is int:
        return Annotated[int, Integer(low, parameter.high)]
    return kind if kind is bool else Annotated[kind, bounds]


def _value(kind: Any, value: Any) -> Any:
    if get_origin(kind) is dict:
        return {int(token): number for token, number in value.items()}
    return tuple(value) if isinstance(value, list) else value
