from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from skipjoin.cli.class_table import number_text
from skipjoin.observe.record import Record
from skipjoin.report.basis import basis_text
from skipjoin.report.bottleneck import NOTHING, limit_of

# Recipe, rate (0 if the workload has its own times), number of replicas, and the records of all seeds.
Groups = Iterable[tuple[tuple[str, float, int], Sequence[Record]]]


def bottlenecks(groups: Groups) -> Iterator[str]:
    """Yield a line per rate and size that names what requests of each recipe wait for."""
    points: dict[tuple[float, int], dict[str, tuple[str, float]]] = defaultdict(dict)
    for (recipe, rate, replicas), records in groups:
        if (found := limit_of(records)) is not None:
            points[rate, replicas][recipe] = found
    for (rate, replicas), recipes in sorted(points.items()):
        at = f" at {number_text(rate)} req/s" if rate else ""
        at += f" on {replicas} replicas" if replicas > 1 else ""
        limits = {limit for limit, _ in recipes.values()}
        if limits <= {NOTHING, "compute"}:
            more = "; compute is the bottleneck" if "compute" in limits else ""
            yield f" nothing waits{at}, so recipes cannot differ here{more}"
            continue
        shown = ", ".join(f"{recipe} {limit} ({share:.0%})" for recipe, (limit, share) in recipes.items())
        yield f" bottleneck{at}, with the share of latency that is waiting: {shown}"


def bases(records: Iterable[Record]) -> Iterator[str]:
    for basis in dict.fromkeys(map(basis_text, records)):
        yield f" {basis}"
