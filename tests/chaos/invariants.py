"""Invariants of a server: of answers to any request, of answers to planned ones, and of the server after a round.

Each check returns or yields a description of every failure, or None.
"""

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

# Text and finish reason of each choice, by number of the catalog's entry.
References = Mapping[int, Mapping[int, tuple[str, str]]]
# Number of descriptors that an idle server may have open beyond those when it was first idle: closing connections,
# new threads and database files.
_SLACK = {"api descriptors": 6, "engine 0 descriptors": 2, "engine 1 descriptors": 2}
# Metrics that are 0 when the server is idle.
_IDLE_METRICS = (
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_swapped",
    "kv_cache_usage_perc",
    "batch_lines",
)
# Error codes of 503 that a healthy server may return (docs/api.md), and error codes that may end a stream.
_BUSY = frozenset({"too_many_connections"})
_ENDS = frozenset({"deadline_exceeded", "slow_reader", "shutting_down"})
# Statuses of protocol errors, which occur before a request has an id.
_REFUSALS = (400, 408, 431)


# -- answers to any request ---------------------------------------------------------------------------------------


def wrong_body(status: int, headers: dict[str, str], body: bytes) -> str | None:
    """Return what is wrong with a complete answer to any request, or None."""
    kind = headers.get("content-type", "")
    if "x-request-id" not in headers and not (status in _REFUSALS and headers.get("connection") == "close"):
        return "there is no x-request-id"
    if status >= 400:
        return wrong_error(status, body)
    if kind.startswith("text/event-stream"):
        return _wrong_stream(body)
    if kind == "application/json":
        try:
            json.loads(body, parse_constant=_refuse)
        except ValueError as error:
            return f"the answer is not valid JSON: {error}"
    return None


def wrong_error(status: int, body: bytes) -> str | None:
    """Return what is wrong with an error, which must have OpenAI's form and be the client's fault, or None."""
    if not body and status in (404, 405):  # HEAD
        return None
    try:
        error = json.loads(body)["error"]
        is_whole = set(error) == {"message", "type", "param", "code"} and bool(error["message"])
    except (ValueError, KeyError, TypeError):
        is_whole, error = False, {}
    if not is_whole:
        return "the error does not have OpenAI's form"
    if status >= 500 and not (status == 503 and error["code"] in _BUSY):
        return "the server fails"
    return None


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _wrong_stream(body: bytes) -> str | None:
    *events, rest = body.split(b"\n\n")
    if rest or not events:
        return "the stream is cut off"
    last = events[-1].removeprefix(b"data: ")
    if last == b"[DONE]":
        return None
    code = (json.loads(last).get("error") or {}).get("code")
    return None if code in _ENDS else f"the stream ended with {last[:300]!r}"


# -- answers to planned requests -----------------------------------------------------------------------------------


def answers(outcomes: Sequence[Outcome], references: References, fault: Fault) -> Iterator[str]:
    """Check that each request completed or failed as the fault allows, and that its text matches the reference."""
    for outcome in outcomes:
        failure = outcome.wrong or _end(outcome, fault) or _texts(outcome, references[outcome.ask.number])
        if failure is not None:
            yield f"{failure}: {outcome}"


def _end(outcome: Outcome, fault: Fault) -> str | None:
    if outcome.is_complete or outcome.has_left:
        return None
    if outcome.cut is not None:
        return None if fault.cuts else "the connection was closed"
    allowed = fault.errors | {"queue_full"}
    if "deadline_ms" in outcome.ask.extra:
        allowed |= {"deadline_exceeded"}
    return None if outcome.error in allowed else "the fault does not explain the error"


def _texts(outcome: Outcome, reference: Mapping[int, tuple[str, str]]) -> str | None:
    for index, choice in outcome.choices.items():
        text, reason = reference[index]
        if choice.reason is not None and (choice.text, choice.reason) != (text, reason):
            return f"choice {index} differs from the reference: {choice} instead of {(text, reason)}"
        if not text.startswith(choice.text):
            return f"choice {index} is no prefix of the reference: {choice} of {text!r}"
    return None


