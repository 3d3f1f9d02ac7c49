from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from skipjoin.cli.options import BAD_INPUT
from skipjoin.extras import why_not_found
from skipjoin.system.garbage import without_garbage_collection

# Longer than any first sentence of a command's help.
_WHOLE = 10_000


class CommandGroup(TyperGroup):
    """Group whose help has the first sentence of each command, which click would cut to one line."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (name, item.get_short_help_str(_WHOLE))
                    for name, item in commands
                    if item is not None and not item.hidden
                ]
            )


class Commands(typer.Typer):
    """Typer application whose help groups options, with untruncated texts on a terminal of 80 columns."""

    def __init__(self, help: str, *, cls: type[CommandGroup] = CommandGroup, **options: Any) -> None:
        # Typer's rich help would truncate names on a narrow terminal.
        super().__init__(help=help, no_args_is_help=True, rich_markup_mode=None, cls=cls, **options)

    def command(self, name: str | None = None, **options: Any) -> Callable[[Any], Any]:
        return super().command(name, cls=_GroupedCommand, **options)


class _GroupedCommand(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message += _origin(ctx, error.param)
            raise

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            # However Skipjoin was started, such as with `python -m`.
            name = "skipjoin" + ctx.command_path.removeprefix(ctx.find_root().info_name)
            if (why := why_not_found(error, name)) is None:
                raise
            print(f"error: {why}", file=sys.stderr)
            raise typer.Exit(BAD_INPUT) from error

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or usual, []).append(record)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _origin(ctx: Any, parameter: Any) -> str:
    name = getattr(parameter, "name", None)
    source = getattr(ctx.get_parameter_source(name), "name", "")
    if source == "ENVIRONMENT":
        return f" (from {parameter.envvar}={os.environ.get(parameter.envvar)})"
    return f" (from {ctx.params['config']}: {ctx.default_map[name]})" if source == "DEFAULT_MAP" else ""


class LazyCommands(Mapping[str, Any]):
    """Commands imported when first asked for, by module and attribute: a function, or `Commands` of its own."""

    def __init__(self, places: Mapping[str, tuple[str, str]]) -> None:
        self._places = places
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            module, attribute = self._places[name]
            with without_garbage_collection():
                found = getattr(import_module(module), attribute)
            if not isinstance(found, Commands):
                function, found = found, Commands(help="", add_completion=False)
                found.command(name)(function)
            self._loaded[name] = get_command(found)
            self._loaded[name].name = name
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
