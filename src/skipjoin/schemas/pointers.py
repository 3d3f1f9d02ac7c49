"""References within a schema, which are JSON pointers in fragments of URIs."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote, unquote

# Characters that a fragment may not have. Generators of schemas write names of types such as `Page[int]` as they are.
_FORBIDDEN = re.compile(r"[^A-Za-z0-9._~!$&'()*+,;=:@/?#%-]")


def quoted(ref: str) -> str:
    return _FORBIDDEN.sub(lambda found: quote(found[0]), ref)


def target_of(schema: Any, ref: str) -> Any:
    found = schema
    for step in ref.removeprefix("#").split("/")[1:]:
        if isinstance(found, dict):
            found = found.get(unescaped(step))
        elif isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        else:
            return None
    return found


def unescaped(step: str) -> str:
    return unquote(step).replace("~1", "/").replace("~0", "~")
