"""Command line, one module per command.

Modules are imported when they are needed, so that `skipjoin --help` does not load torch.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, cast

import typer

from skipjoin.cli.commands import CommandGroup, Commands, LazyCommands
from skipjoin.version import VERSION

# The modules of the commands, in the order of the help.
_MODULES = {
    "serve": "serve",
    "demo": "demo",
    "generate": "generate",
    "chat": "chat",
    "console": "console",
    "top": "top",
    "explain": "explain",
    "recipes": "recipes",
    "convert": "convert",
    "profile": "profile",
    "simulate": "simulate",
    "replay": "replay",
    "bench": "bench",
    "plot": "plot",
    "pull": "models",
    "list": "models",
    "env": "environment",
    "predict": "predict_train",  # adds its command to those of `predict`
    "batch": "batch",
}
# Commands whose functions have other names.
_FUNCTIONS = {"list": "list_models", "env": "environment"}


class _Program(CommandGroup):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        places = {name: (f"skipjoin.cli.{module}", _FUNCTIONS.get(name, name)) for name, module in _MODULES.items()}
        self.commands = cast(Any, LazyCommands(places))


app = Commands(
    help="LLM serving whose scheduler can stop any request after any token and run another.",
    cls=_Program,
    pretty_exceptions_enable=False,
)


def _print_version(value: bool) -> None:
    if value:
        print(f"skipjoin {VERSION}")
        raise typer.Exit


@app.callback()
def main(  # Typer would show a docstring in place of the help
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if os.environ.get("COLUMNS") == "0":
        # Terminals of unknown size, such as those of containers, set it, and rich would print lines of no characters.
        del os.environ["COLUMNS"]
