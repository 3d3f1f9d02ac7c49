"""Length distributions of the figures: one side fixed at its mean, and outputs of a given spread."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

from skipjoin.workload.arrivals import parse_arrivals
from skipjoin.workload.lengths import Lengths, parse_lengths
from skipjoin.workload.streams import Stream
from skipjoin.workload.workload import DEFAULT, Synthetic

# Quantiles that represent a distribution during the search for its parameters, and the bisection steps.
_QUANTILES, _HALVINGS = 1000, 30


@dataclass(frozen=True)
class Held:
    """Lengths of another distribution, with prompts, outputs or both replaced by their mean."""

    name: str
    of: Lengths
    prompt: bool
    output: bool

    def draw(self, random: random.Random) -> tuple[int, int]:
        prompt, output = self.of.draw(random)
        mean_prompt, mean_output = map(round, self.of.mean())
        return mean_prompt if self.prompt else prompt, mean_output if self.output else output

    def mean(self) -> tuple[float, float]:
        return self.of.mean()


@dataclass(frozen=True)
class Spread:
    """Prompts of one length, and log-normal outputs clipped to the range from `shortest` to `longest`.

    After clipping, the outputs have the mean `output` and the coefficient of variation `cv`. Without a lower bound,
    outputs of a token or two would decide every mean latency per token.
    """

    name: str
    prompt: int
    output: float
    cv: float
    shortest: int
    longest: int

    def draw(self, random: random.Random) -> tuple[int, int]:
        random.random()  # two draws per request, as other distributions make
        level = random.random()
        if self.cv == 0:
            return self.prompt, round(self.output)
        sigma, scale = _parameters(self.output, self.cv, self.shortest, self.longest)
        # The inverse is infinite at a level of 0.
        value = scale * math.exp(sigma * NormalDist().inv_cdf(max(level, 1e-12)))
        return self.prompt, round(min(self.longest, max(self.shortest, value)))

    def mean(self) -> tuple[float, float]:
        return float(self.prompt), self.output


@cache
def _parameters(mean: float, cv: float, shortest: int, longest: int) -> tuple[float, float]:
    """Find sigma and median of the clipped log-normal with this mean and spread by nested bisection."""
    low, high = 0.0, 6.0
    for _ in range(_HALVINGS):
        sigma = (low + high) / 2
        scale = _scale(mean, sigma, shortest, longest)
        if _moments(sigma, scale, shortest, longest)[1] < cv:
            low = sigma
        else:
            high = sigma
    return sigma, scale


def _scale(mean: float, sigma: float, shortest: int, longest: int) -> float:
    # Bisect on a logarithmic scale, because wide distributions have small medians.
    low, high = math.log(1e-3), math.log(longest)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _moments(sigma, math.exp(middle), shortest, longest)[0] < mean:
            low = middle
        else:
            high = middle
    return math.exp(middle)


_LEVELS = [NormalDist().inv_cdf((index + 0.5) / _QUANTILES) for index in range(_QUANTILES)]


def _moments(sigma: float, scale: float, shortest: int, longest: int) -> tuple[float, float]:
    """Return the mean and the coefficient of variation after clipping."""
    values = [min(longest, max(shortest, scale * math.exp(sigma * level))) for level in _LEVELS]
    mean = math.fsum(values) / _QUANTILES
    variance = math.fsum((value - mean) ** 2 for value in values) / _QUANTILES
    return mean, math.sqrt(variance) / mean


def workload(lengths: Lengths, arrivals: str = "poisson") -> Synthetic:
    return Synthetic((Stream(DEFAULT, lengths, parse_arrivals(arrivals)),))


def held(dataset: str, *, prompt: bool, output: bool) -> Synthetic:
    """Return Poisson arrivals with a dataset's lengths, with fixed prompts or outputs."""
    sides = [side for side, kept in (("prompts", prompt), ("outputs", output)) if kept]
    name = f"{dataset}, equal {' and '.join(sides)}" if sides else dataset
    return workload(Held(name, parse_lengths(dataset), prompt, output))
