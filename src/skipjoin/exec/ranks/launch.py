from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

# Seconds that a rank has for a call while ranks start, except for loading.
START_S = 120.0


class GroupSizes(NamedTuple):
    tp: int
    pp: int

    @property
    def ranks(self) -> int:
        return self.tp * self.pp

    def __str__(self) -> str:
        return f"tensor_parallel_size {self.tp} x pipeline_parallel_size {self.pp}"


class StartedRanks(Protocol):
    """Processes of one generation of ranks, each with a `RankHost`. `nodes` has the machine of each, in rank order.

    A call that `begin` returns is for `wait` and `answers`. A lost rank fails all calls to it with `RankError`.
    """

    @property
    def nodes(self) -> Sequence[str]: ...

    def begin(self, rank: int, method: str, *arguments: Any) -> Any:
        """Let a rank run a method of its `RankHost` or `RankProcess`, at most two at a time."""
        ...

    def wait(self, calls: Sequence[Any], timeout_s: float) -> tuple[list[Any], list[Any]]:
        """Wait until a call has finished, and return finished and unfinished ones."""
        ...

    def answers(self, calls: Sequence[Any]) -> list[Any]:
        """Return the results of calls, or raise their first `ModelError` or `RankError`."""
        ...

    def close(self) -> None: ...


class Launcher(Protocol):
    """Starts ranks, which connect to the engine at `ip`."""

    @property
    def ip(self) -> str: ...

    def start(self, sizes: GroupSizes, device: str, patience_s: float) -> StartedRanks:
        """Start all ranks; wait at most `patience_s` for machines that are missing."""
        ...

    def close(self) -> None: ...
