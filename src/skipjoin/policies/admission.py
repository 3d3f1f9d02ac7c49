"""Admission policies: how much KV a request may have."""

from __future__ import annotations

from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.policy import Grant, Wait
from skipjoin.core.request import Request


class OnDemand:
    """Space for the tokens that are known; the rest block by block as the request grows.

    watermark: the share of the device's blocks that an admission must leave available, so that running
    requests can grow for a while before one of them is evicted. It applies to admission only.
    """

    rests = True

    def __init__(self, watermark: float = 0.01) -> None:
        if not 0 <= watermark < 1:
            raise ValueError(f"watermark must be in [0, 1), got {watermark}")
        self.watermark = watermark

    def claim(self, request: Request, target: int, kv: KVAccounts) -> Grant:
        known = kv.blocks_for(request.known)
        # Never more than the pool has: a request nearly as large as it gets in on an empty device, or by evicting all.
        spare = max(0, min(int(self.watermark * kv.device_total), kv.device_total - known))
        return Grant(now=known, blocks=known, spare=spare)


class WholeMaximum:
    """Space for the prompt and max_tokens, once and for all (Orca): an admitted request never runs short."""

    rests = True

    def claim(self, request: Request, target: int, kv: KVAccounts) -> Grant | Wait:
        blocks = kv.blocks_for(request.max_total_tokens)
        return Grant(now=blocks, blocks=blocks) if blocks <= kv.available else Wait.WAIT
