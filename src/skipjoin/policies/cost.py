"""Cost models: seconds for the shape of a step, seconds for a transfer."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from skipjoin.core.step import StepShape

# The coefficients of a step, in the order of a shape's features (one, prefill, attention, decodes, context), and last
# what the work of few tokens hides behind.
STEP_TERMS = ("floor", "prefill_token", "attention_pair", "decode", "context_token", "weights")


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Step time linear in its shape, above a floor (BROS section 4.2, ALISE section 3.2):

        floor + max(weights, prefill_token x tokens + decode x requests)
        + attention_pair x pairs + context_token x KV tokens

    floor: seconds that every step takes. weights: seconds in which the weights are read; the arithmetic of few tokens
    goes on meanwhile. prefill_token: seconds per token of a slice longer than one. attention_pair: per query-key pair
    of those. decode: per decoding request. context_token: per KV token that decodes read. block: per KV block moved;
    transfer_floor: per transfer.
    """

    floor: float
    prefill_token: float
    attention_pair: float = 0.0
    decode: float = 0.0
    context_token: float = 0.0
    block: float = 0.0
    transfer_floor: float = 0.0
    weights: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be a finite number of seconds, at least 0, got {value}")
        if self.floor <= 0:
            raise ValueError(f"floor must be above 0 seconds, got {self.floor}")

    @property
    def revision(self) -> int:
        """Always 0: the answers never change."""
        return 0

    def step(self, shape: StepShape) -> float:
        """Seconds of a step of this shape."""
        work = self.prefill_token * shape.prefill + self.decode * shape.decodes
        return (
            self.floor
            + (work if work > self.weights else self.weights)
            + self.attention_pair * shape.attention
            + self.context_token * shape.context
        )

    def transfer(self, blocks: float) -> float:
        """Seconds to move `blocks` KV blocks one way."""
        return self.transfer_floor + self.block * blocks


def scaled(cost: LinearCost, factor: float) -> LinearCost:
    """The cost on a machine whose steps take `factor` times as long; transfers stay as they are."""
    return replace(cost, **{name: getattr(cost, name) * factor for name in STEP_TERMS})


# How far a coefficient follows one step's error: by its own share of the step, and all of them alike. The second is
# small, and makes what no step exercises follow a machine that became slower or faster as a whole.
_OWN_RATE, _COMMON_RATE = 0.3, 0.015
# A step counts as at most this far off its prediction, so that a hiccup of the machine teaches little.
_MOST_ERROR = 0.3
# No coefficient moves by more than this share of itself in one step.
MOST_MOVE = _MOST_ERROR * (_OWN_RATE + _COMMON_RATE)
# Answers follow the coefficients when one of them has moved by this factor.
REVISION_FACTOR = 1.05
# A coefficient that starts at 0 gets this share of what a small step takes, spread over a step of the size beside it
# (prefill tokens, query-key pairs, decodes, context tokens): it can then grow. What hides behind the weights learns
# nothing, so the work of tokens gets all of their time. Weights that take no time never will.
_START_SHARE = 0.1
_COMMON_SIZE = (1, 128, 128 * 512, 16, 16 * 512, math.inf)
# No coefficient falls below this share of its start: from next to nothing it would take forever to return.
_LEAST_SHARE = 0.05


class LearningCost:
    """A linear cost that follows the steps that it is told of.

    Each measured step moves every coefficient by a small factor, in the direction of the step's relative error and
    the further, the larger the coefficient's share of the step (the normalised gradient of the squared relative
    error in the coefficients' logarithms). Factors keep coefficients positive and need no units. Transfers stay as
    they were measured.

    Between two revisions the answers stay what they are, within `REVISION_FACTOR` of what was learnt: an
    answer that was kept equals a new one.

    start: the profile, or a guess.
    """

    def __init__(self, start: LinearCost) -> None:
        small = start.step(StepShape())
        visible = (0, start.weights, 0, start.weights, 0, 0)
        self._learnt = [
            getattr(start, name) or (_START_SHARE * small + hidden) / size
            for name, size, hidden in zip(STEP_TERMS, _COMMON_SIZE, visible, strict=True)
        ]
        self._least = [_LEAST_SHARE * term for term in self._learnt]
        self.revision = -1
        self._answer = start
        self._revise()

    @property
    def current(self) -> LinearCost:
        """The coefficients that answers are made of, as of this revision."""
        return self._answer

    def step(self, shape: StepShape) -> float:
        """Seconds of a step of this shape."""
        return self._answer.step(shape)

    def transfer(self, blocks: float) -> float:
        """Seconds to move `blocks` KV blocks one way."""
        return self._answer.transfer(blocks)

    def learn(self, shape: StepShape, seconds: float) -> None:
        """A step of this shape took that long. What is not a positive finite number teaches nothing."""
        if not 0 < seconds < math.inf:
            return
        learnt, bounds = self._learnt, self._bounds
        floor, prefill, attention, decode, context, weights = learnt
        work = prefill * shape[0] + decode * shape[2]
        if work > weights:
            counts = (1, *shape, 0)
        else:
            work, counts = weights, (1, 0, shape[1], 0, shape[3], 1)
        expected = floor + work + attention * shape[1] + context * shape[3]
        error = (seconds - expected) / (seconds if seconds > expected else expected)
        error = min(_MOST_ERROR, max(-_MOST_ERROR, error))
        common, own = 1 + error * _COMMON_RATE, error * _OWN_RATE / expected
        is_revised = False
        for index, count in enumerate(counts):
            term = learnt[index]
            term *= common + own * term * count
            least, low, high = bounds[index]
            learnt[index] = term = max(term, least)
            is_revised |= not low <= term <= high
        # Every answer is a sum of terms with weights of at least 0: while no term has moved far, no answer has.
        if is_revised:
            self._revise()

    def _revise(self) -> None:
        """Answer with what was learnt until now. Bounds: each term's least value, and how far it may move until the
        next revision."""
        self.revision += 1
        self._answer = replace(self._answer, **dict(zip(STEP_TERMS, self._learnt, strict=True)))
        self._bounds = [
            (least, term / REVISION_FACTOR, term * REVISION_FACTOR)
            for term, least in zip(self._learnt, self._least, strict=True)
        ]
