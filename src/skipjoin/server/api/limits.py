"""Admission: requests and prompt tokens in the server are counted and bounded, before anything is tokenized."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from skipjoin.server.api.errors import bad_request, overloaded
from skipjoin.server.metrics import Metrics

# Bytes of text per token, for an estimate before tokenizing; English has 4 to 5, code and other scripts fewer.
_BYTES_PER_TOKEN = 4
# Bounds of Retry-After: clients ignore longer times, and an estimate so far ahead is worth little.
_SOONEST_S, _LATEST_S = 1.0, 60.0
_RATE_WINDOW_S = 10.0


def estimate_tokens(prompt: str | Sequence[int]) -> int:
    """About how many tokens a prompt has, without tokenizing it; exact for token ids."""
    if isinstance(prompt, str):
        return -(-len(prompt.encode()) // _BYTES_PER_TOKEN)
    return len(prompt)


class Rate:
    """The rate of an event: a count that decays over a window of seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._level = 0.0
        self._at = clock()

    def add(self, amount: float) -> None:
        """Count `amount` events now."""
        self._level = self._decayed() + amount

    def per_second(self) -> float:
        """Events per second."""
        return self._decayed() / _RATE_WINDOW_S

    def _decayed(self) -> float:
        now = self._clock()
        self._level *= math.exp((self._at - now) / _RATE_WINDOW_S)
        self._at = now
        return self._level


class AdmissionSlot:
    """One sequence's share of the limits, from its admission to its end. Every method may be called again."""

    __slots__ = ("_admission", "_open", "_tokens")

    def __init__(self, admission: Admission, tokens: int) -> None:
        self._admission = admission
        self._tokens = tokens
        self._open = True

    def resize(self, tokens: int) -> None:
        """Replace the estimate: the prompt has `tokens` tokens."""
        if self._open:
            self._admission.tokens += tokens - self._tokens
            self._tokens = tokens

    def started(self) -> None:
        """The sequence runs: its prompt waits no longer."""
        self._admission.note_start(self._tokens)
        self._tokens = 0

    def ended(self) -> None:
        """The sequence has ended, or will never begin."""
        if self._open:
            self._open = False
            self._admission.note_end(self._tokens)
            self._tokens = 0


class Admission:
    """The counts and their bounds. Used on the event loop only, so that checking and counting are one operation.

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
        """Slots for sequences whose prompts have about so many tokens: all of them, or an error.

        Raises 429 if there is no room now, with the time when there is likely to be, and 400 if there never is.
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
        """A request runs: its `tokens` prompt tokens wait no longer."""
        if tokens:
            self.tokens -= tokens
            self._starts.add(tokens)

    def note_end(self, tokens: int) -> None:
        """A request has ended; `tokens` of its prompt never ran."""
        self.tokens -= tokens
        self.requests -= 1
        self._ends.add(1)

    def _wait(self, excess: int, rate: Rate) -> float:
        """Seconds until `excess` is worked off, at the present rate."""
        per_second = rate.per_second()
        return _LATEST_S if per_second * _LATEST_S <= excess else max(_SOONEST_S, excess / per_second)
