from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from operator import mul
from typing import Any

from skipjoin.core.forecast import Forecast
from skipjoin.policies.hazards import BIN_EDGES, BIN_MIDDLES, BINS, Hazards, bin_of, hazards_of, merged

# Class of a forecast: the bin of its expected length. None: no forecast that tells requests apart.
ForecastClass = int | None
# Forecaster that knows no request, so that its forecasts do not tell requests apart.
_PRIOR = "prior"
# First guess of all lengths: half of them below 128 tokens and two thirds within a factor of 3.
_FIRST_MIDDLE, _FIRST_SPREAD = 128.0, 3.0
# First guess of the ratio of a length to its forecast: two thirds within a factor of 2.2.
_RATIO_SPREAD = 2.2
# Weight of the first guesses, in requests, and of all requests in the hazards of one class.
_FIRST_WEIGHT, _SHRINK_WEIGHT = 2.0, 8.0
# Share of the longest requests that is unknown before any was seen.
_MAX_RAREST = 0.05
# Half octaves of the ratio, with 1 in the middle.
_RATIOS = 41
# Factor by which earlier scores shrink with each note: the last few thousand decide which expert is believed.
_SKILL_KEPT = 0.9995
# Bounds of a scored probability, so that one surprise does not decide.
_MIN_CHANCE = 1e-3
# Weight of the latest forecast in the mean distribution of its class.
_MASS_RATE = 0.05

EXPERTS = ("all requests", "forecast class", "ratio to forecast", "forecast distribution")


def class_of(forecast: Forecast | None) -> ForecastClass:
    if forecast is None or forecast.source == _PRIOR:
        return None
    return bin_of(max(1.0, forecast.tokens))


def _guess(logs: Sequence[float], middle: float, spread: float) -> list[float]:
    return hazards_of([math.exp(-0.5 * ((log - math.log(middle)) / math.log(spread)) ** 2) for log in logs])


