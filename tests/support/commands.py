"""Several `skipjoin` commands in one new process, because most of a command's time is that of its imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

_PROGRAM = """
import json, logging, sys
from typer.testing import CliRunner
from skipjoin.cli import app
results = []
for command in json.loads(sys.argv[1]):
    results.append(CliRunner().invoke(app, command))
    for name in (None, *logging.root.manager.loggerDict):  # handlers keep the stream of their command
        logging.getLogger(name).handlers.clear()
print(json.dumps([(one.exit_code, one.stdout, one.stderr) for one in results]))
"""


class Outcome(NamedTuple):
    code: int
    stdout: str
    stderr: str


def outcomes_of(
    commands: Sequence[Sequence[str]], prelude: str = "", environment: Mapping[str, str] = MappingProxyType({})
) -> list[Outcome]:
    """Run commands that end by themselves, one after another."""
    program = [sys.executable, "-c", prelude + _PROGRAM, json.dumps(commands)]
    environment = {**os.environ, **environment}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return [Outcome(*load) for load in json.loads(done.stdout.splitlines()[-1])]
