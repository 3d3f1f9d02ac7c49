from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Self

from skipjoin.core.policy import EvictionPolicy
from skipjoin.core.policy_set import Policies
from skipjoin.options import ConfigError, Option
from skipjoin.policies.eviction import DROP_SHARE, Swap
from skipjoin.policies.mlfq import PROMOTION_SHARE, LevelUse, Promotion, SkipJoinMlfq
from skipjoin.policies.proactive_swap import ProactiveSwap
from skipjoin.policies.starvation import WorstCase, max_requests, min_bound, starvation_after, starvation_within
from skipjoin.recipes.parts import EvictionChoice, eviction_of, preemptive
from skipjoin.recipes.registry import EngineLimits, Params, Settings, recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueParams(Params):
    starvation_s: Annotated[
        float | None,
        Option(
            "Seconds without running until a request is promoted (default: 100 x --slo if it is set, or else 1024 of "
            "the shortest step).",
            above=0,
            high=1e9,
        ),
    ] = None
    promotion: Annotated[
        str | None,
        Option(
            "Whether a promoted request is demoted from the first queue as others are, or returns to its former queue "
            "after a quantum of the first queue or of its own (default: own-quantum, or with starvation_bound_s "
            "one-quantum).",
            choices=tuple(how.value for how in Promotion),
        ),
    ] = None
    quantum_s: Annotated[
        float | None,
        Option("Seconds that the first queue grants a request (default: the shortest step).", above=0, high=1e6),
    ] = None
    hysteresis_s: Annotated[
        float | None,
        Option(
            "Estimated scheduled times that differ by less count as equal when KV is swapped, in seconds (default: 8 "
            "of the shortest step).",
            above=0,
            high=1e6,
        ),
    ] = None
    order: Annotated[
        str,
        Option(
            "Which request of a queue comes first: the one with the shortest prefill, for a lower mean latency of "
            "long prompts and a longer tail, or the one that joined it first",
            choices=("shortest-prefill", "arrival"),
        ),
    ] = "arrival"
    paced: Annotated[
        bool,
        Option(
            "Whether promotions, and recomputation caused by new requests, are limited to a small share of the time."
        ),
    ] = True
    starvation_bound_s: Annotated[
        float | None,
        Option(
            "No request goes longer without running, in seconds; excludes starvation_s and quantum_s, and "
            "disables paced (default: no bound).",
            above=0,
            high=1e9,
        ),
    ] = None
    eviction: EvictionChoice = "proactive"

    @property
    def promotes(self) -> Promotion:
        if self.promotion is not None:
            return Promotion(self.promotion)
        return Promotion.OWN_QUANTUM if self.starvation_bound_s is None else Promotion.ONE_QUANTUM

    def resolved(self, s: Settings, policies: Policies) -> Self:
        bound_s, alpha_s = self.starvation_bound_s, _threshold_s(s, self)
        if bound_s is None:
            return replace(self, starvation_s=alpha_s, promotion=self.promotes.value)
        if self.promotes is Promotion.OWN_QUANTUM:
            raise ConfigError(
                "promotion=own-quantum must not be set together with starvation_bound_s: a promoted request would "
                "delay others for too long; choose one-quantum or first-queue"
            )
        if self.starvation_s is not None:
            raise ConfigError("starvation_s must not be set together with starvation_bound_s, from which it follows")
        if s.fair_output_weight is not None:
            raise ConfigError(
                "starvation_bound_s must not be set together with fair_by, by which clients wait for others"
            )
        if self.quantum_s is not None:
            raise ConfigError(
                "quantum_s must not be set together with starvation_bound_s, which holds for the usual quanta"
            )
        if self.eviction == "defer":
            raise ConfigError(
                "starvation_bound_s must not be set together with eviction=defer, by which new requests wait for memory"
            )
        if s.limits is not None:
            alpha_s = _threshold_within(bound_s, _worst_case(s, s.limits, policies.eviction))
        return replace(self, starvation_s=alpha_s, promotion=self.promotes.value, paced=False)

    def notice(self, s: Settings) -> str:
        if self.starvation_bound_s is None or s.limits is None:
            return ""
        return (
            f"No request goes {self.starvation_bound_s:g} s without running: one that has not run for "
            f"{self.starvation_s:.4g} s is promoted, with at most {s.limits.requests} requests in the server"
        )


def _threshold_s(s: Settings, p: QueueParams) -> float:
    return starvation_after(s.cost, s.slo_s) if p.starvation_s is None else p.starvation_s


def _threshold_within(bound_s: float, most: WorstCase) -> float:
    if bound_s < (least := min_bound(most)):
        fits = max_requests(bound_s, most)
        hint = f"it would hold with {fits} of them" if fits else "a smaller max_model_len may help"
        raise ConfigError(
            f"starvation_bound_s must be at least {math.ceil(least * 10) / 10:.1f} s "
            f"with {most.requests} requests at once (max_num_queued_reqs, and more for batches unless batch_dir is "
            f"none), got {bound_s:g}; {hint}"
        )
    return starvation_within(bound_s, most)


def _worst_case(s: Settings, limits: EngineLimits, eviction: EvictionPolicy) -> WorstCase:
    if limits.requests is None:
        raise ConfigError(
            "starvation_bound_s needs max_live_requests, which a server has by its max_num_queued_reqs; "
            "simulate and generate have no such limit"
        )
    return WorstCase(
        s.cost,
        requests=limits.requests,
        max_len=limits.max_len,
        max_seqs=s.max_seqs,
        max_tokens=s.max_tokens,
        device_blocks=limits.device_blocks,
        cpu_blocks=limits.cpu_blocks if isinstance(eviction, Swap) else 0,
        block_size=limits.block_size,
        depth=limits.depth,
        moves_overlapped=isinstance(eviction, ProactiveSwap),
        stages=s.stages,
    )


def queues(s: Settings, p: QueueParams, *, skip_join: bool, promotion_share: float = PROMOTION_SHARE) -> Policies:
    use = LevelUse()

    def ordering() -> SkipJoinMlfq:
        return SkipJoinMlfq(
            s.cost,
            quantum_s=p.quantum_s,
            starvation_s=_threshold_s(s, p),
            hysteresis_s=p.hysteresis_s,
            promotion_share=promotion_share if p.paced else math.inf,
            promotion=p.promotes,
            shortest_prefill=p.order == "shortest-prefill",
            skip_join=skip_join,
            slots=s.max_seqs,
            use=use,
        )

    eviction = eviction_of(s, p.eviction, drop_share=DROP_SHARE if p.paced else math.inf)
    return replace(preemptive(s, ordering, eviction), measured=use)


@recipe
def fastserve(s: Settings, p: QueueParams) -> Policies:
    """FastServe: skip-join multi-level feedback queue with proactive swapping."""
    return queues(s, p, skip_join=True)
