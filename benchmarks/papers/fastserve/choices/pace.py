"""FastServe with another share of time for promotions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from skipjoin.core.policy_set import Policies
from skipjoin.options import Option
from skipjoin.policies.mlfq import PROMOTION_SHARE
from skipjoin.recipes import Settings, recipe
from skipjoin.recipes.fastserve import QueueParams, queues


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceParams(QueueParams):
    """Parameters of feedback queues and the pace of their promotions."""

    share: Annotated[float, Option("Maximum share of the time for promoted requests.", above=0, high=1e9)] = (
        PROMOTION_SHARE
    )


@recipe
def paced(s: Settings, p: PaceParams) -> Policies:
    """FastServe with promotions for a share of the time."""
    return queues(s, p, skip_join=True, promotion_share=p.share)
