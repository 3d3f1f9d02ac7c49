"""`skipjoin bench`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from skipjoin.cli.options import plain_errors
from skipjoin.cli.workload import (
    AppendOption,
    ArrivalsOption,
    BestEffortOption,
    DurationOption,
    LengthsOption,
    OutOption,
    OverwriteOption,
    RatesOption,
    RequestsOption,
    SeedsOption,
    SloJct,
    SloTpot,
    SloTtft,
    SpeedupOption,
    StreamOption,
    TraceOption,
    existing_results,
    make_slo,
    make_workload,
    parse_seeds,
    rates_of,
)

_ENDED_EARLY, _INTERRUPTED = 1, 130
_DURATION_S = 60.0


def bench(
    *,
    base_url: Annotated[str, typer.Option(help="The server, such as http://127.0.0.1:8000.")],
    endpoint: Annotated[
        str, typer.Option(help="completions (prompts of token ids) or chat (of words).")
    ] = "completions",
    model: Annotated[
        str | None, typer.Option(help="Model to ask for (default: the first that the server lists).")
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Key to send.")] = None,
    prompt_ids: Annotated[str, typer.Option(help="Lowest and highest token id in prompts, as LOW-HIGH.")] = "100-500",
    extra_body: Annotated[
        str | None, typer.Option(help="JSON object with further fields of every request; null removes a field.")
    ] = None,
    lengths: LengthsOption = "sharegpt",
    arrivals: ArrivalsOption = "poisson",
    rates: RatesOption = None,
    duration: DurationOption = None,
    requests: RequestsOption = None,
    seeds: SeedsOption = "0",
    trace: TraceOption = None,
    speedup: SpeedupOption = 1.0,
    best_effort_share: BestEffortOption = None,
    stream: StreamOption = None,
    slo_ttft: SloTtft = None,
    slo_tpot: SloTpot = None,
    slo_jct: SloJct = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds until a request is given up (default: never).")] = None,
    warmup: Annotated[int, typer.Option(help="Requests before the first run that do not count.")] = 4,
    settle: Annotated[float, typer.Option(help="Seconds between runs.")] = 1.0,
    label: Annotated[
        str | None, typer.Option(help="The record's recipe (default: what a skipjoin server says).")
    ] = None,
    hardware_label: Annotated[str, typer.Option(help="The record's hardware.")] = "unknown",
    out: OutOption = None,
    overwrite: OverwriteOption = False,
    append: AppendOption = False,
    record_requests: Annotated[
        Path | None, typer.Option(help="File for the times of every request, as JSON lines.")
    ] = None,
) -> None:
    """Measure an OpenAI-compatible server under load that does not wait for it."""
    from skipjoin.bench.http_request import Target, parse_extra, parse_prompt_ids  # noqa: PLC0415
    from skipjoin.bench.load import LoadPlan, measure  # noqa: PLC0415
    from skipjoin.bench.results import ResultsFile  # noqa: PLC0415
    from skipjoin.cli.bench_report import BenchReport, RequestsFile  # noqa: PLC0415

    with plain_errors():
        target = Target(
            base_url=base_url,
            endpoint=endpoint,
            model=model,
            api_key=api_key,
            prompt_ids=parse_prompt_ids(prompt_ids),
            extra=parse_extra(extra_body),
        )
        workload = make_workload(
            lengths=lengths,
            arrivals=arrivals,
            trace=trace,
            speedup=speedup,
            best_effort_share=best_effort_share,
            streams=stream,
        )
        all_rates = rates_of(rates, workload)
        if duration is None and requests is None and all_rates != (None,):
            duration = _DURATION_S
        plan = LoadPlan(
            workload=workload,
            rates=all_rates,
            seeds=parse_seeds(seeds),
            duration_s=duration,
            limit=requests,
            slo=make_slo(slo_ttft, slo_tpot, slo_jct),
            warmup=warmup,
            settle_s=settle,
            timeout_s=timeout,
            label=label,
            hardware=hardware_label,
        )
        existing = existing_results(overwrite=overwrite, append=append)
        results = ResultsFile(out, existing=existing) if out else None
        times = RequestsFile(record_requests, existing) if record_requests else None
        with BenchReport(plan, results, times) as report:
            try:
                reason = measure(target, plan, report)
            except KeyboardInterrupt:
                raise typer.Exit(_INTERRUPTED) from None
        if reason is not None:
            print(f"error: {reason}", file=sys.stderr)
            raise typer.Exit(_ENDED_EARLY)
