from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from skipjoin.cli.connection import Connection, call
from skipjoin.cli.options import Section, Values, takes
from skipjoin.cli.progress import result_console
from skipjoin.cli.tables import Table
from skipjoin.extras import require
from skipjoin.recipes import names_in
from skipjoin.replay.comparison import Comparison, Limits, compare
from skipjoin.report.numbers import duration


@takes(limits=Section(Limits), server=Section(Connection))
def replay(
    *,
    recipes: Annotated[
        str, typer.Option(metavar="NAMES", help="Recipes to try, as for simulate, separated by commas.")
    ] = "fcfs,fastserve",
    since_s: Annotated[float, typer.Option("--since", metavar="SECONDS", help="Period to replay, up to now.")] = 3600.0,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Picture of TTFT: .png or .svg.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    limits: Values,
    server: Values,
) -> None:
    """Simulate a server's recent load under other recipes and limits, and compare it with what was measured.

    Only lengths and times are replayed. The first simulated row is the server as it is, whose difference from the
    measured row is the error of the simulator. The console's view "What if" shows the same.
    """
    from skipjoin.cli.server_client import ServerClient  # noqa: PLC0415

    if plot is not None:
        require("--plot", "plot")
        from skipjoin.report.plot import check_picture  # noqa: PLC0415

        check_picture(plot)
    wanted = Limits(**limits)
    path = f"/debug/arrivals?since_s={since_s:g}"
    found = call(ServerClient, Connection(**server), lambda client: client.json("GET", path))
    comparison = compare(found, names_in(recipes), wanted)
    if plot is not None:
        from skipjoin.report.plots.distribution import draw_distributions  # noqa: PLC0415

        draw_distributions(plot, {outcome.name: outcome.ttft_s for outcome in comparison.outcomes})
    if as_json:
        print(json.dumps({outcome.name: outcome.figures() for outcome in comparison.outcomes}))
        return
    _print(comparison, found["machine"], len(found["arrivals"]))


def _print(comparison: Comparison, machine: Mapping[str, Any], requests: int) -> None:
    from skipjoin.replay.simulation import FIGURES  # noqa: PLC0415

    names = (name.replace("ttft_s.", "TTFT ").replace("jct_s.", "total ") for name in FIGURES)
    table = Table("", *names, "preemptions", box=None, padding=(0, 2, 0, 0))
    for outcome in comparison.outcomes:
        figures = outcome.figures()
        count = "" if outcome.preemptions is None else str(outcome.preemptions)
        table.add_row(outcome.name, *(duration(figures[name]) for name in FIGURES), count)
    errors = comparison.errors
    texts = (f"{errors[name]:+.0%}" if name in errors else "-" for name in FIGURES)
    table.add_row("error of the simulator", *texts, "", style="dim")
    console = result_console()
    of = machine["replicas"]
    console.print(f"{requests} requests of {machine['model']} on {machine['device']}, {of} replica{'s' * (of != 1)}")
    console.print(table)
    if comparison.is_far:
        console.print(
            "The simulator is far from what was measured: the machine was busy, clients waited for answers before they "
            "sent more, or prefix-cache hits saved much. Compare simulated rows with each other only."
        )
    console.print(
        "Simulated rows rest on the cost model that the engine updates from its own steps, on the measured time "
        f"between steps ({duration(comparison.between_steps_s)}) and around the engine "
        f"({duration(comparison.around_s)}). They leave out prefix-cache hits, and use the default parameters "
        "of each other recipe; NAME[PARAMETER=VALUE] sets others."
    )
