"""Several `skipjoin` commands in one process, because most of a command's time is that of its imports."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from typer.testing import CliRunner

from support.forks import fork

_PROGRAM = """
import json, logging, sys
from typer.testing import CliRunner
from skipjoin.cli import app
results = []
for command in json.loads(sys.argv[1]):
    results.append(CliRunner().invoke(app, command))
    for name in (None, *logging.root.manager.loggerDict):  # handlers keep the stream of their command
        logging.getLogger(name).handlers.clear()
print(json.dumps([(result.exit_code, result.stdout, result.stderr) for result in results]))
"""


class Outcome(NamedTuple):
    code: int
    stdout: str
    stderr: str


def outcomes_of(commands: Sequence[Sequence[str]], prelude: str = "") -> list[Outcome]:
    """Run commands that end by themselves, one after another, in a new process."""
    program = [sys.executable, "-c", prelude + _PROGRAM, json.dumps(commands)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return [Outcome(*load) for load in json.loads(done.stdout.splitlines()[-1])]


def outcomes_with(commands: Sequence[Sequence[str]], environment: Mapping[str, str]) -> list[Outcome]:
    """Run commands with other environment variables, in a process that forks from this one.

    The client of the Hugging Face Hub reads its variables when it is imported, so the process imports it again.
    """
    with tempfile.TemporaryFile("w+") as file:

        def run() -> int:
            from skipjoin.cli import app  # noqa: PLC0415 (takes a second in processes that run no commands)

            for name in [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]:
                del sys.modules[name]
            found = []
            for command in commands:
                done = CliRunner().invoke(app, command)
                found.append((done.exit_code, done.stdout, done.stderr))
                logging.root.handlers.clear()
            json.dump(found, file)
            file.flush()
            return 0

        kept = file.fileno()
        child = fork("commands", {**os.environ, **environment}, {kept: kept}, run)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        file.seek(0)
        return [Outcome(*load) for load in json.load(file)]
