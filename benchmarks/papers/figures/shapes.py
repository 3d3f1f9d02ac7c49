"""Lengths that only the figures need: a distribution with one side held at its mean, and outputs of a given spread."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

from skipjoin.workload.arrivals import parse_arrivals
from skipjoin.workload.lengths import Lengths, parse_lengths
from skipjoin.workload.workload import DEFAULT, Stream, Synthetic

# Quantiles that stand for a distribution while its parameters are looked for, and how often an interval is halved.
_QUANTILES, _HALVINGS = 1000, 30


@dataclass(frozen=True)
class Held:
    """Another distribution's lengths with prompts, outputs or both replaced by their mean."""

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
    """Prompts of one length, and log-normal outputs that are raised to `least` and cut at `most`, whose mean and
    coefficient of variation are, after that, `output` and `cv`.

    Without a least length, answers of a token or two would decide every mean of latencies per token.
    """

    name: str
    prompt: int
    output: float
    cv: float
    least: int
    most: int

    def draw(self, random: random.Random) -> tuple[int, int]:
        random.random()  # two numbers for every request, as other lengths take
        level = random.random()
        if self.cv == 0:
            return self.prompt, round(self.output)
        sigma, scale = _parameters(self.output, self.cv, self.least, self.most)
        # The inverse is infinite at a level of 0.
        value = scale * math.exp(sigma * NormalDist().inv_cdf(max(level, 1e-12)))
        return self.prompt, round(min(self.most, max(self.least, value)))

    def mean(self) -> tuple[float, float]:
        return float(self.prompt), self.output


@cache
def _parameters(mean: float, cv: float, least: int, most: int) -> tuple[float, float]:
    """Sigma and median of the log-normal that has this mean and spread within its ends, by nested bisection."""
    low, high = 0.0, 6.0
    for _ in range(_HALVINGS):
        sigma = (low + high) / 2
        scale = _scale(mean, sigma, least, most)
        if _moments(sigma, scale, least, most)[1] < cv:
            low = sigma
        else:
            high = sigma
    return sigma, scale


def _scale(mean: float, sigma: float, least: int, most: int) -> float:
    # On a logarithmic scale: wide distributions have small medians.
    low, high = math.log(1e-3), math.log(most)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _moments(sigma, math.exp(middle), least, most)[0] < mean:
            low = middle
        else:
            high = middle
    return math.exp(middle)


_LEVELS = [NormalDist().inv_cdf((index + 0.5) / _QUANTILES) for index in range(_QUANTILES)]


def _moments(sigma: float, scale: float, least: int, most: int) -> tuple[float, float]:
    """Mean and coefficient of variation within the ends."""
    values = [min(most, max(least, scale * math.exp(sigma * level))) for level in _LEVELS]
    mean = math.fsum(values) / _QUANTILES
    variance = math.fsum((value - mean) ** 2 for value in values) / _QUANTILES
    return mean, math.sqrt(variance) / mean


def workload(lengths: Lengths, arrivals: str = "poisson") -> Synthetic:
    """Requests of these lengths."""
    return Synthetic((Stream(DEFAULT, lengths, parse_arrivals(arrivals)),))


def held(dataset: str, *, prompt: bool, output: bool) -> Synthetic:
    """A dataset's lengths at random, those that are `prompt` and `output` being all equal."""
    sides = [side for side, kept in (("prompts", prompt), ("outputs", output)) if kept]
    name = f"{dataset}, equal {' and '.join(sides)}" if sides else dataset
    return workload(Held(name, parse_lengths(dataset), prompt, output))
