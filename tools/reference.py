"""Write the generated pages of docs/reference from the tables of options, metrics, recipes and keywords.

python tools/reference.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import typer

from markdown_tables import codes, table
from reference_models import gguf, models
from skipjoin.cli import app
from skipjoin.cli.options import flags_of
from skipjoin.config import EngineConfig, ForecastConfig, ServerConfig
from skipjoin.observe.metric_definition import Metric
from skipjoin.observe.metric_table import API_METRICS, ENGINE_METRICS
from skipjoin.options import Setting, settings_of
from skipjoin.recipes import DEFAULT, RECIPES, Forecasts
from skipjoin.sampling import SamplingParams, parameters_of
from skipjoin.schemas.formats import COMPILED_FORMATS, IGNORED_FORMATS, PATTERN_FORMATS
from skipjoin.schemas.keywords import ENFORCED, IGNORED, REFUSED

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
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
        "gguf.md": gguf,
        "metrics.md": _metrics,
        "models.md": models,
        "recipes.md": _recipes,
        "sampling.md": _sampling,
        "schemas.md": _schemas,
    }
    return {name: "\n".join([NOTE, "", *make()]).rstrip() + "\n" for name, make in makers.items()}


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
        return codes(option.choices)
    low, high = option.low if option.above is None else option.above, option.high
    start = "" if low is None else f"{'at least' if option.above is None else 'above'} {_number(low)}"
    if high is not None and high < UNLIMITED:
        start = f"{_number(low)} to {_number(high)}" if option.above is None else f"{start}, at most {_number(high)}"
    words = [f"or `{word}`" for word in setting.words]
    return " ".join([", ".join(part for part in (UNITS.get(setting.metavar or "", ""), start) if part), *words])


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
            meaning += f" Also {codes(aliases)}." if aliases else ""
            is_shown = setting.option.is_common or setting.option.is_positional
            python = f"`{setting.name}`" if setting in in_python else ""
            rows.append([f"**`{name}`**" if is_shown else f"`{name}`", values, default, meaning, python])
        yield f"## {group}"
        yield ""
        yield from table(["setting", "values", "default", "meaning", "`LLM`"], rows)


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
            yield from table(["option", "values", "default", "meaning"], rows)
        for page, flags in elsewhere.items():
            yield from (f"As in {page}: {codes(flags)}.", "")


def _flags(parameter: Any) -> str:
    value = "" if getattr(parameter, "is_flag", True) or not parameter.metavar else f" {parameter.metavar}"
    names = [_flag(parameter)] if parameter.param_type_name == "argument" else parameter.opts
    return codes(f"{name}{value}" for name in names)


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
        yield from table(["metric", "type", "labels", "meaning"], map(_metric_row, metrics))


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
    yield from table(["recipe", "what it does", "forecasts"], rows)
    alike: dict[tuple[str, ...], list[str]] = {}
    for one in ordered:
        for name, setting in one.parameters.items():
            alike.setdefault((name, *_described(setting)), []).append(one.name)
    yield from ("## Parameters", "")
    yield from table(
        ["parameter", "recipes", "values", "default", "meaning"],
        ([f"`{name}`", codes(recipes), *cells] for (name, *cells), recipes in sorted(alike.items())),
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
        own = codes(parameter.own)
        items = "" if parameter.max_items is None else f"at most {parameter.max_items}"
        bounds = ", ".join(part for part in (items, parameter.bounds) if part)
        star = "\\*" if parameter.is_of_model else ""
        rows.append([shown + star, bounds, own, _default(row.default, ""), _sentence(parameter.help)])
    yield from table(["parameter", "values", "fields of bodies", "default", "meaning"], rows)


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
    yield from table(
        ["keywords", "how", "example", "allowed", "not allowed"],
        ([codes(row.names), _sentence(row.meaning), *map(_json, (row.example, row.good, row.bad))] for row in ENFORCED),
    )
    yield from ("## Ignored", "", "Unknown keywords are ignored too.", "")
    yield from table(["keywords", "what they do"], ([codes(row.names), _sentence(row.meaning)] for row in IGNORED))
    yield from ("## Refused", "", "A keyword that constrains nothing is ignored.", "")
    yield from table(
        ["keyword", "remedy", "constrains nothing"],
        ([f"`{row.name}`", _sentence(row.remedy), _sentence(row.idle) if row.idle else ""] for row in REFUSED),
    )
    yield from (
        "## Formats",
        "",
        f"Enforced: {codes([*COMPILED_FORMATS, *PATTERN_FORMATS])}.",
        "",
        f"Ignored, because they say nothing about the text or no grammar expresses them: {codes(IGNORED_FORMATS)}.",
        "Formats of other types than strings are ignored, and so are unknown ones beside a pattern. Others are",
        "refused.",
        "",
    )


def _json(value: Any) -> str:
    return f"`{json.dumps(value)}`"


def main() -> None:
    """Write the pages."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
