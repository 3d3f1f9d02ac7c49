from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple


class Adapter(NamedTuple):
    """Adapter. Its number is unique in the server, since a name may get another folder."""

    number: int
    name: str
    folder: str


def configured(modules: Mapping[str, str]) -> tuple[Adapter, ...]:
    """Return the adapters of `lora_modules`, which every engine numbers alike."""
    return tuple(Adapter(number, *item) for number, item in enumerate(modules.items(), 1))


class AdapterUse:
    """Use of an adapter by a request. `ended` may be called again."""

    def __init__(self, adapter: Adapter, on_end: Callable[[Adapter], None]) -> None:
        self.adapter = adapter
        self._on_end: Callable[[Adapter], None] | None = on_end

    def ended(self) -> None:
        if self._on_end is not None:
            on_end, self._on_end = self._on_end, None
            on_end(self.adapter)


class AdapterNames:
    """Adapters that requests may choose, with the number of requests that use each.

    A removed adapter takes no more requests. `unload` is called with its number when no request uses it.
    """

    def __init__(self, modules: Mapping[str, str], unload: Callable[[int], None] = lambda number: None) -> None:
        self._named = {adapter.name: adapter for adapter in configured(modules)}
        self._numbers = itertools.count(len(self._named) + 1)
        self._reserved: set[str] = set()
        self._users: Counter[int] = Counter()
        self._removed: set[int] = set()
        self._unload = unload

    @property
    def all(self) -> tuple[Adapter, ...]:
        return tuple(self._named.values())

    def find(self, name: str | None) -> Adapter | None:
        return None if name is None else self._named.get(name)

    def reserve(self, name: str) -> bool:
        """Reserve a name until `release`, while its adapter is loaded; return False if it is taken."""
        is_free = name not in self._named and name not in self._reserved
        if is_free:
            self._reserved.add(name)
        return is_free

    def release(self, name: str) -> None:
        self._reserved.discard(name)

    def new(self, name: str, folder: str) -> Adapter:
        return Adapter(next(self._numbers), name, folder)

    def add(self, adapter: Adapter) -> None:
        self._named[adapter.name] = adapter

    def remove(self, name: str) -> None:
        number = self._named.pop(name).number
        self._removed.add(number)
        self._unload_unused(number)

    def use(self, adapter: Adapter) -> AdapterUse:
        self._users[adapter.number] += 1
        return AdapterUse(adapter, self._free)

    def _free(self, adapter: Adapter) -> None:
        self._users[adapter.number] -= 1
        self._unload_unused(adapter.number)

    def _unload_unused(self, number: int) -> None:
        if number in self._removed and not self._users[number]:
            self._removed.discard(number)
            del self._users[number]
            self._unload(number)


# Names of models in an error, since there may be many adapters.
_MAX_NAMES = 8


def unknown_model(name: str, served: Sequence[str]) -> str:
    shown, left = ", ".join(map(repr, served[:_MAX_NAMES])), len(served) - _MAX_NAMES
    more = f" and {left} more, which GET /v1/models lists" if left > 0 else ""
    return f"the model {name} does not exist; this server serves {shown}{more}"
