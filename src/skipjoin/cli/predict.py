from __future__ import annotations

import dataclasses
import gzip
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from zlib import crc32

import typer
from rich.console import Console

from skipjoin.cli.commands import Commands
from skipjoin.cli.options import Section, Values, plain_errors, takes
from skipjoin.cli.progress import Bars, stage_bars
from skipjoin.cli.tables import Table
from skipjoin.config import ForecastConfig
from skipjoin.options import ConfigError, Option, check
from skipjoin.system.machine import cpu_name
from skipjoin.workload.traces import Trace, read_trace

if TYPE_CHECKING:
    from skipjoin.forecast.evaluate import Evaluation, Figures, Sample

predict = Commands(help="Forecasts of output lengths: how good they are, and what was learned.", add_completion=False)

# Value of the column 'split' for training rows.
_TRAIN = "train"
_common = partial(Option, is_common=True)
_COLUMNS = ("forecaster", "R", "R of logs", "MAE", "within 25 %", "accuracy", "pairs", "coverage", "by prompt", "ms")
EncoderName = Annotated[
    str,
    Option(
        "'hashed', 'minilm' (the sentence encoder of the extra encoder), or the folder of a text encoder.",
        metavar="NAME",
        is_common=True,
    ),
]
ForecastDir = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Where forecasters keep what they learn (default: the user's cache).")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateOptions:
    trace: Annotated[Path, _common("JSONL file with prompts and with lengths or texts of outputs.", metavar="FILE")]
    second_run: Annotated[
        str | None,
        _common(
            "Column with the lengths of a second run of the same prompts, which the oracle predicts from.",
            metavar="COLUMN",
        ),
    ] = None
    encoder: EncoderName = "hashed"
    state: Annotated[
        Path | None,
        _common(
            "State of `skipjoin predict train` to measure as well. It must not have been trained on the measured rows.",
            metavar="DIR",
        ),
    ] = None
    entries: Annotated[int, _common("Maximum number of past requests to predict from.", low=1, high=1_000_000)] = 10_000
    max_tokens: Annotated[int, _common("Length at which outputs are truncated.", low=1, high=1 << 20)] = 2048
    rows: Annotated[
        int | None,
        _common("Number of rows to use, from the beginning of the file (default: all).", low=20, high=1 << 40),
    ] = None

    def __post_init__(self) -> None:
        check(self)


@predict.command()
@takes(values=Section(EvaluateOptions))
def evaluate(
    *,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures here, with the machine.")
    ] = None,
    values: Values,
) -> None:
    """Train forecasters on one part of a trace and evaluate them on the other (ALISE, table 2).

    Rows are split by the column 'split' if there is one ('train' against all others). Otherwise they are split by
    'conv', so that a conversation is in one part, or else into halves in file order. Prompts are split into words,
    because the trace's tokenizer is not known.
    """
    options = EvaluateOptions(**values)
    evaluation = _evaluation(options)
    with progress_bars() as show:
        found = evaluation.run(show)
    _print(options.trace, evaluation, found)
    if json_file is not None:
        _write(json_file, options.trace, evaluation, found)


def _evaluation(options: EvaluateOptions) -> Evaluation:
    from skipjoin.forecast import make_forecaster  # noqa: PLC0415
    from skipjoin.forecast.evaluate import Evaluation  # noqa: PLC0415

    found = read_trace(options.trace)
    print(found.describe(), file=sys.stderr)
    found.check_texts()
    samples, texts = samples_of(found, options.second_run)
    train, test = _split(options.trace, samples[: options.rows])
    config = ForecastConfig(forecast_encoder=options.encoder, forecast_entries=options.entries)
    made = make_forecaster(config, text_of=lambda prompt: texts[tuple(prompt)])
    trained = None
    if options.state is not None:
        start = ForecastConfig(forecast_state=str(options.state), forecast_entries=options.entries)
        trained = make_forecaster(start, text_of=lambda prompt: texts[tuple(prompt)])
    return Evaluation(train, test, made.encoder, options.entries, options.max_tokens, trained)


def samples_of(trace: Trace, second_run: str | None) -> tuple[list[Sample], dict[tuple[int, ...], str]]:
    from skipjoin.forecast.encode import words  # noqa: PLC0415
    from skipjoin.forecast.evaluate import Sample  # noqa: PLC0415

    second = [0.0] * len(trace.rows) if second_run is None else trace.column(second_run)
    texts = {tuple(words(row.prompt or "")): row.prompt or "" for row in trace.rows}
    samples = [
        Sample(words(row.prompt or ""), row.output_tokens, int(other))
        for row, other in zip(trace.rows, second, strict=True)
    ]
    return samples, texts


