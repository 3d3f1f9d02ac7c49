"""Validation of input files in a process of low priority, so that it does not block the event loop."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import msgspec

from skipjoin.server.batches.line_check import Report, Rules
from skipjoin.server.batches.records import BlobMissing, LineError, LinePlace

_COMMAND = (sys.executable, "-m", "skipjoin.server.batches.line_check")
# Maximum bytes of a report. 500 custom_ids of 512 characters, each of six bytes in JSON, have 1.5 MB.
_LONGEST_REPORT = 4 << 20
_decode = msgspec.json.Decoder(Report).decode


class Refused(Exception):  # noqa: N818 -- a verdict, not an error of this program
    def __init__(self, errors: Sequence[LineError]) -> None:
        super().__init__(errors[0].message)
        self.errors = tuple(errors)


class ValidatorDied(Exception):  # noqa: N818 -- what has happened
    """The validation process died. Validation may be repeated."""


async def validate(path: Path, rules: Rules) -> AsyncGenerator[list[LinePlace], None]:
    """Yield chunks of the lines of a file until `Refused`. Use it in `contextlib.aclosing`."""
    process = await asyncio.create_subprocess_exec(
        *_COMMAND,
        str(path),
        msgspec.json.encode(rules).decode(),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        limit=_LONGEST_REPORT,
    )
    assert process.stdout is not None
    try:
        while text := await process.stdout.readline():
            report = _decode(text)
            if report.errors:
                raise Refused(report.errors)
            if report.lines:
                yield report.lines
            if report.is_finished:
                return
        if not path.is_file():
            raise BlobMissing("the content of the batch's input file is gone")
        raise ValidatorDied(f"the check of a batch's lines ended with exit code {await process.wait()}")
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
