from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import quantiles
from typing import Any, NamedTuple

from skipjoin.config import ConfigError
from skipjoin.core.request import RequestOptions, ServiceClass
from skipjoin.options import Value
from skipjoin.policies.cost import LinearCost
from skipjoin.sim.experiments.cell import Cell, Extent
from skipjoin.sim.experiments.simulation import run
from skipjoin.sim.experiments.system import System
from skipjoin.workload.traces import Trace, TraceRow
from skipjoin.workload.workload import Replay

# Figures that are compared, in the order of a table.
FIGURES = ("ttft_s.p50", "ttft_s.p95", "ttft_s.mean", "jct_s.p50", "jct_s.p95", "jct_s.mean")
_CURVE_POINTS = 100


class Outcome(NamedTuple):
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


def trace_of(arrivals: Sequence[Mapping[str, Any]]) -> Trace:
    rows = (
        TraceRow(
            arrival["at"],
            arrival["prompt_tokens"],
            arrival["output_tokens"],
            options=RequestOptions(service=ServiceClass(arrival["service"])),
        )
        for arrival in arrivals
    )
    return Trace("the server's arrivals", tuple(rows))


def system_of(
    machine: Mapping[str, Any], recipe: str, limits: Mapping[str, int], params: Mapping[str, Value]
) -> System:
    cost = LinearCost(**machine["cost"])
    parts: dict[str, Any] = {
        "kv_blocks": machine["device_blocks"],
        **{name: machine[name] for name in ("max_num_seqs", "max_num_batched_tokens") if machine[name] is not None},
        **limits,
    }
    return System(
        recipe=recipe,
        recipe_params=params,
        model=machine["model"],
        hardware=machine["device"],
        cost=replace(cost, floor=cost.floor + machine["between_steps_s"]),
        block_bytes=machine["block_bytes"],
        cpu_block_bytes=machine["cpu_block_bytes"],
        cpu_blocks=machine["cpu_blocks"],
        swap_dtype=machine["swap_dtype"],
        block_size=machine["block_size"],
        max_model_len=machine["max_model_len"],
        replicas=machine["replicas"],
        dispatch="prefix-aware",
        **parts,
    )


def simulated(
    system: System,
    trace: Trace,
    name: str,
    around_s: Sequence[float],
    on_share: Callable[[float], None] = lambda share: None,
) -> Outcome:
    """Return the times of a simulated run, with `around_s`, the time of each request outside the engine.

    Raises:
        ConfigError: No request fits.
    """
    found: list[Mapping[str, Any]] = []
    run(Cell(system, Replay(trace), Extent(None, None, 0)), on_share=on_share, on_requests=found.extend)
    found.sort(key=lambda item: item["due_s"])  # as in the trace
    done = [(item, around) for item, around in zip(found, around_s, strict=True) if item["error"] is None]
    if not done:
        raise ConfigError(f"{name}: no request fits, as the KV pool has {system.kv_blocks} blocks")
    return Outcome(
        name,
        [item["first_token_s"] - item["due_s"] + around for item, around in done],
        [item["ended_s"] - item["due_s"] + around for item, around in done],
        sum(item["preemptions"] for item, _ in done),
    )
