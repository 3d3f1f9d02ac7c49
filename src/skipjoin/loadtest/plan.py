from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Annotated

from skipjoin.observe.record import NO_SLO, Slo
from skipjoin.options import ConfigError, Option, check
from skipjoin.workload.request import WorkloadRequest
from skipjoin.workload.workload import Workload

_GROUP = "Runs"
_runs = partial(Option, group=_GROUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """Measurement plan: every seed at every rate. Exactly one of `duration_s` and `limit` is set."""

    workload: Workload
    rates: tuple[float | None, ...]
    seeds: tuple[int, ...] = (0,)
    duration_s: float | None = None
    limit: int | None = None
    slo: Slo = NO_SLO
    warmup: Annotated[
        int,
        _runs("Number of sequential requests before the first run, which are not recorded.", low=0, metavar="REQUESTS"),
    ] = 4
    settle_s: Annotated[float, _runs("Time between runs.", low=0, high=1e6, flags=("--settle",))] = 1.0
    timeout_s: Annotated[
        float | None, _runs("Time after which a request is aborted (default: never).", above=0, flags=("--timeout",))
    ] = None
    label: Annotated[
        str | None,
        Option(
            "Recipe of the record (default: the recipe that a skipjoin server reports).",
            metavar="NAME",
            group="Results",
        ),
    ] = None
    hardware: Annotated[
        str, Option("Hardware of the record.", flags=("--hardware-label",), metavar="NAME", group="Results")
    ] = "unknown"

    def __post_init__(self) -> None:
        check(self)

    def runs(self) -> list[tuple[float | None, int]]:
        return list(product(self.rates, self.seeds))

    def draw(self, rate: float | None, seed: int) -> list[WorkloadRequest]:
        jobs = self.workload.draw(rate, self.duration_s, seed, self.limit)
        if not jobs and not self.workload.closed:
            raise ConfigError(f"no request arrives in {self.duration_s} s at {rate} per second; measure for longer")
        return jobs
