from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skipjoin.config import ConfigError
from skipjoin.observe.record import NO_SLO, Slo
from skipjoin.sim.experiments.predictors import Predictor, parse_predictor
from skipjoin.sim.experiments.system import System
from skipjoin.workload.request import WorkloadRequest
from skipjoin.workload.streams import ClosedMode
from skipjoin.workload.workload import Workload

# Maximum number of replicas per shard. Shards are simulated independently.
REPLICAS_PER_SHARD = 64


@dataclass(frozen=True, slots=True)
class Extent:
    rate_rps: float | None
    duration_s: float | None
    seed: int
    limit: int | None = None
    until_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Cell:
    """One run: a system, a workload and its extent.

    With `slo.jct_scale`, policies see the objective of the predicted length. The record uses that of the true length.
    """

    system: System
    workload: Workload
    extent: Extent
    slo: Slo = NO_SLO
    slo_scale: float | None = None

    def jobs(self) -> list[WorkloadRequest]:
        extent = self.extent
        if self.shards > 1 and any(stream.mode is ClosedMode.BATCH for stream in self.workload.closed):
            raise ConfigError(
                f"closed: mode=batch needs one shard, at most {REPLICAS_PER_SHARD} replicas, got {self.shards} shards: "
                "use mode=refill"
            )
        jobs = self.workload.draw(extent.rate_rps, extent.duration_s, extent.seed, extent.limit)
        if self.shards > 1 and any(job.pause_s is not None for job in jobs):
            raise ConfigError(
                "calls that follow others of their program need one shard, at most "
                f"{REPLICAS_PER_SHARD} replicas, got {self.shards} shards"
            )
        for job in jobs:
            self.system.check_parts(job)
        return jobs

    @property
    def window_s(self) -> float | None:
        duration_s = self.extent.duration_s
        return None if duration_s is None else min(duration_s, self.extent.until_s)

    @property
    def shards(self) -> int:
        system = self.system
        shards = -(-system.replicas // REPLICAS_PER_SHARD)
        return min(shards, system.prefill_replicas, system.decode_replicas) if system.prefill_replicas else shards

    def check(self) -> None:
        jobs = self.jobs()
        if not jobs and not self.workload.closed:
            raise ConfigError(
                f"no request arrives within {self.extent.duration_s} s at {self.extent.rate_rps} requests per second"
            )
        self.predictor(jobs)

    def slo_for(self, jobs: Sequence[WorkloadRequest]) -> Slo:
        if self.slo_scale is None:
            return self.slo
        prefill_s, decode_s = self.system.light_load(jobs)
        return Slo(ttft_s=self.slo_scale * prefill_s, tpot_s=self.slo_scale * decode_s)

    def jct_for(self, jobs: Sequence[WorkloadRequest]) -> Callable[[float], float] | None:
        scale = self.slo.jct_scale
        return None if scale is None else self.system.scaled_jct(jobs, scale)

    def predictor(self, jobs: Sequence[WorkloadRequest]) -> Predictor | None:
        name = self.system.predictor_for(self.workload)
        return None if name is None else parse_predictor(name).make(self.workload, jobs, self.extent.seed)
