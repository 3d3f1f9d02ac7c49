"""`skipjoin replay`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from skipjoin.cli.connection import Connection, call
from skipjoin.cli.explain import duration
from skipjoin.cli.options import Section, Values, takes
from skipjoin.config import ConfigError
from skipjoin.core.request import RequestOptions, ServiceClass
from skipjoin.recipes import names_in

if TYPE_CHECKING:
    from skipjoin.sim.experiments.system import System
    from skipjoin.workload.traces import Trace

_FILE_WIDTH = 160
_MIN_REQUESTS = 2
_LARGE_ERROR = 0.3


@takes(server=Section(Connection))
def replay(
    *,
    recipes: Annotated[
        str, typer.Option(metavar="NAMES", help="Recipes to try, as for simulate, separated by commas.")
    ] = "fcfs,fastserve",
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, help="Slots to try in the recipes (default: the server's).")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens per step to try in the recipes (default: the server's).")
    ] = None,
    kv_blocks: Annotated[
        int | None, typer.Option(min=1, help="KV blocks to try in the recipes (default: the server's).")
    ] = None,
    since_s: Annotated[float, typer.Option("--since", metavar="SECONDS", help="Period to replay, up to now.")] = 3600.0,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Picture of TTFT: .png or .svg.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    server: Values,
) -> None:
    """Simulate a server's recent load under other recipes and limits, and compare it with what was measured.

    Only lengths and times are replayed. The first simulated row is the server as it is, whose difference from the
    measured row is the error of the simulator.
    """
    from skipjoin.cli.server_client import ServerClient  # noqa: PLC0415

    path = f"/debug/arrivals?since_s={since_s:g}"
    found = call(ServerClient, Connection(**server), lambda client: client.json("GET", path))
    arrivals, machine = found["arrivals"], found["machine"]
    if len(arrivals) < _MIN_REQUESTS:
        raise ConfigError(f"at least {_MIN_REQUESTS} requests must have finished in that time, got {len(arrivals)}")
    trace = trace_of(arrivals)
    limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens, "kv_blocks": kv_blocks}
    given = {name: value for name, value in limits.items() if value is not None}
    outcomes = [
        measured(arrivals, machine["recipe"]),
        simulated(system_of(machine, machine["recipe"]), trace, f"{machine['recipe']}, simulated"),
    ]
    changes = "".join(f", {name} {value}" for name, value in given.items())
    for name in names_in(recipes):
        if name != machine["recipe"] or given:
            outcomes.append(simulated(system_of(machine, name, given), trace, f"{name}{changes}"))
    if plot is not None:
        from skipjoin.report.plots.distribution import draw_distributions  # noqa: PLC0415

        draw_distributions(plot, "time to first token (s)", {one.name: one.ttft_s for one in outcomes})
    if as_json:
        print(json.dumps({one.name: one.figures() for one in outcomes}))
        return
    _print(outcomes, machine, len(arrivals))


class Outcome(NamedTuple):
    """Times of all requests, measured or simulated."""

    name: str
    ttft_s: list[float]
    jct_s: list[float]

    def figures(self) -> dict[str, float]:
        """Return quantiles of the times."""
        found: dict[str, float] = {}
        for field in ("ttft_s", "jct_s"):
            values = getattr(self, field)
            cuts = quantiles(values, n=20, method="inclusive") if len(values) > 1 else values * 19
            found |= {f"{field}.p50": cuts[9], f"{field}.p95": cuts[18], f"{field}.mean": sum(values) / len(values)}
        return found


def trace_of(arrivals: Sequence[Mapping[str, Any]]) -> Trace:
    """Return a trace of recorded arrivals."""
    from skipjoin.workload.traces import Trace, TraceRow  # noqa: PLC0415

    rows = (
        TraceRow(
            one["at"],
            one["prompt_tokens"],
            one["output_tokens"],
            options=RequestOptions(service=ServiceClass(one["service"])),
        )
        for one in arrivals
    )
    return Trace("the server's arrivals", tuple(rows))


def system_of(machine: Mapping[str, Any], recipe: str, changes: Mapping[str, int] | None = None) -> System:
    """Return the simulated system of a server, with another recipe and changed limits."""
    from skipjoin.policies.cost import LinearCost  # noqa: PLC0415
    from skipjoin.sim.experiments.system import System  # noqa: PLC0415

    parts: dict[str, Any] = {
        "kv_blocks": machine["device_blocks"],
        **{name: machine[name] for name in ("max_num_seqs", "max_num_batched_tokens") if machine[name] is not None},
        **(changes or {}),
    }
    return System(
        recipe=recipe,
        model=machine["model"],
        hardware=machine["device"],
        cost=LinearCost(**machine["cost"]),
        block_bytes=machine["block_bytes"],
        cpu_block_bytes=machine["cpu_block_bytes"],
        cpu_blocks=machine["cpu_blocks"],
        swap_dtype=machine["swap_dtype"],
        block_size=machine["block_size"],
        max_model_len=machine["max_model_len"],
        replicas=machine["replicas"],
        dispatch="prefix-aware",
        **parts,
    )


def measured(arrivals: Sequence[Mapping[str, Any]], recipe: str) -> Outcome:
    """Return what the server measured."""
    ttft = [one["ttft_s"] for one in arrivals if one["ttft_s"] is not None]
    return Outcome(f"{recipe}, measured", ttft, [one["jct_s"] for one in arrivals])


def simulated(system: System, trace: Trace, name: str) -> Outcome:
    """Return the times of a simulated run."""
    from skipjoin.sim.experiments.simulation import Cell, Extent, run  # noqa: PLC0415
    from skipjoin.workload.workload import Replay  # noqa: PLC0415

    requests: list[Mapping[str, Any]] = []
    run(Cell(system, Replay(trace), Extent(None, None, 0)), on_requests=requests.extend)
    done = [one for one in requests if one["error"] is None]
    if not done:
        raise ConfigError(f"{name}: no request fits, as the KV pool has {system.kv_blocks} blocks")
    return Outcome(
        name,
        [one["first_token_s"] - one["due_s"] for one in done],
        [one["ended_s"] - one["due_s"] for one in done],
    )


def _print(outcomes: Sequence[Outcome], machine: Mapping[str, Any], requests: int) -> None:
    table = Table("", "TTFT p50", "TTFT p95", "total p50", "total p95", "total mean", box=None, padding=(0, 2, 0, 0))
    fields = ("ttft_s.p50", "ttft_s.p95", "jct_s.p50", "jct_s.p95", "jct_s.mean")
    for one in outcomes:
        figures = one.figures()
        table.add_row(one.name, *(duration(figures[field]) for field in fields))
    real, model = outcomes[0].figures(), outcomes[1].figures()
    errors = {field: model[field] / real[field] - 1 for field in fields if real[field] > 0}
    texts = (f"{errors[field]:+.0%}" if field in errors else "-" for field in fields)
    table.add_row("error of the simulator", *texts, style="dim")
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    console.print(f"{requests} requests of {machine['model']} on {machine['device']}, {machine['replicas']} replicas")
    console.print(table)
    if any(abs(error) > _LARGE_ERROR for error in errors.values()):
        console.print(
            "The simulator is far from what was measured: the machine was busy, its profile is bad, or the model is so "
            "small that HTTP and the time between steps dominate. Compare simulated rows with each other only."
        )
    console.print(
        "Simulated rows rest on the cost model that the engine updates from its own steps. They leave out HTTP, "
        "tokenization and prefix-cache hits, and use the default parameters of each recipe; NAME[PARAMETER=VALUE] sets "
        "others."
    )
