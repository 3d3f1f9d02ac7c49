from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

from skipjoin.cli.options import plain_errors
from skipjoin.cli.tables import Table
from skipjoin.options import ConfigError, Setting
from skipjoin.recipes import DEFAULT, Recipe, find, in_file, listed


def recipes(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Recipes to list, or Python files with recipes (default: all except those of files)."),
    ] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, by recipe.")] = False,
) -> None:
    """List the schedulers, and the parameters that --set accepts for each."""
    with plain_errors():
        found = _named(names) if names else listed()
    if as_json:
        print(json.dumps({name: _described(recipe) for name, recipe in sorted(found.items())}, indent=1))
        return
    console = Console(highlight=False)
    alike: dict[type, list[Recipe]] = {}
    for recipe in sorted(found.values(), key=lambda item: item.name != DEFAULT):
        alike.setdefault(recipe.params, []).append(recipe)
    for group in alike.values():
        for recipe in group:
            default = " (default)" if recipe.name == DEFAULT else ""
            console.print(f"[bold]{escape(recipe.name)}[/bold]{default}: {escape(recipe.summary)}")
        console.print(Padding(_parameters(group[0]), (0, 0, 1, 4)))


def _named(names: Sequence[str]) -> dict[str, Recipe]:
    found: dict[str, Recipe] = {}
    for name in names:
        if not name.endswith(".py"):
            recipe = find(name)
            found[recipe.name] = recipe
            continue
        own = in_file(Path(name).absolute())
        if not own:
            raise ConfigError(f"{name} has no function with the decorator @recipe of skipjoin.policy")
        found |= {f"{name}:{item}": replace(recipe, name=f"{name}:{item}") for item, recipe in own.items()}
    return found


def _parameters(recipe: Recipe) -> Table | str:
    if not recipe.parameters:
        return "no parameters"
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for wraps in (False, False, True):
        table.add_column(no_wrap=not wraps)
    for setting in recipe.parameters.values():
        default = "" if setting.default is None else f"={_value(setting.default)}"
        bounds = f" {setting.bounds}" if setting.bounds and not setting.option.choices else ""
        table.add_row(f"{setting.name}{default}", f"{setting.kind.__name__}{bounds}", setting.help)
    return table


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _described(recipe: Recipe) -> dict[str, Any]:
    return {
        "summary": recipe.summary,
        "default": recipe.name == DEFAULT,
        "parameters": {name: _parameter(setting) for name, setting in recipe.parameters.items()},
    }


def _parameter(setting: Setting) -> dict[str, Any]:
    option = setting.option
    bounds = {
        "at_least": option.low,
        "above": option.above,
        "at_most": option.high,
        "choices": list(option.choices) or None,
    }
    return {
        "type": setting.kind.__name__,
        "default": setting.default,
        **{name: value for name, value in bounds.items() if value is not None},
        "help": setting.help,
    }
