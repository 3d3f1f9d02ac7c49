from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from skipjoin.cli.connection import FAILED, INTERRUPTED
from skipjoin.cli.options import Section, Values, takes
from skipjoin.cli.workload import LoadOptions, parse_seeds, rates_of
from skipjoin.config import ConfigError
from skipjoin.loadtest.plan import LoadPlan
from skipjoin.loadtest.targets import Target, parse_extra, parse_prompt_ids
from skipjoin.workload.workload import keys_of

_DURATION_S = 60.0
# Fields of a plan that are not load options.
_CHOSEN = ("warmup", "settle_s", "timeout_s", "label", "hardware")


@takes(target=Section(Target), load=Section(LoadOptions), plan=Section(LoadPlan, _CHOSEN))
def bench(
    *,
    prompt_ids: Annotated[
        str, typer.Option(metavar="LOW-HIGH", help="Lowest and highest token id in prompts.", rich_help_panel="Target")
    ] = "100-500",
    extra_body: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="JSON object with further fields of every request; null removes a field.",
            rich_help_panel="Target",
        ),
    ] = None,
    record_requests: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File for the times of every request, as JSON lines.", rich_help_panel="Results"
        ),
    ] = None,
    target: Values,
    load: Values,
    plan: Values,
) -> None:
    """Measure an OpenAI-compatible server under open-loop load."""
    from skipjoin.cli.bench_report import BenchReport  # noqa: PLC0415
    from skipjoin.cli.requests_file import RequestsFile  # noqa: PLC0415
    from skipjoin.loadtest.runs import measure  # noqa: PLC0415
    from skipjoin.report.results import ResultsFile  # noqa: PLC0415

    server = Target(**target, prompt_ids=parse_prompt_ids(prompt_ids), extra=parse_extra(extra_body))
    options = LoadOptions(**load)
    workload = options.workload()
    if keys_of(workload) != {""}:
        raise ConfigError("key in stream and closed is for simulate: bench sends all requests with one API key")
    rates = rates_of(options.rates, workload)
    runs = LoadPlan(
        workload=workload,
        rates=rates,
        seeds=parse_seeds(options.seeds),
        duration_s=options.duration_s(rates, _DURATION_S),
        limit=options.requests,
        slo=options.slo,
        **plan,
    )
    results = ResultsFile(options.out, existing=options.existing) if options.out else None
    times = RequestsFile(record_requests, options.existing) if record_requests else None
    with BenchReport(runs, results, times) as report:
        try:
            reason = measure(server, runs, report)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
    if reason is not None:
        print(f"error: {reason}", file=sys.stderr)
        raise typer.Exit(FAILED)
