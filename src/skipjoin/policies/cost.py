from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from skipjoin.core.policy import CostModel
from skipjoin.core.step import StepShape

# Coefficients of a step in the order of a shape's features (one, prefill, attention, decodes, context), then the
# weight-loading time that hides the work of few tokens.
STEP_TERMS = ("floor", "prefill_token", "attention_pair", "decode", "context_token", "weights")


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Cost model that is linear in a step's shape, above a floor (BROS section 4.2, ALISE section 3.2). In seconds.

    A step takes floor + max(weights, prefill_token x tokens + decode x requests) + attention_pair x query-key pairs +
    context_token x KV tokens. Reading the weights overlaps with the arithmetic of few tokens.
    """

    floor: float
    prefill_token: float
    attention_pair: float = 0.0
    decode: float = 0.0
    context_token: float = 0.0
    block: float = 0.0
    transfer_floor: float = 0.0
    weights: float = 0.0  # to read all weights, of which a step reads `read_share`
    expert_part: float = 0.0  # share of the weights that are experts, in [0, 1]
    expert_use: float = 0.0  # share of the experts that a token uses, in [0, 1]
    revision: ClassVar[int] = 0
    margin: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be a finite number of seconds, at least 0, got {value}")
        if self.floor <= 0:
            raise ValueError(f"floor must be above 0 seconds, got {self.floor}")
        for name in ("expert_part", "expert_use"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)}")

    def read_share(self, tokens: int) -> float:
        """Return the expected share of the weights that a step reads, if tokens choose experts independently."""
        return 1 - self.expert_part * (1 - self.expert_use) ** tokens

    def step(self, shape: StepShape) -> float:
        work = self.prefill_token * shape.prefill + self.decode * shape.decodes
        weights = self.weights
        if self.expert_part:  # policies ask for many steps, so others are spared the call
            weights *= self.read_share(shape.prefill + shape.decodes)
        return (
            self.floor
            + (work if work > weights else weights)
            + self.attention_pair * shape.attention
            + self.context_token * shape.context
        )

    def transfer(self, blocks: float) -> float:
        return self.transfer_floor + self.block * blocks


def scaled(cost: LinearCost, factor: float) -> LinearCost:
    """Return the cost model of a machine whose steps, not transfers, take `factor` times as long."""
    return replace(cost, **{name: getattr(cost, name) * factor for name in STEP_TERMS})


def with_link_limit(cost: LinearCost, block_s: float) -> LinearCost:
    return replace(cost, block=max(cost.block, block_s))


# How far a coefficient follows one step's error: by its own share of the step, and all of them alike. The second is
# small, and makes what no step exercises follow a machine that became slower or faster as a whole.
OWN_RATE, COMMON_RATE = 0.3, 0.015
# A step counts as at most this far off its prediction, so that a hiccup of the machine teaches little.
MAX_ERROR = 0.3
# A coefficient is doubted while its relative standard deviation is above the first. A step measures with the second,
# divides a doubted coefficient by at most the third, and at most halves its doubt, so that a first step which takes
# longer than those after it, as first steps do, is corrected by them.
_DOUBTED, _NOISE, _MAX_FALL = 0.3, 0.15, 4.0
# The published coefficients are updated when one of them has changed by this factor.
REVISION_FACTOR = 1.05
# A coefficient that starts at 0 gets this share of a small step's time, divided by a typical count of its feature
# (prefill tokens, query-key pairs, decodes, context tokens), so that it can grow. Work hidden behind the weights is
# never observed, so the token terms get all of the weights' time. Weights that take no time stay at 0.
_START_SHARE = 0.1
_COMMON_SIZE = (1, 128, 128 * 512, 16, 16 * 512, math.inf)
# Lower bound of a coefficient as a share of its start; from near 0 it would take very long to recover.
_MIN_SHARE = 0.05


# The margin covers this share of steps, and moves by this much of it with each step that it does not cover.
_COVERED, _MARGIN_RATE = 0.95, 0.02
_MAX_MARGIN = 2.0


class Margin:
    """Running quantile of measured over estimated step times, at least 1.

    It moves by steps of constant size, so that a hiccup of the machine counts as one step.
    """

    def __init__(self) -> None:
        self.value = 1.0

    def learn(self, estimated: float, measured: float) -> None:
        move = _COVERED if measured > self.value * estimated else _COVERED - 1
        self.value = min(_MAX_MARGIN, max(1.0, self.value + _MARGIN_RATE * move))


class TrackedCost:
    """Cost model of a machine whose steps vary around the estimates of `cost`, with a learned margin."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._margin = Margin()

    @property
    def revision(self) -> int:
        return self._cost.revision

    @property
    def margin(self) -> float:
        return self._margin.value

    def step(self, shape: StepShape) -> float:
        return self._cost.step(shape)

    def transfer(self, blocks: float) -> float:
        return self._cost.transfer(blocks)

    def learn(self, shape: StepShape, seconds: float) -> None:
        self._margin.learn(self.step(shape), seconds)


