from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from skipjoin.core.policy_set import Policies
from skipjoin.core.request import Request
from skipjoin.options import ConfigError, Option
from skipjoin.policies.batching import TargetForward
from skipjoin.policies.econo import ByObjective, PaddedLengths, QueueOrder, Tasks, TwoQueues
from skipjoin.policies.eviction import Vacate
from skipjoin.policies.exact_reservations import ExactReservations, GroupGate
from skipjoin.policies.execution import ExecutionTime
from skipjoin.policies.mlfq import shortest_step
from skipjoin.policies.needs import NeedIndex, Needs
from skipjoin.policies.nesting import ParentRequests
from skipjoin.policies.parking import Park
from skipjoin.recipes.parts import ForwardTokens, LengthRange, Padding, classed, staged
from skipjoin.recipes.registry import Forecasts, Params, Settings, recipe

# About 0.5 and 2 s on the machine of the evaluation.
_TIME_RANGES_STEPS = (20, 80)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationParams(Params):
    """Reservation sizes and the share for prompts (EconoServe sections 2.3, 3.3 and 4)."""

    # The paper pads by 0.1 to 0.2. With imperfect forecasts, three quarters of the forecast serve better; see
    # docs/econoserve.md.
    padding: Padding = -0.25
    reserve: Annotated[
        float,
        Option(
            "Share of the KV pool kept for prompts and for requests that outgrow their reservations.", low=0, high=0.9
        ),
    ] = 0.03
    forward_tokens: ForwardTokens = None
    overdue_s: Annotated[
        float,
        Option(
            "Age in seconds from which a request may precede all others, oldest first, within `overdue_share`.",
            above=0,
            high=1e9,
        ),
    ] = 600.0
    overdue_share: Annotated[
        float,
        Option(
            "Share of the reserved KV for requests older than `overdue_s`. More, with a smaller `overdue_s`, serves "
            "long prompts earlier and makes more requests miss their objectives.",
            above=0,
            high=1,
        ),
    ] = 0.02
    prompt_share: Annotated[
        float,
        Option(
            "KV collected for prompts that do not fit, as a share of what other requests reserve. The one that has "
            "waited longest for its size and output comes first. More serves long prompts earlier and makes more "
            "requests miss their objectives.",
            low=0,
            high=1,
        ),
    ] = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupParams(ReservationParams):
    length_range: LengthRange = 32
    admission: Annotated[
        str,
        Option(
            "When waiting decodes are admitted: whenever KV suffices or, gated as in the paper, by groups until KV is "
            "full and again once a group completes",
            choices=("continuous", "gated"),
        ),
    ] = "continuous"


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderParams(GroupParams):
    """Parameters of the queue order (EconoServe section 3.4) and of nested reservations (section 3.2)."""

    time_ranges_s: Annotated[
        str | None,
        Option(
            "Ascending borders of the ranges of slack to the objective, in seconds, separated by commas (default: 20 "
            "and 80 of the shortest step)."
        ),
    ] = None
    kv_range: Annotated[int, Option("Width of the ranges of held KV, in tokens.", low=1, high=1 << 20)] = 128
    order: Annotated[
        str, Option("Which lengths come first within the same ranges", choices=("shortest", "longest"))
    ] = "shortest"
    sharing: Annotated[
        bool, Option("Whether requests use the KV that others have reserved and not yet filled (nested reservations).")
    ] = True
    buffer: Annotated[
        float,
        Option("Share of its steps by which a hosted request may finish late, with sharing.", low=0, high=10),
    ] = 0.15

    parking: Annotated[
        bool,
        Option(
            "Whether outputs that wait for KV are swapped out to CPU memory when a prompt needs their part of the "
            "reserve. Otherwise prompts larger than the reserve wait as long as outputs, and up to 4 % more requests "
            "meet their objectives."
        ),
    ] = True

    def __post_init__(self) -> None:
        # super() does not work with slots=True, which replaces the class.
        ReservationParams.__post_init__(self)
        self.borders(1.0)

    def borders(self, step_s: float) -> tuple[float, ...]:
        if self.time_ranges_s is None:
            return tuple(steps * step_s for steps in _TIME_RANGES_STEPS)
        try:
            found = tuple(float(part) for part in self.time_ranges_s.split(","))
        except ValueError:
            raise ConfigError(f"time_ranges_s must be numbers and commas, got {self.time_ranges_s!r}") from None
        borders = (0.0, *found)
        if not all(border < other < 1e9 for border, other in zip(borders, found, strict=False)):
            raise ConfigError(f"time_ranges_s must rise from above 0 to below 1e9 seconds, got {self.time_ranges_s!r}")
        return found


def decoupled(
    s: Settings,
    p: ReservationParams,
    lengths: PaddedLengths,
    order: QueueOrder,
    *,
    groups: bool,
    parents: ParentRequests | None = None,
    gated: bool = False,
    parks: bool = False,
    index: Callable[[Needs], NeedIndex] = NeedIndex,
) -> Policies:
    """Return policies with separate queues for prompts and decodes and with exact reservations.

    With `groups`, decodes that are equal in `order` start together. With `parks`, those that wait are swapped out for
    prompts. `index` offers prompts by their needs.
    """

    def group(request: Request, now: float) -> tuple[object, ...]:
        return (request.progress.band, tasks.group(request, now))

    tasks = Tasks(order, parks=parks)
    batcher = TargetForward(s.max_seqs, s.max_tokens, s.cost, target=p.forward_tokens)
    reservations = ExactReservations(
        lengths,
        group=group if groups else None,
        reserve=p.reserve,
        parents=parents,
        collected=p.prompt_share,
        gate=GroupGate() if gated else None,
        overdue=tasks.overdue,
        parks=parks,
    )
    return classed(
        s,
        lambda: TwoQueues(
            tasks, index(reservations.needs), lengths, overdue_s=p.overdue_s, overdue_share=p.overdue_share
        ),
        staged(s, batcher, batcher.target, cuts=True),
        reservations,
        Park(s.cost, reservations) if parks else Vacate(s.cost),
    )


@recipe(forecasts=Forecasts.LEARNED)
def econoserve(s: Settings, p: OrderParams) -> Policies:
    """EconoServe: prompts fill the compute, decodes the KV, by exact reservations that share their unused blocks."""
    return by_objectives(s, p)


def by_objectives(s: Settings, p: OrderParams, index: Callable[[Needs], NeedIndex] = NeedIndex) -> Policies:
    lengths = PaddedLengths(p.padding)
    order = ByObjective(
        ExecutionTime(s.cost),
        lengths,
        time_ranges_s=p.borders(shortest_step(s.cost)),
        kv_range=p.kv_range,
        length_range=p.length_range,
        longest_first=p.order == "longest",
    )
    parents = ParentRequests(p.buffer) if p.sharing else None
    return decoupled(
        s,
        p,
        lengths,
        order,
        groups=True,
        parents=parents,
        gated=p.admission == "gated",
        parks=p.parking,
        index=index,
    )
