from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from operator import attrgetter
from typing import Any

from skipjoin.core.request import ServiceClass
from skipjoin.observe.programs import ProgramFacts
from skipjoin.observe.requests import Kind, RequestFacts
from skipjoin.observe.residency import PrefixUse
from skipjoin.observe.usage import EngineUsage

Record = dict[str, Any]
# Significant digits in a record; measurements are not more precise.
_DIGITS = 6
_SERVICE = attrgetter("service.value")
# A step reaches the target forward size from this share on.
_NEAR_TARGET = 0.9


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency objectives of real-time requests in seconds. A request's own target wins."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    jct_s: float | None = None
    jct_scale: float | None = None  # multiple of an output's time at light load, as JCT target (EconoServe section 4)


NO_SLO = Slo()


def summarize(
    facts: Sequence[RequestFacts],
    *,
    now: float,
    rejected: Iterable[Kind] = (),
    errors: Iterable[Kind] = (),
    slo: Slo = NO_SLO,
    window_s: float | None = None,
) -> Record:
    """Return the record of all requests, by stream if there are several, and by service class if some are best-effort.

    Unfinished requests count with their age at `now`, the end of the observation.
    """
    whole = _Part(list(facts), Counter(rejected), Counter(errors))
    record = _figures(whole, now, slo, window_s)
    record["quantiles"] = {name: _quantiles(_values(facts, now, read)) for name, read in _DISTRIBUTIONS.items()}
    if len(streams := whole.by(attrgetter("stream"))) > 1:
        record["classes"] = {
            name: {"service": "+".join(sorted(part.by(_SERVICE))), **_figures(part, now, slo, window_s)}
            for name, part in sorted(streams.items())
        }
    if ServiceClass.BEST_EFFORT in (services := whole.by(_SERVICE)):
        record["services"] = {name: _figures(part, now, slo, window_s) for name, part in sorted(services.items())}
    return record


@dataclass(slots=True)
class _Part:
    facts: list[RequestFacts] = field(default_factory=list)
    rejected: Counter[Kind] = field(default_factory=Counter)
    errors: Counter[Kind] = field(default_factory=Counter)

    def by(self, key: Callable[[Kind], str]) -> dict[str, _Part]:
        parts: defaultdict[str, _Part] = defaultdict(_Part)
        for fact in self.facts:
            parts[key(fact.kind)].facts.append(fact)
        for kind, count in self.rejected.items():
            parts[key(kind)].rejected[kind] = count
        for kind, count in self.errors.items():
            parts[key(kind)].errors[kind] = count
        return parts


def _figures(part: _Part, now: float, slo: Slo, window_s: float | None) -> Record:
    facts = part.facts
    complete = sum(fact.is_complete for fact in facts)
    tokens = sum(fact.output_tokens for fact in facts)
    return {
        "requests": _counts(part),
        "duration_s": rounded(now),
        "throughput_rps": rounded(complete / now if now > 0 else 0.0),
        "throughput_tps": rounded(tokens / now if now > 0 else 0.0),
        "window": _window(facts, window_s),
        **{name: _distribution(_values(facts, now, read)) for name, read in _DISTRIBUTIONS.items()},
        "slo": _attained(part.by(_SERVICE).get(ServiceClass.REAL_TIME, _Part()), now, slo),
        "breakdown_s": _breakdown(facts, now),
        "wait_s": _waits(facts),
    }


def _window(facts: Sequence[RequestFacts], window_s: float | None) -> Record | None:
    if not window_s:
        return None
    complete = [fact for fact in facts if fact.is_complete and fact.ended is not None and fact.ended <= window_s]
    return {
        "duration_s": rounded(window_s),
        "finished": len(complete),
        "throughput_rps": rounded(len(complete) / window_s),
        "throughput_tps": rounded(sum(request.output_tokens for request in complete) / window_s),
    }


def add_usage(record: Record, usages: Sequence[EngineUsage], *, target_tokens: int | None = None) -> None:
    steps = sum(usage.steps for usage in usages)
    record["kv"] = _together([usage.kv() for usage in usages])
    if prefix := _prefix([usage.residency.prefixes for usage in usages]):
        record["prefix"] = prefix
    record["steps"] = steps
    record["batch_mean"] = rounded(sum(usage.slices for usage in usages) / max(1, steps))
    record["forward"] = _forward(sum((usage.forwards for usage in usages), Counter()), target_tokens)
    record["groups"] = _groups(sum((usage.reservations.groups() for usage in usages), Counter()))
    record["series"] = {name: [rounded(value) for value in values] for name, values in usages[0].series().items()}


def summarize_programs(programs: Sequence[ProgramFacts]) -> Record:
    ended = [program for program in programs if not program.live]
    calls = sum(program.calls for program in ended)
    return {
        "programs": len(programs),
        "ended": len(ended),
        "calls": calls,
        "completion_s": _distribution(sorted(program.completion_s for program in ended)),
        "call_s": rounded(sum(program.calls_s for program in ended) / max(1, calls)),
        "recomputed_tokens": sum(program.recomputed for program in programs),
    }


def _prefix(uses: Sequence[PrefixUse]) -> Record | None:
    total = PrefixUse(*map(sum, zip(*map(astuple, uses), strict=True)))
    if not total.queried:
        return None
    return {
        "queried_tokens": total.queried,
        "hit_tokens": total.hit,
        "hit_rate": rounded(total.hit / total.queried),
        "hit_on_cpu_tokens": total.hit_on_cpu,
        "regained_tokens": total.regained,
        "saved_bytes": total.saved_bytes,
    }