class LearningCost:
    """Linear cost model that adapts to measured steps, but not to measured transfers.

    Each step scales every coefficient by the step's relative error times the coefficient's share of its time, which
    keeps coefficients positive. Published costs change only between revisions.

    Args:
        doubt: Relative standard deviation of the coefficients of `start`. The first steps of each kind correct doubted
            ones at once, as a Kalman filter without covariances does.
    """

    def __init__(self, start: LinearCost, *, doubt: float = 0.0) -> None:
        self.revision = -1
        self._margin = Margin()
        self.restart(start, doubt=doubt)

    def restart(self, start: LinearCost, *, doubt: float = 0.0) -> None:
        """Forget what was learned of steps, except their margin, and continue from measured costs."""
        doubted = STEP_TERMS if doubt > _DOUBTED else ()
        self._doubts = {index: doubt for index, name in enumerate(doubted) if getattr(start, name)}
        small = start.step(StepShape())
        visible = (0, start.weights, 0, start.weights, 0, 0)
        self._learned = [
            getattr(start, name) or (_START_SHARE * small + hidden) / size
            for name, size, hidden in zip(STEP_TERMS, _COMMON_SIZE, visible, strict=True)
        ]
        self._least = [_MIN_SHARE * term for term in self._learned]
        self._answer = start
        self._revise()

    @property
    def current(self) -> LinearCost:
        return self._answer

    @property
    def margin(self) -> float:
        return self._margin.value

    def step(self, shape: StepShape) -> float:
        return self._answer.step(shape)

    def transfer(self, blocks: float) -> float:
        return self._answer.transfer(blocks)

    def learn(self, shape: StepShape, seconds: float) -> None:
        """Update the coefficients, unless the time is not positive and finite."""
        if not 0 < seconds < math.inf:
            return
        learned, bounds = self._learned, self._bounds
        floor, prefill, attention, decode, context, weights = learned
        work = prefill * shape[0] + decode * shape[2]
        read = self._answer.read_share(shape[0] + shape[2])
        if work > weights * read:
            counts: tuple[float, ...] = (1, *shape, 0)
        else:
            work, counts = weights * read, (1, 0, shape[1], 0, shape[3], read)
        expected = floor + work + attention * shape[1] + context * shape[3]
        if self._doubts and self._correct(counts, expected, seconds):
            return
        self._margin.learn(expected, seconds)
        error = (seconds - expected) / (seconds if seconds > expected else expected)
        error = min(MAX_ERROR, max(-MAX_ERROR, error))
        common, own = 1 + error * COMMON_RATE, error * OWN_RATE / expected
        is_revised = False
        for index, count in enumerate(counts):
            term = learned[index]
            term *= common + own * term * count
            least, low, high = bounds[index]
            learned[index] = term = max(term, least)
            is_revised |= not low <= term <= high
        # Costs are nonnegative sums of terms: while no term has changed much, no cost has.
        if is_revised:
            self._revise()

    def _correct(self, counts: Sequence[float], expected: float, seconds: float) -> bool:
        """Give a step's error to the doubted coefficients; return False if it says little of them."""
        learned = self._learned
        shares = {index: learned[index] * counts[index] / expected for index in self._doubts if counts[index]}
        variances = {index: (self._doubts[index] * share) ** 2 for index, share in shares.items()}
        ratio = seconds / expected
        noise = (_NOISE * max(1.0, ratio)) ** 2
        total = sum(variances.values())
        if total < noise:
            return False
        for index, variance in variances.items():
            part = variance / (total + noise)
            learned[index] *= max(1 / _MAX_FALL, 1 + part / shares[index] * (ratio - 1))
            self._least[index] = min(self._least[index], _MIN_SHARE * learned[index])
            self._doubts[index] *= 1 - part / 2
            if self._doubts[index] <= _DOUBTED:
                del self._doubts[index]
        self._revise()
        return True

    def _revise(self) -> None:
        self.revision += 1
        self._answer = replace(self._answer, **dict(zip(STEP_TERMS, self._learned, strict=True)))
        self._bounds = [
            (least, term / REVISION_FACTOR, term * REVISION_FACTOR)
            for term, least in zip(self._learned, self._least, strict=True)
        ]
