"""How much may queue: requests and prompt tokens are counted at the door, before anything is tokenised."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from skipjoin.server.api.errors import bad_request, overloaded
from skipjoin.server.metrics import Metrics

# Bytes of text per token, to estimate before tokenising; English has 4 to 5, code and other scripts fewer.
_BYTES_PER_TOKEN = 4
# Retry-After is kept within what clients honour and what may still be true.
_SOONEST_S, _LATEST_S = 1.0, 60.0
_RATE_WINDOW_S = 10.0


def estimate_tokens(prompt: str | Sequence[int]) -> int:
    """About how many tokens a prompt has, at no cost; exact where it is token ids."""
    if isinstance(prompt, str):
        return -(-len(prompt.encode()) // _BYTES_PER_TOKEN)
    return len(prompt)


class Rate:
    """How fast something happens: a count that decays over a window of seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._level = 0.0
        self._at = clock()

    def add(self, amount: float) -> None:
        """`amount` of it happened now."""
        self._level = self._decayed() + amount

    def per_second(self) -> float:
        """The present rate."""
        return self._decayed() / _RATE_WINDOW_S

    def _decayed(self) -> float:
        now = self._clock()
        self._level *= math.exp((self._at - now) / _RATE_WINDOW_S)
        self._at = now
        return self._level


class AdmissionSlot:
    """One sequence's share of the limits, from the door until it is over. Every method may be called again."""

    __slots__ = ("_admission", "_open", "_tokens")

    def __init__(self, admission: Admission, tokens: int) -> None:
        self._admission = admission
        self._tokens = tokens
        self._open = True

    def resize(self, tokens: int) -> None:
        """The prompt turned out to have `tokens` tokens."""
        if self._open:
            self._admission.tokens += tokens - self._tokens
            self._tokens = tokens

    def started(self) -> None:
        """It runs: its prompt no longer waits."""
        self._admission.note_start(self._tokens)
        self._tokens = 0

    def ended(self) -> None:
        """It is over, or never came to be."""
        if self._open:
            self._open = False
            self._admission.note_end(self._tokens)
            self._tokens = 0


class Admission:
    """Counts and caps. Used on the event loop only, so that to check and to count is one act.

    requests: sequences in the server, waiting or running. tokens: prompt tokens of those that have not run yet.
    """

    def __init__(
        self, max_requests: int, max_tokens: int, metrics: Metrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.requests = 0
        self.tokens = 0
        self._metrics = metrics
        self._ends = Rate(clock)
        self._starts = Rate(clock)

    def reserve(self, prompt_tokens: Sequence[int]) -> list[AdmissionSlot]:
        """Places for sequences with prompts of about so many tokens, all or none.

        Raises 429 where there is no room now, with when there is likely to be, and 400 where there never is.
        """
        count, tokens = len(prompt_tokens), sum(prompt_tokens)
        if count > self.max_requests:
            raise bad_request(
                f"prompts times n must be at most {self.max_requests}, the requests this server queues, got {count}",
                "n",
            )
        if tokens > self.max_tokens:
            raise bad_request(
                f"the prompts, times n, must have at most {self.max_tokens} tokens, which is what this server queues; "
                f"they have about {tokens}",
                "prompt",
            )
        if (excess := self.requests + count - self.max_requests) > 0:
            self._metrics.rejected("requests")
            raise overloaded(
                f"the queue is full: {self.requests} of {self.max_requests} requests", self._wait(excess, self._ends)
            )
        if (excess := self.tokens + tokens - self.max_tokens) > 0:
            self._metrics.rejected("tokens")
            raise overloaded(
                f"the queue is full: {self.tokens} of {self.max_tokens} prompt tokens wait",
                self._wait(excess, self._starts),
            )
        self.requests += count
        self.tokens += tokens
        return [AdmissionSlot(self, share) for share in prompt_tokens]

    def note_start(self, tokens: int) -> None:
        """`tokens` prompt tokens wait no longer: their request runs."""
        if tokens:
            self.tokens -= tokens
            self._starts.add(tokens)

    def note_end(self, tokens: int) -> None:
        """A request is over; `tokens` of its prompt never ran."""
        self.tokens -= tokens
        self.requests -= 1
        self._ends.add(1)

    def _wait(self, excess: int, rate: Rate) -> float:
        """Seconds until `excess` has gone, at the present rate."""
        per_second = rate.per_second()
        return _LATEST_S if per_second * _LATEST_S <= excess else max(_SOONEST_S, excess / per_second)
