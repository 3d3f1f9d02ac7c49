from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.policy import Fact
from skipjoin.core.request import Request
from skipjoin.policies.execution import ExecutionTime


class RemainingTime:
    """Value function of the least remaining work in seconds: uncached tokens plus predicted output (ALISE section 3.1).

    A request that outgrows its predicted length is predicted to get twice as long, repeatedly. Every `aging_s` seconds
    since its arrival count like e times less remaining work. As all requests age alike, a waiting request keeps its
    key. Work counts in decode steps, so that keys are the same on a machine of another speed.
    """

    def __init__(self, time: ExecutionTime, lengths: Callable[[Request], float], *, aging_s: float = math.inf) -> None:
        self._aging_s = aging_s
        self._time = time
        self._lengths = lengths

    @property
    def revision(self) -> int:
        return self._time.revision

    @property
    def step_s(self) -> float:
        return self._time.decode(1)

    def key(self, request: Request, known: int, now: float) -> tuple[float]:
        return (math.log(self.seconds(request, known) / self.step_s) + request.arrival / self._aging_s,)

    def until(self, request: Request, now: float) -> float:
        return math.inf

    def tokens(self, request: Request, known: int) -> int:
        return 0

    def promoted(self, key: float) -> float:
        """Return when aging ranks this key before all future arrivals (ALISE equation 7), or inf."""
        return self._aging_s * key

    def explain(self, request: Request, now: float, kv: KVAccounts) -> Iterator[Fact]:
        known, uncached = request.progress.known, request.progress.known - request.progress.reached
        left_s = self.seconds(request, known)
        prefill_s = self._time.prefill(uncached) if uncached > 1 else 0.0
        tokens = round((left_s - prefill_s) / self._time.decode(known))
        yield Fact("predicted to remain", tokens, "tokens", "Output that it is expected to generate yet.")
        yield Fact("remaining work", left_s, "s", "Time for it and for the prompt alone. Requests with less run first.")
        if self._aging_s < math.inf:
            older = self.promoted(self.key(request, known, now)[0]) - now
            yield Fact("ages in", max(0.0, older), "s", "By then it is so old that no later request precedes it.")

    def seconds(self, request: Request, known: int) -> float:
        """Return the remaining work of a request with `known` tokens, including one just sampled."""
        generated = known - len(request.prompt)
        length = self._lengths(request)
        while length < generated:
            length *= 2
        length = min(length, request.max_tokens)
        seconds = max(1, length - generated) * self._time.decode(known)
        # The step of a just-sampled token is counted above; more uncached tokens are prefill.
        uncached = known - request.progress.reached
        if uncached > 1:
            seconds += self._time.prefill(uncached)
        return seconds
