from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote, unquote, urldefrag, urljoin

# Characters that a fragment may not have. Generators of schemas write names of types such as `Page[int]` as they are.
_FORBIDDEN = re.compile(r"[^A-Za-z0-9._~!$&'()*+,;=:@/?#%-]")


def quoted(ref: str) -> str:
    return _FORBIDDEN.sub(lambda found: quote(found[0]), ref)


class Names:
    """Names of the schemas within `root`, by `$id` and `$anchor`, to turn references into pointers from the root.

    `parts` yields the schemas directly within one, with the steps to them.
    """

    def __init__(self, root: Any, parts: Callable[[Any], Iterator[tuple[str, Any]]]) -> None:
        self._bases: dict[str, str] = {"#": ""}
        self._places: dict[str, str] = {"": "#"}
        waiting = [("#", root, "")]
        while waiting:
            path, node, base = waiting.pop()
            base = self._named(path, node, base)
            waiting += [(f"{path}/{steps}", part, base) for steps, part in parts(node)]

    def pointer(self, ref: str, path: str) -> str:
        """Return the pointer of a reference in the schema at `path`, or the reference if nothing has that name."""
        while (base := self._bases.get(path)) is None:
            path = path.rpartition("/")[0] or "#"
        # Not all schemes of URIs can be joined, such as urn.
        whole = base + ref if ref.startswith("#") else _joined(base, ref)
        if whole in self._places:
            return self._places[whole]
        document, fragment = urldefrag(whole)
        is_pointer = not fragment or fragment.startswith("/")
        return self._places[document] + fragment if is_pointer and document in self._places else ref

    def _named(self, path: str, node: Any, base: str) -> str:
        if not isinstance(node, dict):
            return base
        name, anchors = node.get("$id"), [node.get("$anchor"), node.get("$dynamicAnchor")]
        if isinstance(name, str) and name.startswith("#"):  # how drafts before 2019-09 write an anchor
            anchors.append(name[1:])
        elif isinstance(name, str):
            base = urldefrag(_joined(base, name))[0]
            self._bases[path] = base
            self._places.setdefault(base, path)
        for anchor in anchors:
            if isinstance(anchor, str) and anchor:
                self._places.setdefault(f"{base}#{anchor}", path)
        return base


def _joined(base: str, name: str) -> str:
    try:
        return urljoin(base, name)
    except ValueError:  # not a URI
        return name


def target_of(schema: Any, ref: str) -> Any:
    if not re.match(r"#(/|$)", ref):
        return None
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
