"""Write the generated pages of docs/reference from the tables of options, metrics, recipes and keywords.

python tools/reference.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import typer

from skipjoin.cli import app
from skipjoin.cli.options import flags_of
from skipjoin.config import EngineConfig, ForecastConfig, ServerConfig
from skipjoin.model.families.encoder import Encoder
from skipjoin.model.family import _families, _register_own
from skipjoin.model.gguf.architectures import ARCHITECTURES, VARIANTS
from skipjoin.model.gguf.file import TENSOR_TYPES, TensorType
from skipjoin.model.gguf.groups import LAYOUTS
from skipjoin.model.gguf.tokenizer import SCHEMES
from skipjoin.observe.metric_definition import Metric
from skipjoin.observe.metric_table import API_METRICS, ENGINE_METRICS
from skipjoin.options import Setting, settings_of
from skipjoin.recipes import DEFAULT, RECIPES, Forecasts
from skipjoin.sampling import SamplingParams, parameters_of
from skipjoin.schemas.keywords import COMPILED_FORMATS, ENFORCED, IGNORED, IGNORED_FORMATS, PATTERN_FORMATS, REFUSED

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
ARCHITECTURE_RECORD = FOLDER.parents[1] / "tests" / "model" / "architectures.json"
MODEL_FORMATS = FOLDER.parents[1] / "tests" / "model" / "model_formats.json"
NOTE = "<!-- Written by `make reference` from the source. Do not edit. -->"
UNITS = {"SECONDS": "seconds", "MILLISECONDS": "ms", "MS": "ms", "GIB": "GiB", "BYTES": "bytes", "GBPS": "Gb/s"}
# Larger upper bounds only reject nonsense.
UNLIMITED = 1_000_000
# Groups of metrics, by the beginning of their names. The first that fits counts.
METRIC_GROUPS = {
    "Batches": ("batch_lines", "batches", "batch_generation"),
    "Forecasts": ("forecast",),
    "KV cache and preemption": (
        "kv_",
        "prefix_cache",
        "num_preemptions",
        "swap_",
        "recomputed",
        "num_requests_swapped",
    ),
    "Objectives and deadlines": ("slo_", "deadline_"),
    "HTTP server": ("http_", "connections_", "api_", "admission_"),
    "Replicas": ("replica", "requests_"),
    "Feedback queue": ("queue_",),
    "Engine": ("engine_", "stage_", "iteration_", "batch_cap"),
    "Requests and latency": ("",),
}
FORECASTS = {Forecasts.NONE: "", Forecasts.LEARNED: "predicted", Forecasts.TRUE: "true lengths"}


def pages() -> dict[str, str]:
    makers = {
        "cli.md": _cli,
        "configuration.md": _configuration,
        "gguf.md": _gguf,
        "metrics.md": _metrics,
        "models.md": _models,
        "recipes.md": _recipes,
        "sampling.md": _sampling,
        "schemas.md": _schemas,
    }
    return {name: "\n".join([NOTE, "", *make()]).rstrip() + "\n" for name, make in makers.items()}


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in line) + " |" for line in lines] + [
        ""
    ]


def _codes(texts: Iterable[object]) -> str:
    return ", ".join(f"`{text}`" for text in texts)


# -- options ------------------------------------------------------------------------------------------------------


def _meaning(text: str) -> tuple[str, str]:
    """Return a help text without its default, and the default that it describes."""
    found = re.search(r"\s*\(default: (.*)\)(?=\.?$)", text)
    return (text.replace(found[0], ""), found[1]) if found else (text, "")


def _sentence(text: str) -> str:
    # An angle bracket or an asterisk would be markup.
    return text.rstrip(".").replace("*", "\\*") + "."


def _values(setting: Setting) -> str:
    option = setting.option
    if option.choices:
        return _codes(option.choices)
    low, high = option.low if option.above is None else option.above, option.high
    start = "" if low is None else f"{'at least' if option.above is None else 'above'} {_number(low)}"
    if high is not None and high < UNLIMITED:
        start = f"{_number(low)} to {_number(high)}" if option.above is None else f"{start}, at most {_number(high)}"
    words = [f"or `{word}`" for word in setting.words]
    return " ".join([", ".join(part for part in (UNITS.get(option.metavar or "", ""), start) if part), *words])


def _number(value: float | None) -> str:
    return str(value) if value is None or value % 1 else str(int(value))


def _default(value: Any, described: str) -> str:
    if described or value is None or value is MISSING or value in ((), [], {}, ""):
        return described or ("required" if value is MISSING else "")
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{_number(value) if isinstance(value, float) else value}`"


def _described(setting: Setting) -> list[str]:
    """Return the values, default and meaning of a setting, as cells."""
    text, described = _meaning(setting.option.help)
    return [_values(setting), _default(setting.default, described), _sentence(text)]


def _grouped(settings: Iterable[Setting]) -> dict[str, list[Setting]]:
    groups: dict[str, list[Setting]] = {}
    for setting in settings:
        groups.setdefault(setting.option.group or "Options", []).append(setting)
    return groups


def _configuration() -> Iterator[str]:
    yield from (
        "# Configuration",
        "",
        "All settings of `skipjoin serve`. A setting named `max-num-seqs` is the flag `--max-num-seqs 64`, the line",
        "`max-num-seqs: 64` of a YAML file for `--config`, and the variable `SKIPJOIN_MAX_NUM_SEQS=64`. Flags take",
        "precedence over the environment, and the environment over the file. `skipjoin generate` has the settings with",
        "a name in the last column, which is their keyword argument of `LLM`. `skipjoin serve --help` shows those in",
        "**bold**, and `--help-all` shows all.",
        "",
    )
    in_python = _of_llm()
    for group, members in _grouped(_configured()).items():
        rows = []
        for setting in members:
            name, *aliases = sorted(flags_of(setting), key=lambda flag: not flag.startswith("--"))
            name = setting.name if setting.option.is_positional else name.partition("/")[0].lstrip("-")
            values, default, meaning = _described(setting)
            meaning += f" Also {_codes(aliases)}." if aliases else ""
            is_shown = setting.option.is_common or setting.option.is_positional
            python = f"`{setting.name}`" if setting in in_python else ""
            rows.append([f"**`{name}`**" if is_shown else f"`{name}`", values, default, meaning, python])
        yield f"## {group}"
        yield ""
        yield from _table(["setting", "values", "default", "meaning", "`LLM`"], rows)


def _configured() -> list[Setting]:
    return [*_of_llm(), *settings_of(ServerConfig).values()]


def _of_llm() -> list[Setting]:
    settings = [one for source in (EngineConfig, ForecastConfig) for one in settings_of(source).values()]
    return [one for one in settings if not one.option.is_internal]


# -- commands -----------------------------------------------------------------------------------------------------


def _commands(group: Any, path: tuple[str, ...] = ("skipjoin",)) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, (*path, name))
        else:
            yield (*path, name), command


def _cli() -> Iterator[str]:
    yield from (
        "# Command line",
        "",
        "Every command has `--help`. Where `--help` omits options, `--help-all` shows all of them. `--config FILE`",
        "reads options from a YAML file, by the names of the flags. An option that is on or off also has a form",
        "`--no-...`, to override a file or the environment.",
        "",
    )
    # Each option is described once.
    pages = {id(setting): "[Configuration](configuration.md)" for setting in _configured()}
    for path, command in _commands(typer.main.get_command(app)):
        title = " ".join(path)
        settings: Mapping[str, Setting] = getattr(command.callback, "settings", {})
        everything = next(
            (few for few in (_configured(), _of_llm()) if set(map(id, few)) <= set(map(id, settings.values()))), []
        )
        groups: dict[str, list[list[str]]] = {}
        elsewhere: dict[str, list[str]] = {}
        for parameter in command.params:
            if parameter.name in ("help", "help_all", "config"):
                continue
            setting = settings.get(parameter.name)
            if setting is not None and any(setting is one for one in everything):
                continue
            if setting is not None and id(setting) in pages:
                elsewhere.setdefault(pages[id(setting)], []).append(_flag(parameter))
                continue
            if setting is not None:
                pages[id(setting)] = f"[{title}](#{title.replace(' ', '-')})"
            cells = _described(setting) if setting is not None else _plain(parameter)
            group = (parameter.rich_help_panel if parameter.param_type_name == "option" else None) or ""
            groups.setdefault(group, []).append([_flags(parameter), *cells])
        yield from (f"## {title}", "", " ".join((command.help or "").split()), "")
        if everything:
            which = (
                "All settings"
                if len(everything) == len(_configured())
                else "All settings with a keyword argument of `LLM`"
            )
            yield from (f"{which} of [Configuration](configuration.md) are options.", "")
        for group, rows in groups.items():
            if group and len(groups) > 1:
                yield from (f"{group}:", "")
            yield from _table(["option", "values", "default", "meaning"], rows)
        for page, flags in elsewhere.items():
            yield from (f"As in {page}: {_codes(flags)}.", "")


def _flags(parameter: Any) -> str:
    value = "" if getattr(parameter, "is_flag", True) or not parameter.metavar else f" {parameter.metavar}"
    names = [_flag(parameter)] if parameter.param_type_name == "argument" else parameter.opts
    return _codes(f"{name}{value}" for name in names)


def _flag(parameter: Any) -> str:
    is_argument = parameter.param_type_name == "argument"
    return str(parameter.metavar or parameter.name) if is_argument else str(parameter.opts[0])


def _plain(parameter: Any) -> list[str]:
    text, described = _meaning(parameter.help or "")
    default = MISSING if parameter.required else parameter.default
    return ["", _default(default, described), _sentence(text)]


# -- metrics and recipes ------------------------------------------------------------------------------------------


def _metrics() -> Iterator[str]:
    yield from (
        "# Metrics",
        "",
        "`GET /metrics` exports these in Prometheus' format, with the prefix `skipjoin:`. `--metrics-compat vllm`",
        "also exports those without a star with the prefix `vllm:`, summed over labels that vLLM does not have.",
        "The unit is in the name. The label `class` is `real-time` or `best-effort`.",
        "",
    )
    groups: dict[str, list[Metric]] = {name: [] for name in METRIC_GROUPS}
    for metric in (*ENGINE_METRICS, *API_METRICS):
        start = next(name for name, starts in METRIC_GROUPS.items() if metric.name.startswith(starts))
        groups[start].append(metric)
    for group, metrics in reversed(groups.items()):
        yield f"## {group}"
        yield ""
        yield from _table(["metric", "type", "labels", "meaning"], map(_metric_row, metrics))


def _metric_row(metric: Metric) -> list[str]:
    labels = ["`class`"] if metric.by_class else []
    if metric.label:
        labels.append(f"`{metric.label}`: {', '.join(metric.values)}")
    star = "" if metric.in_vllm else " \\*"
    return [f"`{metric.name}`{star}", metric.kind, "; ".join(labels), _sentence(metric.help)]


def _recipes() -> Iterator[str]:
    yield from (
        "# Recipes",
        "",
        "A recipe is a scheduler: `--recipe NAME` selects it, and `--set PARAMETER=VALUE` sets a parameter. Recipes",
        "that read predicted lengths need a forecaster; those that read true lengths are for experiments.",
        "",
    )
    ordered = sorted(RECIPES.values(), key=lambda one: one.name != DEFAULT)
    rows = [
        [
            f"`{one.name}`" + (" (default)" if one.name == DEFAULT else ""),
            _sentence(one.summary),
            FORECASTS[one.forecasts],
        ]
        for one in ordered
    ]
    yield from _table(["recipe", "what it does", "forecasts"], rows)
    alike: dict[tuple[str, ...], list[str]] = {}
    for one in ordered:
        for name, setting in one.parameters.items():
            alike.setdefault((name, *_described(setting)), []).append(one.name)
    yield from ("## Parameters", "")
    yield from _table(
        ["parameter", "recipes", "values", "default", "meaning"],
        ([f"`{name}`", _codes(recipes), *cells] for (name, *cells), recipes in sorted(alike.items())),
    )


# -- schemas ----------------------------------------------------------------------------------------------------------


def _sampling() -> Iterator[str]:
    yield from (
        "# Sampling parameters",
        "",
        "Fields of `SamplingParams`, and of the bodies of all endpoints that generate unless the third column has",
        "others. Bodies may leave all of them out. The model's `generation_config.json` sets the defaults of",
        "those with an asterisk. Names in **bold** are OpenAI's.",
        "",
    )
    rows = []
    for name, row in parameters_of(SamplingParams).items():
        parameter = row.parameter
        shown = f"**`{name}`**" if parameter.is_openai else f"`{name}`"
        own = _codes(parameter.own)
        items = "" if parameter.max_items is None else f"at most {parameter.max_items}"
        bounds = ", ".join(part for part in (items, parameter.bounds) if part)
        star = "\\*" if parameter.is_of_model else ""
        rows.append([shown + star, bounds, own, _default(row.default, ""), _sentence(parameter.help)])
    yield from _table(["parameter", "values", "fields of bodies", "default", "meaning"], rows)


def _schemas() -> Iterator[str]:
    yield from (
        "# JSON schemas",
        "",
        "What [structured output](../structured-output.md) does with each keyword of a schema. An output that is whole",
        "follows all enforced keywords. A refused keyword is a 400 that names the keyword, its place and a remedy; in",
        "the parameters of a tool that is not `strict` it is ignored instead.",
        "",
        "## Enforced",
        "",
    )
    yield from _table(
        ["keywords", "how", "example", "allowed", "not allowed"],
        (
            [_codes(row.names), _sentence(row.meaning), *map(_json, (row.example, row.good, row.bad))]
            for row in ENFORCED
        ),
    )
    yield from ("## Ignored", "", "Unknown keywords are ignored too.", "")
    yield from _table(["keywords", "what they do"], ([_codes(row.names), _sentence(row.meaning)] for row in IGNORED))
    yield from ("## Refused", "", "A keyword that constrains nothing is ignored.", "")
    yield from _table(
        ["keyword", "remedy", "constrains nothing"],
        ([f"`{row.name}`", _sentence(row.remedy), _sentence(row.idle) if row.idle else ""] for row in REFUSED),
    )
    yield from (
        "## Formats",
        "",
        f"Enforced: {_codes([*COMPILED_FORMATS, *PATTERN_FORMATS])}.",
        "",
        f"Ignored, because they say nothing about the text: {_codes(IGNORED_FORMATS)}. Formats of other types than",
        "strings are ignored, and so are unknown ones beside a pattern. Others are refused.",
        "",
    )


def _models() -> Iterator[str]:
    yield from (
        "# Models",
        "",
        "Which family runs from which format of weights on a CPU, as `tests/model/test_model_formats.py` ran it:",
        "*native* weights keep their bits, *widened* ones take those of `--dtype`, by default `bfloat16`, and",
        "others are *refused* with a sentence that has a remedy. [GGUF files](gguf.md) has all types of those.",
        "",
    )
    record = json.loads(MODEL_FORMATS.read_text(encoding="utf-8"))
    rows = [[family, *map(_outcome, formats.values())] for family, formats in record.items()]
    yield from _table(["family", *next(iter(record.values()))], rows)
    yield (
        "An NVIDIA GPU runs what torch's operations run. `quantization int8` needs the compiled operations of a CPU. "
        "`skipjoin convert` makes safetensors of `.bin` files. GGUF files of Mistral and Mixtral have the architecture "
        "`llama`, and those of OLMo 3 `olmo2`. Of models that also see or hear, such as Gemma 3 and "
        "4, LLaVA, Llama 4 and Qwen-VL, the language model is served. Of other families, GGUF files are refused."
    )
    yield from _architectures()
    yield from _encoders()


def _encoders() -> Iterator[str]:
    _register_own()
    names = [name for one in _families.values() if issubclass(one.decoder, Encoder) for name in one.architectures]
    yield from (
        "",
        "## Encoders",
        "",
        "Models of [embeddings and scores](../api.md#embeddings-and-scores), which `tests/engine/test_embeddings.py`",
        f"compares with transformers: {_codes(names)}.",
        "Decoders with files of sentence-transformers embed, too.",
    )


def _architectures() -> Iterator[str]:
    record = json.loads(ARCHITECTURE_RECORD.read_text(encoding="utf-8"))
    names: dict[str, list[str]] = {}
    for name, (outcome, why) in record["architectures"].items():
        names.setdefault(f"{outcome}: {why}" if why else outcome, []).append(name)
    yield from (
        "",
        "## Architectures",
        "",
        f"The causal decoders of transformers {record['transformers']} with small random weights, as",
        "`tests/model/architectures.py` ran them on a CPU, and compared logits of chunked prompts with those of",
        "transformers. Rows of all that run had the same bits in each batch and chunking, with `dtype float32`,",
        "`dtype bfloat16` and `kv_cache_dtype int8`. What runs through transformers is compared again when it is",
        "loaded; see [Serve](../serve.md#through-transformers).",
        "",
    )
    order = sorted(names, key=lambda how: (how.startswith("not tried"), how.startswith("refused"), how != "native"))
    yield from _table(["how", "architectures"], [[how.replace("|", " "), _codes(names[how])] for how in order])


def _outcome(by_operations: Mapping[str, str]) -> str:
    compiled, torch = by_operations["compiled"], by_operations["torch"]
    return compiled if compiled == torch else f"{compiled}; torch: {torch}"


def _gguf() -> Iterator[str]:
    yield "# GGUF files"
    yield ""
    yield (
        "`skipjoin serve FILE.gguf` reads a model with its tokenizer, chat template and sampling defaults. Headers are "
        "checked against the size of the file before anything is allocated."
    )
    yield ""
    served = [(name, [of, *(VARIANTS[name][1:] if name in VARIANTS else ())]) for name, of in ARCHITECTURES.items()]
    rows = [
        [f"`{name}`", ", ".join(dict.fromkeys(of.name.removesuffix("ForCausalLM") for of in found))]
        for name, found in served
    ]
    yield from _table(["`general.architecture`", "served as"], rows)
    yield (
        "Mistral's files have the architecture `llama`. Others are refused. Of gpt-oss and Phi-3, our logits are those "
        "of their own settings, and not those of llama.cpp, which rounds the ramp of YaRN and ignores the window."
    )
    yield ""
    kinds = [[kind.name, f"{8 * kind.size / kind.elements:g}", _kept(kind)] for kind in TENSOR_TYPES.values()]
    yield from _table(["type", "bits per weight", "in memory"], kinds)
    yield (
        "Compiled CPU code multiplies the codes of a file; see [CPUs](../cpu.md#weights-in-codes). Codes of 5 "
        "bits take 6, and scales of K and XS types are rounded to float16. Elsewhere, and where the table says so, "
        "numbers are those of llama.cpp's package `gguf`, and the log says what was widened."
    )
    yield ""
    yield f"Tokenizers of SentencePiece (`llama`), and byte-level ones (`gpt2`) that split text by {_codes(SCHEMES)}."
    yield ""
    yield "## Quantized safetensors"
    yield ""
    rows = [
        ["`awq`", "4 bits, version gemm", "codes"],
        ["`gptq`", "4 and 8 bits, zero points of both versions, act-order", "codes"],
        ["`compressed-tensors`", "pack-quantized and int-quantized, 4 and 8 bits", "codes"],
        ["`compressed-tensors`", "mxfp4-pack-quantized", "codes"],
        ["`compressed-tensors`", "float-quantized (fp8)", "widened"],
        ["`fp8`", "with a scale per block or matrix", "widened"],
    ]
    yield from _table(["`quant_method`", "layouts", "in compiled CPU code"], rows)
    yield "Elsewhere weights are widened to `--dtype`. Scales of inputs are ignored."


def _kept(kind: TensorType) -> str:
    if kind.elements == 1:
        return "as stored, or in `--dtype`"
    layout = LAYOUTS.get(kind.name)
    if layout is None:
        return "widened to `--dtype`, by default `bfloat16`"
    scales = 8 * layout.scale_bytes * (1 + layout.has_minimums) / layout.group
    return f"codes of {layout.bits} bits, {layout.bits + scales:g} per weight"


def _json(value: Any) -> str:
    return f"`{json.dumps(value)}`"


def main() -> None:
    """Write the pages."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