def batch(lines: Sequence[int], found: Any, references: References) -> Iterator[str]:
    if sorted(line["custom_id"] for line in found) != sorted(str(index) for index in range(len(lines))):
        yield f"of {len(lines)} lines the output has {[line['custom_id'] for line in found]}"
        return
    for line in found:
        number = lines[int(line["custom_id"])]
        outcome = as_outcome(number, line["response"]["body"])
        failure = outcome.wrong or _texts(outcome, references[number])
        if failure is not None:
            yield f"line {line['custom_id']} of the batch: {failure}"


def as_outcome(number: int, body: Any) -> Outcome:
    outcome = Outcome(Ask(number, {"stream": False}, "read", 0, 0.0), 200)
    take_whole(outcome, body)
    return outcome


# -- the idle server ----------------------------------------------------------------------------------------------


async def idle(served: Served) -> list[str]:
    """Wait until no requests, blocks or lines remain and no more descriptors are open than at the first call."""
    end = time.monotonic() + IDLE_S
    while (found := await _busy(served)) and time.monotonic() < end:
        await asyncio.sleep(0.1)
    if served.idle_usage is None and not found:
        served.idle_usage = served.usage()
    return found


async def _busy(served: Served) -> list[str]:
    status, load = await served.get("/load")
    if status != 200:
        return [f"/load answers {status}"]
    found = [f"/load: {name} is {value}" for name, value in load.items() if value]
    status, live = await served.get("/debug/requests")
    found += [f"live request {request}" for request in live["requests"]]
    for name, value in (await served.metrics()).items():
        if value and name.partition("/")[0] in _IDLE_METRICS:
            found.append(f"metric {name} is {value:g}")
    if served.idle_usage is not None:
        for name, value in served.usage().items():
            if value > (usual := served.idle_usage.get(name, value)) + _SLACK.get(name, 0):
                found.append(f"{value} {name}, at first {usual}")
    return found


# -- metrics ------------------------------------------------------------------------------------------------------


def metrics(
    before: Metrics, after: Metrics, outcomes: Sequence[Outcome], lines: Sequence[Outcome], fault: Fault
) -> Iterator[str]:
    """Check that the server's counts in a round match what clients saw."""
    complete = [outcome for outcome in (*outcomes, *lines) if outcome.is_complete]
    incomplete = [outcome for outcome in outcomes if not outcome.is_complete]
    done, unknown = sum(_choices(outcome) for outcome in complete), sum(_choices(outcome) for outcome in incomplete)
    # After a stop string the deadline may still expire in the engine before the abort reaches it.
    late = sum(
        _choices(outcome)
        for outcome in complete
        if "deadline_ms" in outcome.ask.extra and "stop" in _entry(outcome).body
    )
    tokens = sum(outcome.tokens for outcome in complete)
    # The engine may have generated more tokens than the client saw, up to the maximum.
    max_tokens = tokens + sum(_entry(outcome).max_tokens for outcome in incomplete)
    max_tokens += sum(
        _entry(outcome).max_tokens - outcome.tokens for outcome in complete if "stop" in _entry(outcome).body
    )
    refused = sum(outcome.error == "queue_full" for outcome in outcomes)
    silent = sum(outcome.has_left or outcome.cut is not None for outcome in outcomes)
    for name, value, low, high in (
        (
            "ends by stop or length",
            grown(before, after, "request_success_total", "stop", "length"),
            done - late,
            done + unknown,
        ),
        ("ends", grown(before, after, "request_success_total"), done, done + unknown),
        ("tokens", grown(before, after, "generation_tokens_total"), tokens, max_tokens),
        ("refusals", grown(before, after, "admission_rejected_total", "requests", "tokens"), refused, refused + silent),
        ("blocks that leaked", grown(before, after, "kv_blocks_recovered_total"), 0, 0),
        ("lines", grown(before, after, "batch_lines_ended_total"), len(lines), len(lines)),
    ):
        if not (0 if fault.loses_counts else low) <= value <= high:
            yield f"the server counted {value:g} {name}, clients saw {low:g} to {high:g}"


def grown(before: Metrics, after: Metrics, metric: str, *labels: str) -> float:
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
    return [json.loads(line) for line in text.splitlines()]
