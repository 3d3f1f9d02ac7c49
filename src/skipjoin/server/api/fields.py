from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

MAX_LABEL = 512
INT64 = 2**63 - 1


class Only:
    def __init__(self, *values: Any) -> None:
        self.values = values

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: Any) -> dict[str, Any]:
        return {"enum": list(self.values)}

    def _check(self, value: Any) -> Any:
        # Unlike in Python, true is not 1 in JSON.
        if any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in self.values):
            return value
        allowed = " or ".join("null" if known is None else str(known).lower() for known in self.values)
        raise PydanticCustomError(
            "unsupported", "this server does not support it: only {allowed}", {"allowed": allowed}
        )


# A field that clients send to every server, and whose value cannot change the output of this one.
NO_EFFECT = "Accepted without effect."
Ignored = Annotated[Any, Field(description=NO_EFFECT)]
Null = Annotated[Any, Only(None)]
Off = Annotated[Any, Only(None, False)]
Label = Annotated[str, Field(max_length=MAX_LABEL)] | None
Text = Annotated[str, Field(min_length=1)]


class Body(BaseModel):
    """JSON body with exact types, finite numbers and no undeclared fields."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())
    # Fields that may be large, by the name of the field in `shapes.LARGE_FIELDS` that has the same form.
    large_fields: ClassVar[Mapping[str, str]] = {}


def one_of(choose: Callable[[Any], str | None], expected: str) -> Discriminator:
    """Let `choose` select the member of a union, so that errors are about that member only."""
    return Discriminator(choose, custom_error_type="type", custom_error_message=expected)
