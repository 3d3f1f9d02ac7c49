from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import quantiles
from typing import Any, NamedTuple

# Figures that are compared, in the order of a table.
FIGURES = ("ttft_s.p50", "ttft_s.p95", "ttft_s.mean", "jct_s.p50", "jct_s.p95", "jct_s.mean")
_CURVE_POINTS = 100


class Outcome(NamedTuple):
    """Times of all requests. `preemptions` is None if they were not counted."""

    name: str
    ttft_s: list[float]
    jct_s: list[float]
    preemptions: int | None = None

    def figures(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for field in ("ttft_s", "jct_s"):
            values = getattr(self, field)
            cuts = _cuts(values, 20)
            found |= {f"{field}.p50": cuts[9], f"{field}.p95": cuts[18], f"{field}.mean": sum(values) / len(values)}
        return found

    def curve(self) -> list[float]:
        return _cuts(self.ttft_s, _CURVE_POINTS)


def measured(arrivals: Sequence[Mapping[str, Any]], recipe: str) -> Outcome:
    ttft = [arrival["ttft_s"] for arrival in arrivals if arrival["ttft_s"] is not None]
    return Outcome(f"{recipe}, measured", ttft, [arrival["jct_s"] for arrival in arrivals])


def errors(real: Outcome, simulated: Outcome) -> dict[str, float]:
    of_real, of_simulated = real.figures(), simulated.figures()
    return {name: of_simulated[name] / of_real[name] - 1 for name in FIGURES if of_real[name] > 0}


def _cuts(values: Sequence[float], count: int) -> list[float]:
    return quantiles(values, n=count, method="inclusive") if len(values) > 1 else [*values] * (count - 1)
