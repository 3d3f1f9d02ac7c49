"""A profile of step costs for tests."""

from __future__ import annotations

from skipjoin.config.profile import FitErrors, Profile, ProfileKey, Sample, Transfer
from skipjoin.policies.cost import LinearCost

KEY = ProfileKey("a/model", "0123", "cpu", "Some CPU", 2, "float32", "auto", "auto", "torch", "torch", 1, 1, "0.1.0")
PROFILE = Profile(
    key=KEY,
    cost=LinearCost(1e-3, 2e-5, 3e-8, 4e-5, 5e-7, 6e-6, 7e-5),
    transfer_out=Transfer(7e-5, 6e-6),
    unrest=1.05,
    host_s=2e-4,
    transfer_in=Transfer(5e-5, 4e-6),
    block_size=16,
    kv_bytes_per_block=65536,
    cpu_bytes_per_block=65536,
    weight_bytes=3_000_000,
    state_bytes=0,
    vocab_size=500,
    max_positions=1024,
    stage_shares=(1.0,),
    errors=FitErrors(0.04, 0.12, 1, 1),
    samples=(Sample(0, 0, 1, 1, 1.1e-3, 7, False), Sample(64, 2080, 0, 0, 2.3e-3, 5, True)),
    machine={"cpu": "Some CPU", "cores": "2"},
    date="2030-01-02T03:04:05+00:00",
)