_FIRST_HAZARDS = _guess([math.log(length) for length in BIN_MIDDLES], _FIRST_MIDDLE, _FIRST_SPREAD)
_FIRST_RATIOS = _guess([(step - _RATIOS // 2) * math.log(2) / 2 for step in range(_RATIOS)], 1.0, _RATIO_SPREAD)


@cache
def _ratio_bin(cls: int, place: int) -> int:
    steps = round(2 * math.log2(BIN_MIDDLES[place] / BIN_MIDDLES[cls]))
    return min(_RATIOS - 1, max(0, _RATIOS // 2 + steps))


class LengthModel:
    """Hazards of output lengths, given a forecast's class.

    Four experts predict whether a request ends in the bin it is about to leave. The first knows all requests; the
    second the requests of its class, shrunk to the first; the third the ratios of lengths to forecasts; the fourth
    believes the forecasts' own distributions. Hazards are mixed with weights exp(skill), the decayed sum of
    log-likelihoods, so that worthless forecasts are ignored.
    """

    def __init__(self) -> None:
        self.notes = 0
        self.skill = [0.0] * len(EXPERTS)
        self._all = Hazards()
        self._ratios = Hazards(_RATIOS)
        self._classes: dict[int, Hazards] = {}
        self._mass: dict[int, list[float]] = {}
        self._tables: dict[ForecastClass, list[float]] = {}
        self._experts: dict[int, list[list[float]]] = {}

    def expect(self, forecast: Forecast | None) -> ForecastClass:
        """Return the class of a new request's forecast, and learn its distribution."""
        cls = class_of(forecast)
        if cls is not None and forecast is not None and forecast.mass:
            mass = merged(forecast.mass)
            before = self._mass.get(cls, mass)
            self._mass[cls] = [old + _MASS_RATE * (new - old) for old, new in zip(before, mass, strict=True)]
        return cls

    def note(self, cls: ForecastClass, place: int, *, ended: bool) -> None:
        if cls is not None:
            self.hazards(cls)  # the experts of the last refresh are scored
            for number, expert in enumerate(self._experts[cls]):
                chance = min(1 - _MIN_CHANCE, max(_MIN_CHANCE, expert[place]))
                self.skill[number] = self.skill[number] * _SKILL_KEPT + math.log(chance if ended else 1 - chance)
            self._ratios.note(_ratio_bin(cls, place), ended=ended)
            self._classes.setdefault(cls, Hazards()).note(place, ended=ended)
        self._all.note(place, ended=ended)
        self.notes += 1

    @property
    def rarest(self) -> float:
        """Share of requests below which lengths follow from the first guess instead of from the requests seen."""
        return min(_MAX_RAREST, (1 + _FIRST_WEIGHT) / (1 + _FIRST_WEIGHT + self._all.reached[0]))

    def refresh(self) -> None:
        self._tables.clear()
        self._experts.clear()

    def hazards(self, cls: ForecastClass) -> list[float]:
        if (found := self._tables.get(cls)) is not None:
            return found
        if cls is None:
            found = self._tables[None] = self._all.estimate(_FIRST_HAZARDS, _FIRST_WEIGHT)
            return found
        experts = self._experts[cls] = self._ask(cls)
        weights = self.weights()
        found = self._tables[cls] = [math.fsum(map(mul, weights, hazards)) for hazards in zip(*experts, strict=True)]
        return found

    def weights(self) -> list[float]:
        best = max(self.skill)
        shares = [math.exp(score - best) for score in self.skill]
        total = math.fsum(shares)
        return [share / total for share in shares]

    def believed(self, cls: ForecastClass) -> str:
        weights = self.weights()
        return EXPERTS[0] if cls is None else EXPERTS[weights.index(max(weights))]

    def _ask(self, cls: int) -> list[list[float]]:
        pool = self.hazards(None)
        own, mass = self._classes.get(cls), self._mass.get(cls)
        ratios = self._ratios.estimate(_FIRST_RATIOS, _FIRST_WEIGHT)
        of_class = pool if own is None else own.estimate(pool, _SHRINK_WEIGHT)
        return [
            pool,
            of_class,
            [ratios[_ratio_bin(cls, place)] for place in range(BINS)],
            of_class if mass is None else hazards_of(mass),
        ]

    # -- state that outlives an engine (`Learned`) --------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "edges": list(BIN_EDGES),
            "skill": list(self.skill),
            "all": [self._all.reached, self._all.ended],
            "ratios": [self._ratios.reached, self._ratios.ended],
            "classes": {str(cls): [class_.reached, class_.ended] for cls, class_ in self._classes.items()},
            "mass": {str(cls): mass for cls, mass in self._mass.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        try:
            if list(state["edges"]) != list(BIN_EDGES):
                raise ValueError("its bins differ")
            skill = _numbers(state["skill"], len(EXPERTS), low=-math.inf)
            every, ratios = _counts(state["all"], BINS), _counts(state["ratios"], _RATIOS)
            classes = {_class(cls): _counts(class_, BINS) for cls, class_ in state["classes"].items()}
            mass = {_class(cls): _numbers(counts, BINS, low=0.0) for cls, counts in state["mass"].items()}
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        self.skill, self._all, self._ratios, self._classes, self._mass = skill, every, ratios, classes, mass
        self.refresh()


def _class(text: str) -> int:
    cls = int(text)
    if not 0 <= cls < BINS:
        raise ValueError(f"class {cls} is not in [0, {BINS - 1}]")
    return cls


def _numbers(values: Sequence[float], count: int, *, low: float) -> list[float]:
    found = [float(value) for value in values]
    if len(found) != count or not all(math.isfinite(value) and value >= low for value in found):
        raise ValueError(f"{count} finite numbers were expected")
    return found


def _counts(pair: Sequence[Sequence[float]], bins: int) -> Hazards:
    reached, ended = (_numbers(values, bins, low=0.0) for values in pair)
    if any(one > other for one, other in zip(ended, reached, strict=True)):
        raise ValueError("more requests ended in a bin than left it")
    hazards = Hazards(bins)
    hazards.reached, hazards.ended = reached, ended
    return hazards
