from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from skipjoin.cli.options import flags_of
from skipjoin.config import EngineConfig, ForecastConfig, ServerConfig
from skipjoin.observe.metric_table import API_METRICS, ENGINE_METRICS
from skipjoin.options import Option, Setting, settings_of
from skipjoin.recipes import RECIPES

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import reference  # noqa: E402

PAGES = reference.pages()


def rows(page: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in PAGES[page].splitlines() if line.startswith("| ")]


@pytest.mark.parametrize("name", PAGES)
def test_generated_page_is_current(name: str) -> None:
    file = reference.FOLDER / name
    assert file.is_file(), f"{file} is missing; run: make reference"
    assert file.read_text() == PAGES[name], f"{file} is not current; run: make reference"


def test_every_setting_is_documented_once() -> None:
    named = Counter(match[1] for row in rows("configuration.md") if (match := re.match(r"\**`([\w-]+)`", row[0])))
    settings = [
        setting for source in (EngineConfig, ForecastConfig, ServerConfig) for setting in settings_of(source).values()
    ]
    options = [setting for setting in settings if not (setting.option.is_internal or setting.option.is_positional)]
    flags = [next(flag for flag in flags_of(option) if flag.startswith("--")) for option in options]
    assert len(options) > 80
    assert named == Counter([*(flag.partition("/")[0][2:] for flag in flags), "model"])


def test_every_metric_and_recipe_is_documented_once() -> None:
    metrics = Counter(match[1] for row in rows("metrics.md") if (match := re.match(r"`(\w+)`", row[0])))
    assert metrics == Counter(metric.name for metric in (*ENGINE_METRICS, *API_METRICS))
    recipes = [row[0].split("`")[1] for row in rows("recipes.md") if len(row) <= 3 and row[0].startswith("`")]
    assert sorted(recipes) == sorted(RECIPES)


def test_no_option_of_a_command_is_described_twice() -> None:
    described = Counter((row[0], row[-1]) for row in rows("cli.md") if row[0].startswith("`--s"))
    assert described[("`--slo-ttft SECONDS`", "Time to the first token.")] == 1
    assert "`--slo-ttft`" in PAGES["cli.md"].partition("## skipjoin bench")[2]


@pytest.mark.parametrize(
    ("option", "cells"),
    [
        (Option("A size.", low=1, high=9), ["1 to 9", "`3`", "A size."]),
        (Option("A size (default: the model's).", above=0), ["above 0", "the model's", "A size."]),
        (Option("A size", metavar="GIB", low=0, high=1e6), ["GiB, at least 0", "`3`", "A size."]),
        (Option("A type", choices=("a", "b")), ["`a`, `b`", "`3`", "A type."]),
    ],
)
def test_row_has_the_unit_bounds_and_default(option: Option, cells: list[str]) -> None:
    setting = Setting("size", int, (), False, 3, option)
    assert reference._described(setting) == cells
