"""Command line, one module per command.

Commands import their dependencies when they run, so that `skipjoin --help` and the API process do not load torch.
"""

from __future__ import annotations

from typing import Annotated

import typer

from skipjoin.cli.batch import batch
from skipjoin.cli.bench import bench
from skipjoin.cli.chat import chat
from skipjoin.cli.commands import Commands
from skipjoin.cli.console import console
from skipjoin.cli.convert import convert
from skipjoin.cli.demo import demo
from skipjoin.cli.environment import environment
from skipjoin.cli.explain import explain
from skipjoin.cli.generate import generate
from skipjoin.cli.models import list_models, pull
from skipjoin.cli.plot import plot
from skipjoin.cli.predict import predict
from skipjoin.cli.predict_train import train
from skipjoin.cli.profile import profile
from skipjoin.cli.recipes import recipes
from skipjoin.cli.replay import replay
from skipjoin.cli.serve import serve
from skipjoin.cli.simulate import simulate
from skipjoin.cli.top import top
from skipjoin.version import VERSION

app = Commands(
    help="LLM serving whose scheduler can stop any request after any token and run another.",
    pretty_exceptions_enable=False,
)
for command in (
    serve,
    demo,
    generate,
    chat,
    console,
    top,
    explain,
    recipes,
    convert,
    profile,
    simulate,
    replay,
    bench,
    plot,
):
    app.command()(command)
for name, command in (("pull", pull), ("list", list_models), ("env", environment)):
    app.command(name)(command)
predict.command()(train)
app.add_typer(predict, name="predict")
app.add_typer(batch, name="batch")


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
    pass
