from __future__ import annotations

import shlex
import signal
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from skipjoin.cli.connection import FAILED, INTERRUPTED
from skipjoin.cli.options import Section, Values, takes
from skipjoin.config import ConfigError
from skipjoin.extras import require
from skipjoin.loadtest.targets import Target
from skipjoin.options import Option, check
from skipjoin.recipes import DEFAULT, absolute, find, names_in

_PEER = "Peer"
_common = partial(Option, is_common=True)
_peer = partial(_common, group=_PEER)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    recipes: Annotated[
        str, _common("Schedulers to compare, separated by commas.", flags=("--recipes", "--recipe"), metavar="NAMES")
    ] = f"fcfs,{DEFAULT}"
    max_num_seqs: Annotated[
        int, _common("Slots of the batch. With more slots than requests, all schedulers tie.", low=1, high=256)
    ] = 4
    background: Annotated[int, _common("Number of long background jobs, all sent at the start.", low=1, high=64)] = 6
    chats: Annotated[int, _common("Number of short chats that arrive while these run.", low=1, high=1000)] = 24
    out: Annotated[
        Path, _common("Folder for demo.svg, demo.html and demo.json; earlier ones are replaced.", metavar="FOLDER")
    ] = Path("skipjoin-demo")
    peer: Annotated[
        str | None,
        _peer(
            "Another OpenAI-compatible server that gets the same load, such as http://127.0.0.1:8001.", metavar="URL"
        ),
    ] = None
    peer_model: Annotated[
        str | None, _peer("Model to request (default: the first that the peer lists).", metavar="NAME")
    ] = None
    peer_endpoint: Annotated[str, _peer("completions (with token ids) or chat (with words).", metavar="NAME")] = (
        "completions"
    )
    api_key: Annotated[str | None, _peer("API key of the peer.", metavar="KEY", envvar="OPENAI_API_KEY")] = None

    def __post_init__(self) -> None:
        check(self)
        for name in names_in(self.recipes):
            find(name)
        for field in ("peer_model", "peer_endpoint"):
            if self.peer is None and getattr(self, field) not in (None, "completions"):
                raise ConfigError(f"peer must be given for {field}")

    def target(self) -> Target | None:
        if self.peer is None:
            return None
        return Target(base_url=self.peer, endpoint=self.peer_endpoint, model=self.peer_model, api_key=self.api_key)


@takes(options=Section(DemoOptions))
def demo(*, options: Values) -> None:
    """Show what scheduling does on this machine: one load, two schedulers, two minutes, no download."""
    require("skipjoin demo", "serve", "bench", "plot")
    from skipjoin.cli.demo_report import DemoReport  # noqa: PLC0415
    from skipjoin.demo.runs import Demo, run_demo  # noqa: PLC0415

    wanted = DemoOptions(**options)
    plan = Demo(
        recipes=[absolute(name) for name in names_in(wanted.recipes)],
        max_num_seqs=wanted.max_num_seqs,
        background=wanted.background,
        chats=wanted.chats,
        peer=wanted.target(),
    )
    # Exit as on an interrupt, which also stops the servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    command = shlex.join(["skipjoin", *sys.argv[1:]])
    with DemoReport(wanted.out, command) as report:
        try:
            reason = run_demo(plan, report)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
    if reason is not None:
        print(f"error: {reason}", file=sys.stderr)
        raise typer.Exit(FAILED)
    if report.has_failures:
        raise typer.Exit(FAILED)
