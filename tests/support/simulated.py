"""A small simulated system and a workload for it."""

from __future__ import annotations

from skipjoin.observe.record import Record
from skipjoin.policies.cost import LinearCost
from skipjoin.sim.experiments.cell import Cell, Extent
from skipjoin.sim.experiments.system import System
from skipjoin.workload.workload import synthetic

COST = LinearCost(floor=0.01, prefill_token=1e-4, attention_pair=1e-8, decode=2e-4, context_token=1e-7)
SYSTEM = System(
    recipe="fastserve",
    model="some-model",
    hardware="some-gpu",
    cost=COST,
    kv_blocks=300,
    block_bytes=1000,
    max_model_len=2048,
    max_num_seqs=16,
)
WORKLOAD = synthetic("uniform:8-200,4-64", "poisson")
CELL = Cell(SYSTEM, WORKLOAD, Extent(8.0, 8.0, 3))


def repeatable(record: Record) -> Record:
    """Return the record without fields that were measured on this machine and differ between runs."""
    return {name: value for name, value in record.items() if name != "decision_ms"}
