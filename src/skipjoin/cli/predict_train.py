from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from skipjoin.cli.options import Section, Values, takes
from skipjoin.cli.predict import EncoderName, objects_of, predict, progress_bars, samples_of
from skipjoin.config import ForecastConfig
from skipjoin.options import ConfigError, Option, check
from skipjoin.workload.traces import read_trace

if TYPE_CHECKING:
    from skipjoin.forecast import Forecaster
    from skipjoin.forecast.evaluate import Progress, Sample
    from skipjoin.forecast.train import Training

# Rows that are needed on either side of the split.
_MIN_ROWS = 10
# Share of retrieval in all forecasts below which training says so.
_NEARLY_OFF = 0.1
_common = partial(Option, is_common=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    trace: Annotated[Path, _common("JSONL file with prompts and with lengths or texts of outputs.", metavar="FILE")]
    out: Annotated[Path, _common("Folder for the state.", metavar="DIR")]
    forecaster: Annotated[str, _common("Forecaster to train.", choices=("alise", "learned"))] = "alise"
    encoder: EncoderName = "hashed"
    entries: Annotated[int, _common("Maximum number of requests to predict from.", low=1, high=1_000_000)] = 10_000
    model: Annotated[
        str | None,
        _common(
            "Model that will be served: prompts are put into its chat template, as its server will see them (default: "
            "prompts as they are, for completions and simulations).",
            metavar="MODEL",
        ),
    ] = None

    def __post_init__(self) -> None:
        check(self)
        if self.out.exists() and not self.out.is_dir():
            raise ConfigError(f"out: {self.out} is not a folder")


@predict.command()
@takes(values=Section(TrainOptions))
def train(*, values: Values) -> None:
    """Train a forecaster on a trace, for `serve --forecast-state DIR` and `simulate --predictor state:DIR`.

    One row in five is held out, by the column 'conv' if there is one and by equal prompts otherwise. Of ALISE, the
    other rows train the index and the decoder. The held-out rows choose what orders most pairs of them (the number of
    neighbors, the similarity from which one counts, its share beside the decoder, and the decoder's epochs), calibrate
    the forecasts, and are learned last. Nothing is written if the forecaster orders them worse than the prior, which
    reads no words.
    """
    from skipjoin.forecast.trained import write_trained  # noqa: PLC0415

    options = TrainOptions(**values)
    trace = read_trace(options.trace)
    print(trace.describe(), file=sys.stderr)
    trace.check_texts()
    samples, texts = samples_of(trace, None)
    parts = _parts(options.trace, samples)
    rendered = _rendered(options.model)
    forecaster = _untrained(options, lambda prompt: rendered(texts[tuple(prompt)]))
    with progress_bars() as show:
        found = _trained(forecaster, samples, parts, show)
    _check_order(found)
    about = asdict(found) | {"chosen": None if found.chosen is None else found.chosen._asdict()}
    write_trained(options.out, forecaster, _encoder_setting(options.encoder), {"trace": trace.name} | about)
    print(f"{options.out}: {len(samples)} rows" + "".join(f", {name} {value}" for name, value in _shown(found).items()))
    if found.chosen is not None and found.chosen.share * found.chosen.retrieved < _NEARLY_OFF:
        print(
            f"warning: retrieval is nearly off, with similar prompts for {found.chosen.retrieved:.0%} of the held-out "
            f"rows and a share of {found.chosen.share:g} there, so the decoder forecasts the rest; more rows may help",
            file=sys.stderr,
        )


def _rendered(model: str | None) -> Callable[[str], str]:
    if model is None:
        return lambda text: text
    from skipjoin.model.folder import model_folder  # noqa: PLC0415
    from skipjoin.model.tokenizer import load_tokenizer  # noqa: PLC0415

    tokenizer = load_tokenizer(model_folder(model))
    return lambda text: tokenizer.decode(tokenizer.chat([{"role": "user", "content": text}]))


def _untrained(options: TrainOptions, text_of: Callable[[Any], str]) -> Forecaster:
    from skipjoin.forecast import make_forecaster, words  # noqa: PLC0415

    config = ForecastConfig(
        forecaster=options.forecaster, forecast_encoder=options.encoder, forecast_entries=options.entries
    )
    # Trained states read texts, so that they fit any tokenizer.
    return make_forecaster(config, text_of=text_of, read=lambda prompt: words(text_of(prompt)))


def _trained(forecaster: Forecaster, samples: list[Sample], parts: list[int], show: Progress) -> Training:
    from skipjoin.forecast.alise import Alise  # noqa: PLC0415
    from skipjoin.forecast.train import train_alise, train_online  # noqa: PLC0415

    if isinstance(forecaster.model, Alise):
        return train_alise(forecaster, forecaster.model, samples, parts, show)
    return train_online(forecaster, samples, parts, show)


def _parts(path: Path, samples: list[Sample]) -> list[int]:
    from skipjoin.forecast.train import HALVES, TRAINING, part_of_group  # noqa: PLC0415

    found = [
        part_of_group(str(described.get("conv") or " ".join(map(str, sample.prompt))))
        for described, sample in zip(objects_of(path), samples, strict=True)
    ]
    counts = Counter(found)
    training, *halves = (counts[part] for part in (TRAINING, *HALVES))
    if min(training, *(2 * half for half in halves)) < _MIN_ROWS:
        raise ConfigError(
            f"{path}: {training} rows to train with and {' + '.join(map(str, halves))} held out, fewer than "
            f"{_MIN_ROWS} and {_MIN_ROWS // 2} in each half"
        )
    return found


def _check_order(found: Training) -> None:
    if found.order < found.prior_order:
        raise ConfigError(
            f"nothing is written, because the forecaster puts {found.order:.3f} of the held-out pairs in order and the "
            f"prior, which reads no words, {found.prior_order:.3f}; use --forecaster prior, or more rows"
        )


def _encoder_setting(encoder: str) -> str:
    return encoder if encoder in ("hashed", "minilm") else str(Path(encoder).absolute())


def _shown(found: Training) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "held out": found.held_out,
        "pairs in order": f"{found.order:.3f}",
        "by the prior": f"{found.prior_order:.3f}",
    }
    if found.chosen is None:
        return shown
    return shown | {
        "k": found.chosen.neighbors,
        "s0": found.chosen.threshold,
        "share of retrieval": found.chosen.share,
        "where found": f"{found.chosen.retrieved:.0%}",
        "epochs": found.chosen.epochs,
    }
