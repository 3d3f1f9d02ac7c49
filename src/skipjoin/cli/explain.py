from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from skipjoin.cli.connection import Connection, call
from skipjoin.cli.options import Section, Values, takes
from skipjoin.cli.progress import result_console
from skipjoin.cli.tables import Table
from skipjoin.report.numbers import amount, duration

_BAR = 40
_STYLES = {"running": "green", "no_kv": "red", "no_slot": "yellow", "token_budget": "magenta"}


@takes(server=Section(Connection))
def explain(
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST_ID", help="Id of the response, its header x-request-id, or the program of its call."
        ),
    ],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    server: Values,
) -> None:
    """Say why a request waits, or why it waited if it ended in the last ten minutes, and what would change that."""
    from skipjoin.cli.server_client import ServerClient  # noqa: PLC0415

    path = f"/debug/requests/{quote(request_id, safe='')}"
    found = call(ServerClient, Connection(**server), lambda client: client.json("GET", path))
    if as_json:
        print(json.dumps(found))
        return
    console = result_console()
    for choice in found["choices"]:
        console.print(report(found, choice))
    if found["lost_choices"]:
        console.print(f"{found['lost_choices']} choices have no history: their engine exited, or does not answer.")


def report(found: Mapping[str, Any], choice: Mapping[str, Any]) -> RenderableType:
    return Group(
        *_head(found, choice),
        Text(),
        _intervals(found["reasons"], choice),
        Text(),
        *_why(found["reasons"], choice),
        *_policy(choice),
    )


def _head(found: Mapping[str, Any], choice: Mapping[str, Any]) -> Iterator[Text]:
    name = found["id"] + (f", choice {choice['choice']}" if choice["choice"] or len(found["choices"]) > 1 else "")
    state = f"ended ({choice['state']})" if choice["is_finished"] else found["reasons"][choice["state"]]["short"]
    yield Text(f"{name}: {state} after {duration(choice['total_s'])}", style="bold")
    first = choice["first_token_s"]
    facts = [
        f"{choice['prompt_tokens']} prompt tokens ({choice['cached_tokens']} cached)",
        f"{choice['output_tokens']} of at most {choice['max_tokens']} output tokens",
        "no token yet" if first is None else f"first token after {duration(first)}",
        f"{choice['service']}{', urgent' if choice['is_urgent'] else ''}, priority {choice['priority']}",
    ]
    if choice["program"] is not None:
        facts.append(f"program {choice['program']}")
    yield Text("; ".join(facts))
    if (forecast := choice["forecast"]) is not None:
        low, high = forecast["low"], forecast["high"]
        between = "" if low is None else f" (80 %: {low:.0f} to {high:.0f})"
        yield Text(f"forecast {forecast['tokens']:.0f} tokens{between} by {forecast['source']}")
    for objective, outcome in choice["objectives"].items():
        value = "open" if outcome["value_s"] is None else duration(outcome["value_s"])
        verdict = {True: "met", False: "missed", None: "open"}[outcome["met"]]
        yield Text(f"objective {objective.upper()} {duration(outcome['bound_s'])}: {value}, {verdict}")
    if choice["preemptions"]:
        yield Text("preempted: " + ", ".join(f"{count} x {how}" for how, count in choice["preemptions"].items()))


def _intervals(reasons: Mapping[str, Any], choice: Mapping[str, Any]) -> Table:
    table = Table("from", "for", "state", "", box=None, padding=(0, 2, 0, 0))
    total = max(choice["total_s"], 1e-9)
    for interval in choice["intervals"]:
        begin, end = interval["begin_s"], interval["end_s"]
        left = round(begin / total * _BAR)
        bar = "█" * max(1, round(end / total * _BAR) - left)
        text = reasons[interval["state"]]["short"]
        text += f", {interval['preempted']}" if interval["preempted"] else ""
        text += f", {interval['short_blocks']} blocks short" if interval["short_blocks"] else ""
        text += " (now)" if interval["is_current"] else ""
        style = _STYLES.get(interval["state"], "blue")
        bar = " " * min(left, _BAR - 1) + bar
        table.add_row(duration(begin), duration(end - begin), Text(text), Text(bar, style=style))
    for state, seconds in choice["omitted_s"].items():
        table.add_row("between", duration(seconds), Text(f"{reasons[state]['short']}, shorter intervals"), "")
    return table


def _why(reasons: Mapping[str, Any], choice: Mapping[str, Any]) -> Iterator[Text]:
    waits = {state: seconds for state, seconds in choice["seconds"].items() if state != "running" and seconds > 0}
    longest = choice["longest_wait"]
    if not waits or longest is None:
        yield Text("It never waited.")
        return
    waited = sum(waits.values())
    yield Text(
        f"It waited {duration(waited)} of {duration(choice['total_s'])}, longest for: {reasons[longest]['short']}."
    )
    yield Text(reasons[longest]["text"])
    competitors = [f"{_name(other)} for {duration(other['seconds'])}" for other in choice["competitors"]]
    if competitors:
        yield Text("Meanwhile ran longest: " + ", ".join(competitors))
    if choice["advice"]:
        yield Text(choice["advice"], style="bold")


def _policy(choice: Mapping[str, Any]) -> Iterator[RenderableType]:
    if choice["place"] is None:
        return
    place, live = choice["place"] + 1, choice["live_requests"]
    values = {fact["label"]: fact["value"] for fact in choice["facts"]}
    prefill_s = values.get("prefill ahead", 0.0)
    ahead = f" At least {duration(prefill_s)} of prefill ahead of you." if prefill_s else ""
    yield Text()
    yield Text(f"Number {place} of {live} live requests in the scheduler's order.{ahead}", style="bold")
    table = Table("", "", "", box=None, padding=(0, 2, 0, 0), show_header=False)
    for fact in choice["facts"]:
        table.add_row(fact["label"], amount(fact["value"], fact["unit"]), fact["meaning"])
    yield table


def _name(holder: Mapping[str, Any]) -> str:
    if holder["id"] is None:
        return "another client"
    return f"{holder['id']} #{holder['choice']}" if holder["choice"] else str(holder["id"])
