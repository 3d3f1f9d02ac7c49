from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Notation:
    """Notation of JSON texts. With `is_lenient`, keywords that cannot be enforced are ignored.

    `whitespace` is the regular expression of the white space between tokens; None for none.
    """

    whitespace: str | None = None
    item_separator: str = ","
    key_separator: str = ":"
    is_lenient: bool = False

    def options(self) -> dict[str, Any]:
        spaces: dict[str, Any] = (
            {"whitespace_flexible": False} if self.whitespace is None else {"whitespace_pattern": self.whitespace}
        )
        separators = {"item_separator": self.item_separator, "key_separator": self.key_separator}
        return {**spaces, **separators, "lenient": self.is_lenient}
