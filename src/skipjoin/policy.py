"""Public names for schedulers of your own: what a recipe file or an installed recipe imports.

Example:
    >>> from skipjoin.policy import FixedKey, Settings, preemptive, recipe
    >>> @recipe
    ... def shortest_prompt(s: Settings):
    ...     return preemptive(s, lambda: FixedKey(lambda request: len(request.prompt)))
    >>> cost = LinearCost(floor=0.01, prefill_token=1e-4)
    >>> ordering = shortest_prompt(Settings(cost)).ordering
    >>> for number, length in enumerate((30, 10, 20)):
    ...     ordering.on_arrived(Request(number, 0.0, range(length), 5), 0.0)
    >>> [len(request.prompt) for request in ordering.ranked(0.0)]
    [10, 20, 30]
"""

from skipjoin.core.context import StepContext
from skipjoin.core.events import Preemption
from skipjoin.core.forecast import LENGTH_EDGES, Forecast, length_bin
from skipjoin.core.kv.interface import KVAccounts
from skipjoin.core.policy import (
    AdmissionPolicy,
    Allocation,
    BatchBuilder,
    Batcher,
    Callbacks,
    CostModel,
    Deferral,
    Eviction,
    EvictionPolicy,
    Fact,
    Ordering,
)
from skipjoin.core.policy_set import Policies
from skipjoin.core.refusals import Refusal, Scope
from skipjoin.core.request import Request, ServiceClass, Target
from skipjoin.core.step import Slice
from skipjoin.core.waits import WaitReason
from skipjoin.options import ConfigError, Option
from skipjoin.policies.admission import OnDemand
from skipjoin.policies.batching import Greedy
from skipjoin.policies.cost import LinearCost
from skipjoin.policies.eviction import Defer, Recompute, Swap
from skipjoin.policies.ordering import Fcfs, FixedKey, Prioritized
from skipjoin.policies.proactive_swap import ProactiveSwap
from skipjoin.policies.ranking import Ranking
from skipjoin.policies.valued import Valued
from skipjoin.recipes import Forecasts, Params, Settings, recipe
from skipjoin.recipes.parts import classed, preemptive

__all__ = [
    "LENGTH_EDGES",
    "AdmissionPolicy",
    "Allocation",
    "BatchBuilder",
    "Batcher",
    "Callbacks",
    "ConfigError",
    "CostModel",
    "Defer",
    "Deferral",
    "Eviction",
    "EvictionPolicy",
    "Fact",
    "Fcfs",
    "FixedKey",
    "Forecast",
    "Forecasts",
    "Greedy",
    "KVAccounts",
    "LinearCost",
    "OnDemand",
    "Option",
    "Ordering",
    "Params",
    "Policies",
    "Preemption",
    "Prioritized",
    "ProactiveSwap",
    "Ranking",
    "Recompute",
    "Refusal",
    "Request",
    "Scope",
    "ServiceClass",
    "Settings",
    "Slice",
    "StepContext",
    "Swap",
    "Target",
    "Valued",
    "WaitReason",
    "classed",
    "length_bin",
    "preemptive",
    "recipe",
]
