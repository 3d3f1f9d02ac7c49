from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from skipjoin.config import ConfigError, unknown
from skipjoin.workload.fields import number

FORMS = ("poisson", "gamma", "burst", "constant")


class Arrivals(Protocol):
    """Arrival process with mean rate 1. Dividing its times by a rate gives the same process at that rate."""

    @property
    def name(self) -> str:  # accepted by `parse_arrivals`
        ...

    def times(self, random: random.Random) -> Iterator[float]:
        """Yield non-decreasing arrival times, indefinitely. The first one comes one gap after 0."""


@dataclass(frozen=True)
class Constant:
    name: str

    def times(self, random: random.Random) -> Iterator[float]:
        return map(float, count(1))


@dataclass(frozen=True)
class Poisson:
    name: str

    def times(self, random: random.Random) -> Iterator[float]:
        now = 0.0
        while True:
            now += random.expovariate(1.0)
            yield now


@dataclass(frozen=True)
class Gamma:
    """Gamma-distributed gaps."""

    name: str
    cv: float  # coefficient of variation; 1 for Poisson

    def times(self, random: random.Random) -> Iterator[float]:
        shape = self.cv**-2
        now = 0.0
        while True:
            # A gap has mean shape * scale = 1 and variance shape * scale**2 = cv**2.
            now += random.gammavariate(shape, 1 / shape)
            yield now


@dataclass(frozen=True)
class Burst:
    """Poisson arrivals whose rate alternates between two levels, in bursts of `length` mean gaps."""

    name: str
    factor: float
    share: float
    length: float

    def times(self, random: random.Random) -> Iterator[float]:
        quiet_rate = 1 / (1 - self.share + self.share * self.factor)
        rates = (quiet_rate, quiet_rate * self.factor)
        mean_quiet = self.length * (1 - self.share) / self.share
        # Start in the stationary state, so that the mean rate is 1 from the start: inside a burst with probability
        # `share`, at a uniformly random point of it.
        in_burst = random.random() < self.share
        end = self.length * random.random() if in_burst else mean_quiet * random.expovariate(1.0)
        now = 0.0
        while True:
            # Unit-rate gap to the next arrival, consumed at the rate of each period.
            left = random.expovariate(1.0)
            while now + left / rates[in_burst] > end:
                # A negative rounding error would place the next arrival before `now`.
                left = max(0.0, left - (end - now) * rates[in_burst])
                now = end
                in_burst = not in_burst
                end = now + (self.length if in_burst else mean_quiet * random.expovariate(1.0))
            now += left / rates[in_burst]
            yield now


def parse_arrivals(text: str) -> Arrivals:
    name = text.strip()
    form, colon, rest = name.partition(":")
    if form in ("poisson", "constant"):
        if colon:
            raise ConfigError(f"arrivals: {form} takes no numbers, got {name!r}")
        return Poisson(name) if form == "poisson" else Constant(name)
    if form == "gamma":
        # Below the range, the distribution's shape overflows; above it, nearly all gaps round to zero.
        return Gamma(name, number("arrivals: the CV of gamma", rest, above=1e-6, most=100))
    if form != "burst":
        raise unknown("arrivals", name, sorted(FORMS))
    parts = rest.split(",")
    if len(parts) != 3:
        raise ConfigError(f"arrivals: burst takes FACTOR,SHARE,LENGTH, as in burst:5,0.1,20, got {name!r}")
    factor = number("arrivals: the FACTOR of burst", parts[0], most=1e6)
    share = number("arrivals: the SHARE of burst", parts[1], most=1)
    # Shorter bursts approach Poisson arrivals and are slow to generate.
    length = number("arrivals: the LENGTH of burst", parts[2], above=0.01, most=1e9)
    if factor < 1 or share == 1:
        raise ConfigError(f"arrivals: burst needs a FACTOR of at least 1 and a SHARE below 1, got {name!r}")
    return Burst(name, factor, share, length)
