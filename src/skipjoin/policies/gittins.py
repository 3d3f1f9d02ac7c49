from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import reduce
from itertools import accumulate, islice, repeat, takewhile
from operator import add, mul, truediv
from typing import NamedTuple

from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.policy import CostModel
from skipjoin.core.request import Request
from skipjoin.policies.execution import ExecutionTime
from skipjoin.policies.hazards import BIN_MIDDLES, BIN_WIDTHS, bin_of
from skipjoin.policies.length_model import ForecastClass, LengthModel

# Bin of a request without output, whose prompt is still to be computed.
NOT_BEGUN = -1
# Prompts shorter than this many tokens count as one octave.
_SHORT_PROMPT = 16
# Prompts from this many tokens on have finer bins, and the first of these.
_LONG_PROMPT, _LONG_BIN = 1024, 20
_SHORTEST_OCTAVE = int(math.log2(_SHORT_PROMPT))
# Number of notes between refreshes: a quarter of all so far, within these bounds.
_FIRST_NOTES, _MAX_NOTES = 16, 256
# Weight of the latest step in the share of steps in which KV is short.
_BINDS_RATE = 0.02
# KV is short if less than this share of the device is available, or if some is swapped out, while slots are free.
_SHORT_SHARE = 0.06
# Capacity in tokens that is assumed before the first step.
_ANY_CAPACITY = 10_000
# Survivors that are too few to matter.
_FEW = 1e-6
_MIN_INDEX = 1e-12
_MIN_STEP_S = 1e-9


class Kind(NamedTuple):
    """What the index of a request depends on besides its bin: octaves, and the bin of its `max_tokens`."""

    cls: ForecastClass
    octave: int
    cap: int
    steps: int | None  # of its JCT objective in decode steps without other requests
    uncached: int = 0  # `prefill_bin` of the tokens before its first output; 0 once it has output

    @property
    def without_prompt(self) -> Kind:
        return self._replace(octave=_SHORTEST_OCTAVE, uncached=0)


def prefill_bin(tokens: int) -> int:
    """Return the bin of a number of prompt tokens: half octaves, and eighths of long prompts, which differ by more."""
    if tokens < _LONG_PROMPT:
        return int(2 * math.log2(max(1, tokens)))
    return _LONG_BIN + int(8 * math.log2(tokens / _LONG_PROMPT))


def _min_tokens(prefill_bin: int) -> int:
    if prefill_bin < _LONG_BIN:
        return math.ceil(2 ** (prefill_bin / 2))
    return math.ceil(_LONG_PROMPT * 2 ** ((prefill_bin - _LONG_BIN) / 8))


def _prompt_of(octave: int) -> float:
    return 1.5 * 2.0**octave


def kind_of(request: Request, cls: ForecastClass, time: ExecutionTime, uncached: int) -> Kind:
    prompt = len(request.prompt)
    octave = int(math.log2(max(_SHORT_PROMPT, prompt)))
    jct_s = request.progress.target.jct_s
    steps = None if jct_s == math.inf else int(math.log2(max(1.0, jct_s / max(_MIN_STEP_S, time.decode(prompt)))))
    return Kind(cls, octave, bin_of(request.max_tokens), steps, prefill_bin(uncached))