def preempted(record: Record) -> int:
    return sum(record["kv"]["preemptions"].values())


def _forward(steps: Counter[int], target: int | None) -> Record:
    total = max(1, steps.total())
    near = None if target is None else sum(count for tokens, count in steps.items() if tokens >= _NEAR_TARGET * target)
    return {
        "target": target,
        "mean": rounded(sum(tokens * count for tokens, count in steps.items()) / total),
        "at_target": None if near is None else rounded(near / total),
    }


def _groups(sizes: Counter[int]) -> Record:
    if not sizes:
        return {"mean_size": None, "max_size": None}
    mean = sum(size * count for size, count in sizes.items()) / sizes.total()
    return {"mean_size": rounded(mean), "max_size": max(sizes)}


def _together(parts: Sequence[Record]) -> Record:
    """Merge records of equal fields: average fields ending in `_mean`, sum others, recurse into objects."""
    return {name: _one_of(name, [part[name] for part in parts]) for name in parts[0]}


def _one_of(name: str, values: Sequence[Any]) -> Any:
    if isinstance(values[0], dict):
        return _together(values)
    return rounded(sum(values) / len(values) if name.endswith("_mean") else sum(values))


# -- the parts --------------------------------------------------------------------------------------------

_Read = Callable[[RequestFacts, float], float | None]
_DISTRIBUTIONS: Mapping[str, _Read] = {
    "normalized_latency_s": RequestFacts.normalized_latency,
    "ttft_s": RequestFacts.ttft,
    "tpot_s": RequestFacts.tpot,
    "jct_s": RequestFacts.jct,
    "queue_s": RequestFacts.queue,
}


def _counts(part: _Part) -> dict[str, int]:
    facts, rejected, errors = part.facts, part.rejected.total(), part.errors.total()
    complete = sum(fact.is_complete for fact in facts)
    return {
        "submitted": len(facts) + rejected + errors,
        "finished": complete,
        "unfinished": len(facts) - complete,
        "rejected": rejected,
        "errors": errors,
    }


def _values(facts: Sequence[RequestFacts], now: float, read: _Read) -> list[float]:
    values = (read(fact, now) for fact in facts)
    return sorted(value for value in values if value is not None)


def _distribution(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return dict.fromkeys(("mean", "p50", "p95", "p99"))
    return {
        "mean": rounded(sum(values) / len(values)),
        "p50": rounded(percentile(values, 50)),
        "p95": rounded(percentile(values, 95)),
        "p99": rounded(percentile(values, 99)),
    }


def _quantiles(values: Sequence[float]) -> list[float]:
    return [rounded(percentile(values, percent)) for percent in range(101)] if values else []


def percentile(values: Sequence[float], percent: float) -> float:
    place = (len(values) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


def _attained(part: _Part, now: float, slo: Slo) -> Record:
    """Return the share of real-time requests that met each objective, and the rate of those that met all.

    Rejected and failed requests count. A request without an objective meets it.
    """
    facts = part.facts
    total = len(facts) + part.rejected.total() + part.errors.total()

    def share(met: int) -> float | None:
        return rounded(met / total) if total else None

    def met(fact: RequestFacts, name: str) -> bool:
        own_s, usual_s = getattr(fact.target, f"{name}_s"), wanted[f"{name}_s"]
        bound_s = own_s if own_s < math.inf or usual_s is None else usual_s
        if bound_s == math.inf:
            return True
        value_s = fact.ttft(now) if name == "ttft" else fact.jct(now) if name == "jct" else fact.tpot(now) or 0.0
        return (fact.first_token is not None if name == "ttft" else fact.is_complete) and value_s <= bound_s

    names = ("ttft", "tpot", "jct")
    brought = {name for fact in facts for name, bound_s in fact.target._asdict().items() if bound_s < math.inf}
    is_judged = slo != NO_SLO or bool(brought)
    wanted = {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s, "jct_s": slo.jct_s, "jct_scale": slo.jct_scale}
    record: Record = dict(wanted)
    for name in names:
        is_set = f"{name}_s" in brought or any(
            value is not None for objective, value in wanted.items() if objective.startswith(name)
        )
        record[f"{name}_attained"] = share(sum(met(fact, name) for fact in facts)) if is_set else None
    together = sum(all(met(fact, name) for name in names) for fact in facts)
    record["all_attained"] = share(together) if is_judged else None
    record["goodput_rps"] = rounded(together / now) if total and is_judged and now > 0 else None
    return record


def _breakdown(facts: Sequence[RequestFacts], now: float) -> dict[str, float]:
    count = max(1, len(facts))
    return {
        "queueing": rounded(sum(fact.waiting(now) for fact in facts) / count),
        "execution": rounded(sum(fact.execution_s for fact in facts) / count),
        "swapping": rounded(sum(fact.swapping_s for fact in facts) / count),
        "scheduling": rounded(sum(fact.scheduling_s for fact in facts) / count),
    }


def _waits(facts: Sequence[RequestFacts]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for fact in facts:
        total.update({reason.value: seconds for reason, seconds in fact.wait_s().items() if seconds})
    return {reason: rounded(seconds / len(facts)) for reason, seconds in sorted(total.items())}


def rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
