"""What must hold after a round. Each check returns what does not, in words; nothing if all is well."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from chaos.catalog import Entry, entry
from chaos.clients import Outcome, take_whole
from chaos.faults import Fault
from chaos.plan import Ask
from chaos.served import IDLE_S, Metrics, Served

# Text and reason of each choice, by the number of the catalog's entry.
References = Mapping[int, Mapping[int, tuple[str, str]]]
# Descriptors that a server may have open beyond those of its first rest: connections that are being closed, a thread
# that has begun, a file of the database.
_SLACK = {"api descriptors": 6, "engine 0 descriptors": 2, "engine 1 descriptors": 2}
# Samples that are 0 at rest, with all their labels.
_AT_REST = (
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_swapped",
    "kv_cache_usage_perc",
    "batch_lines",
)
_ADMITTED_ERRORS = ("deadline_exceeded", "request_failed", "engine_dead", "no_replica", "shutting_down")


# -- answers ------------------------------------------------------------------------------------------------------


def answers(outcomes: Sequence[Outcome], references: References, fault: Fault) -> Iterator[str]:
    """Every request ended right, or with one error that the round allows, and what it got is the reference's."""
    for outcome in outcomes:
        trouble = outcome.wrong or _end(outcome, fault) or _texts(outcome, references[outcome.ask.number])
        if trouble is not None:
            yield f"{trouble}: {outcome}"


def _end(outcome: Outcome, fault: Fault) -> str | None:
    if outcome.is_complete or outcome.has_left:
        return None
    if outcome.cut is not None:
        return None if fault.cuts else "the connection broke off"
    allowed = fault.errors | {"queue_full"}
    if "deadline_ms" in outcome.ask.extra:
        allowed |= {"deadline_exceeded"}
    return None if outcome.error in allowed else "an error that nothing explains"


def _texts(outcome: Outcome, reference: Mapping[int, tuple[str, str]]) -> str | None:
    for index, choice in outcome.choices.items():
        text, reason = reference[index]
        if choice.reason is not None and (choice.text, choice.reason) != (text, reason):
            return f"choice {index} differs from the reference: {choice} in place of {(text, reason)}"
        if not text.startswith(choice.text):
            return f"choice {index} is no beginning of the reference: {choice} of {text!r}"
    return None


def batch(lines: Sequence[int], found: Any, references: References) -> Iterator[str]:
    """found: the lines of the output file. Every line is answered once, with the reference's text."""
    if sorted(one["custom_id"] for one in found) != sorted(str(index) for index in range(len(lines))):
        yield f"of {len(lines)} lines there are {[one['custom_id'] for one in found]}"
        return
    for one in found:
        number = lines[int(one["custom_id"])]
        outcome = as_outcome(number, one["response"]["body"])
        trouble = outcome.wrong or _texts(outcome, references[number])
        if trouble is not None:
            yield f"line {one['custom_id']} of the batch: {trouble}"


def as_outcome(number: int, body: Any) -> Outcome:
    """An answer that is not streamed, of an entry of the catalog."""
    outcome = Outcome(Ask(number, {"stream": False}, "read", 0, 0.0), 200)
    take_whole(outcome, body)
    return outcome


# -- the server at rest -------------------------------------------------------------------------------------------


async def rest(served: Served) -> list[str]:
    """No request, block or line is left, and nothing more is open than at the first rest."""
    end = time.monotonic() + IDLE_S
    while (found := await _unrest(served)) and time.monotonic() < end:
        await asyncio.sleep(0.1)
    if served.resting is None and not found:
        served.resting = served.held()
    return found


async def _unrest(served: Served) -> list[str]:
    status, load = await served.get("/load")
    if status != 200:
        return [f"/load answers {status}"]
    found = [f"/load: {name} is {value}" for name, value in load.items() if value]
    status, live = await served.get("/debug/requests")
    found += [f"live request {one}" for one in live["requests"]]
    for name, value in (await served.metrics()).items():
        if value and name.partition("/")[0] in _AT_REST:
            found.append(f"metric {name} is {value:g}")
    if served.resting is not None:
        for name, value in served.held().items():
            if value > (usual := served.resting.get(name, value)) + _SLACK.get(name, 0):
                found.append(f"{value} {name}, at first {usual}")
    return found


# -- metrics ------------------------------------------------------------------------------------------------------


def metrics(
    before: Metrics, after: Metrics, outcomes: Sequence[Outcome], lines: Sequence[Outcome], fault: Fault
) -> Iterator[str]:
    """What the server counted in a round is what clients saw. lines: answers of the batch."""
    complete = [one for one in (*outcomes, *lines) if one.is_complete]
    open_ended = [one for one in outcomes if not one.is_complete]
    done, unsure = sum(_choices(one) for one in complete), sum(_choices(one) for one in open_ended)
    # One whose output a stop string ended may meet its deadline at the engine, before that is told of the end.
    late = sum(_choices(one) for one in complete if "deadline_ms" in one.ask.extra and "stop" in _entry(one).body)
    tokens = sum(one.tokens for one in complete)
    # A request that ended early may have had all its tokens in the engine, one with a stop string a few more.
    max_tokens = tokens + sum(_entry(one).max_tokens for one in open_ended)
    max_tokens += sum(_entry(one).max_tokens - one.tokens for one in complete if "stop" in _entry(one).body)
    refused = sum(one.error == "queue_full" for one in outcomes)
    silent = sum(one.has_left or one.cut is not None for one in outcomes)
    for what, value, least, most in (
        (
            "ends by stop or length",
            grown(before, after, "request_success_total", "stop", "length"),
            done - late,
            done + unsure,
        ),
        ("ends", grown(before, after, "request_success_total"), done, done + unsure),
        ("tokens", grown(before, after, "generation_tokens_total"), tokens, max_tokens),
        ("refusals", grown(before, after, "admission_rejected_total", "requests", "tokens"), refused, refused + silent),
        ("blocks that leaked", grown(before, after, "kv_blocks_recovered_total"), 0, 0),
        ("lines", grown(before, after, "batch_lines_ended_total"), len(lines), len(lines)),
    ):
        if not (0 if fault.loses_counts else least) <= value <= most:
            yield f"the server counted {value:g} {what}, clients saw {least:g} to {most:g}"


def grown(before: Metrics, after: Metrics, metric: str, *labels: str) -> float:
    """By how much a counter grew. labels: the last one of the samples that count; none: all count."""
    return sum(
        value - before.get(name, 0)
        for name, value in after.items()
        if name.partition("/")[0] == metric and (not labels or name.rpartition("/")[2] in labels)
    )


def _entry(outcome: Outcome) -> Entry:
    return entry(outcome.ask.number)


def _choices(outcome: Outcome) -> int:
    return _entry(outcome).choices


def parse_lines(text: str) -> list[Any]:
    """The lines of a file of answers."""
    return [json.loads(line) for line in text.splitlines()]