def _split(path: Path, samples: list[Sample]) -> tuple[list[Sample], list[Sample]]:
    parts: tuple[list[Sample], list[Sample]] = ([], [])
    for index, (sample, described) in enumerate(zip(samples, objects_of(path), strict=False)):
        parts[not is_training_row(described, index, len(samples))].append(sample)
    if min(map(len, parts)) < 10:
        raise ConfigError(f"{path}: {len(parts[0])} rows to train with and {len(parts[1])} to measure, fewer than 10")
    return parts


def is_training_row(described: dict[str, Any], index: int, rows: int) -> bool:
    if "split" in described:
        return bool(described["split"] == _TRAIN)
    if "conv" in described:
        return crc32(str(described["conv"] or index).encode()) % 2 == 1
    return index < rows // 2


def objects_of(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        yield from (json.loads(line) for line in file if line.strip())


@contextmanager
def progress_bars() -> Iterator[Callable[[str, float], None]]:
    with Bars() as bars:
        yield stage_bars(bars)


def _print(path: Path, evaluation: Evaluation, found: list[Figures]) -> None:
    table = Table(title=f"{path.name}: {len(evaluation.train)} rows to train with, {len(evaluation.test)} measured")
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == "forecaster" else "right", no_wrap=True)
    for item in found:
        quartiles = " ".join(f"{share:.2f}" for share in item.coverage_by_prompt or ())
        table.add_row(
            item.name,
            *(f"{value:.3f}" for value in (item.r, item.r_log)),
            f"{item.mae:.1f}",
            *(f"{value:.3f}" for value in (item.within_25, item.accuracy, item.pairwise)),
            "" if item.coverage is None else f"{item.coverage:.3f}",
            quartiles,
            "" if item.milliseconds is None else f"{item.milliseconds:.2f}",
        )
    console = Console()
    console.width = max(console.width, 120)
    console.print(table)


def _write(file: Path, trace: Path, evaluation: Evaluation, found: list[Figures]) -> None:
    record = {
        "trace": trace.name,
        "train": len(evaluation.train),
        "test": len(evaluation.test),
        "encoder": evaluation.encoder.name,
        "entries": evaluation.entries,
        "max_tokens": evaluation.most,
        "machine": cpu_name(),
        "forecasters": [dataclasses.asdict(item) for item in found],
    }
    _write_text(file, json.dumps(record, indent=1) + "\n")


def _write_text(file: Path, text: str) -> None:
    try:
        file.write_text(text)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None


@predict.command()
def export(
    *,
    forecast_dir: ForecastDir = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="File of JSON lines to write.")],
) -> None:
    """Write the learned lengths as JSON lines: per state its length distribution, then the length of each past request.

    The file contains no prompts, because none are stored.
    """
    from skipjoin.forecast.states import exported, states  # noqa: PLC0415
    from skipjoin.forecast.store import StateError, default_folder  # noqa: PLC0415

    parent = forecast_dir or default_folder()
    lines: list[str] = []
    with plain_errors():
        for folder in states(parent):
            try:
                lines += [json.dumps(item) + "\n" for item in exported(folder)]
            except (StateError, OSError, KeyError, ValueError) as error:
                print(f"warning: {folder} is left out: {error}", file=sys.stderr)
        if not lines:
            raise ConfigError(f"{parent}: nothing was learned there")
        _write_text(out, "".join(lines))
    print(f"{len(lines)} lines: {out}")


@predict.command()
def reset(
    *,
    forecast_dir: ForecastDir = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only what was learned for this model, as it was served.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove what was learned for all models unasked.")] = False,
) -> None:
    """Remove learned lengths. A running server keeps its state in memory and saves it again."""
    from skipjoin.forecast.states import remove_states, states_of  # noqa: PLC0415
    from skipjoin.forecast.store import default_folder  # noqa: PLC0415

    parent = forecast_dir or default_folder()
    with plain_errors():
        try:
            gone = states_of(parent, model)
            if gone and model is None and not yes:
                _confirm(gone)
            remove_states(gone)
        except OSError as error:
            raise ConfigError(f"{error.filename}: {error.strerror}") from None
    for folder in gone:
        print(f"removed {folder}")
    if not gone:
        print(f"{parent}: nothing was learned there")


def _confirm(folders: Sequence[Path]) -> None:
    """Ask whether to remove these states. Exit if the answer is no; raise `ConfigError` without a terminal."""
    from skipjoin.forecast.store import described_field  # noqa: PLC0415

    for folder in folders:
        print(f"{folder}: learned for {described_field(folder, 'served') or 'an unknown model'}")
    if not sys.stdin.isatty():
        raise ConfigError(f"reset would remove what was learned for all models, {len(folders)}: give --model or --yes")
    typer.confirm("Remove all of this?", abort=True)
