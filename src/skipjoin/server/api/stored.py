from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """Response with all items that it was generated from."""

    response: dict[str, Any]
    input: list[dict[str, Any]]

    @property
    def items(self) -> list[dict[str, Any]]:
        output: list[dict[str, Any]] = self.response["output"]
        return self.input + output


class ResponseStore(Protocol):
    """Responses by API key. Methods raise `ApiError` while nothing can be stored."""

    async def add(self, owner: str, stored: StoredResponse, items: Collection[str]) -> None:
        """Store a response. `items()` finds `items`, its ids, from then on."""

    async def get(self, owner: str, response_id: str) -> StoredResponse | None: ...

    async def items(self, owner: str, ids: Collection[str]) -> Mapping[str, dict[str, Any]]: ...

    async def delete(self, owner: str, response_id: str) -> bool:
        pass
