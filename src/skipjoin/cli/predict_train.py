from __future__ import annotations

import sys
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

# Rows that are needed on either side of the split.
_MIN_ROWS = 10
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


@predict.command()
@takes(values=Section(TrainOptions))
def train(*, values: Values) -> None:
    """Train a forecaster on a trace, for `serve --forecast-state DIR` and `simulate --predictor state:DIR`.

    One row in five is held out, by the column 'conv' if there is one and by equal prompts otherwise. Of ALISE, the
    other rows train the index and the decoder. The held-out rows choose the number of neighbors, the similarity from
    which one counts and the decoder's epochs, calibrate the forecasts, and are learned last.
    """
    from skipjoin.forecast.trained import write_trained  # noqa: PLC0415

    options = TrainOptions(**values)
    trace = read_trace(options.trace)
    print(trace.describe(), file=sys.stderr)
    trace.check_texts()
    samples, texts = samples_of(trace, None)
    rendered = _rendered(options.model)
    forecaster = _untrained(options, lambda prompt: rendered(texts[tuple(prompt)]))
    with progress_bars() as show:
        about = _trained(options, forecaster, samples, show)
    write_trained(options.out, forecaster, _encoder_setting(options.encoder), {"trace": trace.name} | about)
    print(f"{options.out}: {len(samples)} rows" + "".join(f", {name} {value}" for name, value in _shown(about).items()))


def _rendered(model: str | None) -> Callable[[str], str]:
    """Return the function that puts a prompt into the chat template of a model, as a server decodes it."""
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


def _trained(options: TrainOptions, forecaster: Forecaster, samples: list[Sample], show: Progress) -> dict[str, Any]:
    from skipjoin.forecast.alise import Alise  # noqa: PLC0415
    from skipjoin.forecast.train import train_alise, train_online  # noqa: PLC0415

    if not isinstance(forecaster.model, Alise):
        train_online(forecaster, samples, show)
        return {"rows": len(samples)}
    held_out = _held_out(options.trace, samples)
    found = train_alise(forecaster, forecaster.model, samples, held_out, show)
    return asdict(found) | {"chosen": found.chosen._asdict()}


def _held_out(path: Path, samples: list[Sample]) -> list[bool]:
    from skipjoin.forecast.train import is_held_out  # noqa: PLC0415

    groups = (
        str(described.get("conv") or " ".join(map(str, sample.prompt)))
        for described, sample in zip(objects_of(path), samples, strict=True)
    )
    found = [is_held_out(group) for group in groups]
    if min(sum(found), len(found) - sum(found)) < _MIN_ROWS:
        raise ConfigError(
            f"{path}: {len(found) - sum(found)} rows to train with and {sum(found)} held out, fewer than {_MIN_ROWS}"
        )
    return found


def _encoder_setting(encoder: str) -> str:
    return encoder if encoder in ("hashed", "minilm") else str(Path(encoder).absolute())


def _shown(about: dict[str, Any]) -> dict[str, Any]:
    if "chosen" not in about:
        return {}
    chosen = about["chosen"]
    return {
        "held out": about["held_out"],
        "k": chosen["neighbors"],
        "s0": chosen["threshold"],
        "by retrieval": f"{chosen['retrieved']:.0%}",
        "error of log lengths": f"{chosen['error']:.3f}",
        "of the decoder alone": f"{about['decoder_error']:.3f} ({about['epochs']} epochs)",
    }
