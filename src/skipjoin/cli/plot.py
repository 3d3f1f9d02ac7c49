from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from skipjoin.cli.options import plain_errors

# Value of --metric that prints the fields.
_LIST = "list"


def plot(
    results: Annotated[list[Path], typer.Argument(help="Files of result records.")],
    *,
    kind: Annotated[
        str | None,
        typer.Option(
            help="latency, cdf, ttft-tpot, breakdown, kv or all (default: latency; for one rate or trace, cdf)."
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="Field of the records that 'latency' draws, such as ttft_s.p95 (default: the bound's, or "
            "normalized_latency_s.mean); list prints all of the files."
        ),
    ] = None,
    bound: Annotated[
        str | None,
        typer.Option(
            help="Bound such as 'normalized_latency_s.mean<=0.3', with the maximum rate at which each recipe meets it."
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Arrivals per second of cdf, breakdown and kv (default: the highest common one)."),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(help="File ending in .png, .svg, or neither for both; or a folder; with 'all', a prefix."),
    ] = Path("."),
) -> None:
    """Plot the results of measurements."""
    from skipjoin.report.bound import fields_of, parse_bound  # noqa: PLC0415
    from skipjoin.report.plot import View, default_kind, plot_results  # noqa: PLC0415
    from skipjoin.report.plots.lines import lines_of, maximum_rates  # noqa: PLC0415
    from skipjoin.report.results import load_results  # noqa: PLC0415

    def warn(text: str) -> None:
        print(f"warning: {text}", file=sys.stderr)

    with plain_errors():
        limit = parse_bound(bound) if bound else None
        records = load_results(results)
        if metric == _LIST:
            print("\n".join(dict.fromkeys(field for record in records for field in fields_of(record))))
            return
        rates = maximum_rates(lines_of(records), limit, warn) if limit else {}
        view = View(metric=metric, bound=limit, rate_rps=rate)
        written = plot_results(records, kind or default_kind(records, view), out, view, warn)
    if rates:
        print(f"largest rate (req/s) with {limit}")
        width = max(map(len, rates))
        for label, most in rates.items():
            print(f"{label:{width}}  {'none: broken at the lowest rate measured' if most is None else most}")
    for path in written:
        print(f"wrote {path}")
