"""`skipjoin serve` of the built-in model for the benchmarks of ALISE over HTTP."""

from __future__ import annotations

from servers import Skipjoin

# Short steps that do not depend on a profile. The model gets one core; the API process and the client get the other.
OPTIONS = ("--profile", "off", "--kv-cache-gib", 0.5, "--swap-space", 0, "--threads", 1)


def serve(*options: object) -> Skipjoin:
    return Skipjoin("tally", *OPTIONS, *options)