class GittinsIndex:
    """Index of requests by kind and bin: the best ratio of expected gain to expected cost over all stopping bins.

    The gain of a request that ends is 1/length, as normalized latency divides by it, or 1/objective with a JCT
    objective. The cost of a token is the share of a slot, or of the KV pool, whichever is short. A prompt costs the
    time of its uncached tokens, because all slots wait for it. With equal lengths, hazard and index rise, and nothing
    is preempted. With heavy tails they fall, and short work goes first. With good forecasts the order becomes shortest
    remaining time.
    """

    def __init__(self, cost: CostModel, max_seqs: int) -> None:
        self.model = LengthModel()
        self.revision = 0
        self.time = ExecutionTime(cost)
        self._cost_revision = self.time.revision
        self.max_seqs = max_seqs
        self.capacity = _ANY_CAPACITY
        self._binds = 0.5  # share of recent steps in which KV is short
        self._kv_share = 0.5  # its value at the last refresh
        self._due = _FIRST_NOTES
        self._found: dict[tuple[Kind, int], float] = {}
        self._prompts: dict[tuple[int, int], float] = {}  # by octave, and bin of uncached tokens
        self._gained: dict[tuple[ForecastClass, int, int | None, int], tuple[list[float], list[float]]] = {}
        self._ended: dict[tuple[ForecastClass, int], list[float]] = {}
        # By octave and capacity, which is known from the first step on.
        self._token_cost: dict[tuple[int, int], list[float]] = {}
        self._cost_to_end: dict[tuple[int, int], list[float]] = {}

    @property
    def step_s(self) -> float:
        return self._decode(1)

    def observe(self, kv: KVAccounts, running: int) -> None:
        """Record the size of the KV pool, and whether blocks are short.

        If `running` requests fill all slots, these are short and not KV, although preempted requests may fill the pool.
        """
        self.capacity = kv.device_total * kv.block_size
        tiers = kv.tiers
        is_short = running < self.max_seqs and (
            kv.available < _SHORT_SHARE * kv.device_total or (tiers is not None and tiers.cpu_free < tiers.cpu_total)
        )
        self._binds += _BINDS_RATE * (is_short - self._binds)

    def refresh(self) -> bool:
        """Use what was learned since the last refresh, if it is due. Return whether indices may have changed."""
        if self.model.notes < self._due and self.time.revision == self._cost_revision:
            return False
        self._due = self.model.notes + min(_MAX_NOTES, max(_FIRST_NOTES, self.model.notes // 4))
        self._cost_revision = self.time.revision
        self._kv_share = self._binds
        self.model.refresh()
        for kept in (self._found, self._prompts, self._gained, self._ended, self._token_cost, self._cost_to_end):
            kept.clear()
        self.revision += 1
        return True

    def log_index(self, kind: Kind, place: int) -> float:
        key = (kind, place)
        if (found := self._found.get(key)) is None:
            found = self._found[key] = math.log(max(_MIN_INDEX, self._index(kind, place)))
        return found

    def prompt_s(self, kind: Kind) -> float:
        """Return the minimum device time of computing the uncached tokens of such a request."""
        if (found := self._prompts.get(key := (kind.octave, kind.uncached))) is None:
            uncached = _min_tokens(kind.uncached)
            found = self.time.prompt(uncached, max(0, 2**kind.octave - uncached)) if uncached > 1 else 0.0
            self._prompts[key] = found
        return found

    def spread(self, kinds: Mapping[Kind, float]) -> float:
        """Return the squared coefficient of variation of the costs of requests of these kinds and weights.

        It is 0 if all cost the same, so that ordering gains nothing, and 1 for an exponential distribution.
        """
        total = first = second = 0.0
        for kind, weight in kinds.items():
            mean, square = self._moments(kind)
            total += weight
            first += weight * mean
            second += weight * square
        return max(0.0, total * second / (first * first) - 1) if first > 0 else 0.0

    def _moments(self, kind: Kind) -> tuple[float, float]:
        """Return the mean cost of a request of this kind, in decode steps as in `_index`, and its mean square."""
        before = self.prompt_s(kind) / self._decode(_prompt_of(kind.octave))
        ends = self._ends(kind.cls, kind.cap)
        costs = [*map(add, repeat(before), self._costs(kind.octave)[: len(ends)])]
        weighted = [*map(mul, ends, costs)]
        return reduce(add, weighted, 0.0), reduce(add, map(mul, weighted, costs), 0.0)

    def _decode(self, context: float) -> float:
        return max(_MIN_STEP_S, self.time.decode(int(context)))

    def _index(self, kind: Kind, place: int) -> float:
        first, before = max(0, place), 0.0
        if place == NOT_BEGUN:
            # In decode steps, as the cost of a token, but of all slots.
            before = self.prompt_s(kind) / self._decode(_prompt_of(kind.octave))
        gains, tokens = self._gains(kind.cls, kind.cap, kind.steps, first)
        costs = accumulate(map(mul, tokens, islice(self._token_costs(kind.octave), first, None)), initial=before)
        next(costs)
        return max(map(truediv, gains, costs), default=0.0)

    # Hundreds of kinds share what follows from their class, cap and octave alone, between two refreshes.

    def _gains(self, cls: ForecastClass, cap: int, steps: int | None, first: int) -> tuple[list[float], list[float]]:
        """Return the expected gain up to each bin from `first` on, and the expected number of tokens in each."""
        if (found := self._gained.get(key := (cls, cap, steps, first))) is not None:
            return found
        hazards = [*self.model.hazards(cls)[:cap], 1.0][first:]
        alive = [*takewhile(_FEW.__le__, accumulate([1 - hazard for hazard in hazards], mul, initial=1.0))]
        objectives: Iterable[float] = BIN_MIDDLES[first:] if steps is None else repeat(2.0**steps)
        gains = [*accumulate(map(truediv, map(mul, alive, hazards), objectives))]
        tokens = [*map(mul, map(mul, alive, BIN_WIDTHS[first:]), [1 - 0.5 * hazard for hazard in hazards])]
        found = self._gained[key] = gains, tokens
        return found

    def _ends(self, cls: ForecastClass, cap: int) -> list[float]:
        """Return the probability that a request ends in each bin. Lengths too rare to be known count as the longest."""
        if (found := self._ended.get(key := (cls, cap))) is not None:
            return found
        hazards, alive, rarest = self.model.hazards(cls), 1.0, self.model.rarest
        found = self._ended[key] = []
        for at in range(cap + 1):
            found.append(ended := alive * (hazards[at] if at < cap else 1.0))
            alive -= ended
            if alive < rarest:
                found[-1] += alive
                break
        return found

    def _token_costs(self, octave: int) -> list[float]:
        if (found := self._token_cost.get(key := (octave, self.capacity))) is None:
            prompt = _prompt_of(octave)
            slot, per_kv = (1 - self._kv_share) / self.max_seqs, self._kv_share / self.capacity
            found = self._token_cost[key] = [slot + per_kv * (prompt + length) for length in BIN_MIDDLES]
        return found

    def _costs(self, octave: int) -> list[float]:
        if (found := self._cost_to_end.get(key := (octave, self.capacity))) is None:
            prompt = _prompt_of(octave)
            slot, per_kv = (1 - self._kv_share) / self.max_seqs, self._kv_share / self.capacity
            found = self._cost_to_end[key] = [
                length * (slot + per_kv * (prompt + length / 2)) for length in BIN_MIDDLES
            ]
        return found
