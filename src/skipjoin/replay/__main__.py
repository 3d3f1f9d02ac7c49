"""Program that simulates for the console.

It reads a question as JSON, and writes `{"doing", "share"}` lines, then one `{"result"}` or `{"error"}`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

from skipjoin.config import ConfigError
from skipjoin.recipes import listed
from skipjoin.recipes.spelling import split
from skipjoin.replay.comparison import Comparison, Limits, compare

# The system ends the program after this time.
MAX_S = 600
# Least time between two reports of progress.
_REPORT_S = 0.2
# Serving has precedence.
_NICE = 15


def main() -> None:
    signal.alarm(MAX_S)
    os.nice(_NICE)
    question = json.load(sys.stdin)
    try:
        limits = Limits(**question["limits"])
        _check(question["recipes"], question["found"]["machine"]["recipe"])
        result = _described(compare(question["found"], question["recipes"], limits, _Reporter()), question["found"])
    except ConfigError as error:
        _write({"error": str(error)})
    else:
        _write({"result": result})


class _Reporter:
    def __init__(self) -> None:
        self._at = 0.0

    def __call__(self, doing: str, share: float) -> None:
        if (now := time.monotonic()) - self._at >= _REPORT_S:
            self._at = now
            _write({"doing": doing, "share": round(share, 4)})


def _check(recipes: list[str], own: str) -> None:
    """Raise `ConfigError` for recipes of files, because a client of the server must not choose files to run."""
    for name in recipes:
        if name != own and split(name)[0] not in listed():
            raise ConfigError(f"recipes: {name!r} is not one of {', '.join(sorted(listed()))}")


def _described(comparison: Comparison, found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "requests": len(found["arrivals"]),
        "outcomes": [
            {
                "name": outcome.name,
                "figures": outcome.figures(),
                "curve": outcome.curve(),
                "preemptions": outcome.preemptions,
            }
            for outcome in comparison.outcomes
        ],
        "errors": comparison.errors,
        "is_far": comparison.is_far,
        "between_steps_s": comparison.between_steps_s,
        "around_s": comparison.around_s,
    }


def _write(line: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
