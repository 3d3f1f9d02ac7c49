from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from skipjoin.config import ConfigError
from skipjoin.core.request import RequestOptions, ServiceClass
from skipjoin.options import Value
from skipjoin.policies.cost import LinearCost
from skipjoin.replay.outcome import Outcome
from skipjoin.sim.experiments.cell import Cell, Extent
from skipjoin.sim.experiments.simulation import run
from skipjoin.sim.experiments.system import System
from skipjoin.workload.traces import Trace, TraceRow
from skipjoin.workload.workload import Replay


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
    """Return the times of a simulated run, with `around_s` added, the time of each request outside the engine.

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
