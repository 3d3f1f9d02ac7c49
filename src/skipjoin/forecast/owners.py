from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from skipjoin.core.forecast import Forecast
from skipjoin.forecast.forecaster import Forecaster, Predicted
from skipjoin.forecast.mass import Array, capped, hazards_of
from skipjoin.forecast.models import Prompt
from skipjoin.forecast.prior import first_guess

# Forecasters in memory, 1 to 2 MB each besides their entries; the least recently used is evicted.
MAX_OWNERS = 64
# Requests after which an owner has half of its maximum weight in the shared distribution.
_HALF_WEIGHT = 40


class OwnerForecasters:
    """One forecaster per owner, learned only from that owner's requests.

    A new forecaster starts from a distribution shared with owners in memory. One owner changes it by at most 1/2 in
    total variation, and by at most 1/(m + 2) if `m` other owners have many requests.
    """

    def __init__(self, make: Callable[[str, Array], Forecaster], folder: Path | None = None) -> None:
        self._make, self._folder = make, folder
        self._owners: OrderedDict[str, Forecaster] = OrderedDict()
        self._changed: set[str] = set()
        self._lock = threading.Lock()  # guards the two above, so that `prior` does not wait for a search or a file

    def predict(self, owner: str, prompt: Prompt, max_tokens: int) -> Predicted:
        return self._of(owner).predict(prompt, max_tokens)

    def learn(self, owner: str, predicted: Predicted, tokens: int, *, exact: bool) -> None:
        self._of(owner).learn(predicted, tokens, exact=exact)
        with self._lock:
            self._changed.add(owner)

    def prior(self, owner: str, max_tokens: int) -> Forecast:
        with self._lock:
            found = self._owners.get(owner)
        return capped(self.shared(), max_tokens, "prior") if found is None else found.prior(max_tokens)

    def shared(self) -> Array:
        with self._lock:
            found = list(self._owners.values())
        total, weight = first_guess(), 1.0
        for forecaster in found:
            mass, requests = forecaster.lengths()
            share = requests / (requests + _HALF_WEIGHT)
            total, weight = total + share * mass, weight + share
        return total / weight

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._owners.values()))

    def save(self, *, quiet: bool = False) -> bool:
        with self._lock:
            changed = {owner: self._owners[owner] for owner in self._changed if owner in self._owners}
            self._changed.clear()
        failed = {owner for owner, forecaster in changed.items() if not self._save(forecaster, quiet=quiet)}
        with self._lock:
            self._changed |= failed
        return not failed

    def _save(self, forecaster: Forecaster, *, quiet: bool) -> bool:
        return self._folder is None or forecaster.save(self._folder, quiet=quiet)

    def _of(self, owner: str) -> Forecaster:
        with self._lock:
            if (found := self._owners.get(owner)) is not None:
                self._owners.move_to_end(owner)
                return found
        made = self._make(owner, hazards_of(self.shared()))
        if self._folder is not None:
            made.load(self._folder)
        with self._lock:
            self._owners[owner] = made
            gone = [self._owners.popitem(last=False) for _ in range(len(self._owners) - MAX_OWNERS)]
            unsaved = [forecaster for name, forecaster in gone if name in self._changed]
            self._changed -= {name for name, _ in gone}
        for forecaster in unsaved:
            self._save(forecaster, quiet=False)
        return made
