from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from skipjoin.server.engines.sequences import EngineSequence

# Number of engine crashes that a sequence survives: without a new token in between if it is the only suspect, the same
# if there are other suspects, and in total.
_STUCK, _STUCK_WITH_OTHERS, _MAX_DEATHS = 2, 4, 8
# Maximum time that one trial delays the next, because a sequence on trial may wait in its engine's queue.
TRIAL_S = 2.0


class CrashIsolation:
    """Resubmits sequences of a crashed engine one at a time through `go_on`.

    Each is on trial until its next token, so that the next crash has one suspect.
    """

    def __init__(self, go_on: Callable[[EngineSequence], None]) -> None:
        self._go_on = go_on
        self.held: dict[int, EngineSequence] = {}
        self._trial: EngineSequence | None = None
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, sequence: EngineSequence) -> bool:
        """Return whether `sequence` may be submitted now, or hold it."""
        if not sequence.stuck:
            return True
        if self._trial is not None:
            self.held[sequence.id] = sequence
            return False
        self._trial = sequence
        self._timer = asyncio.get_running_loop().call_later(TRIAL_S, self._end, sequence)
        return True

    def blame(self, orphans: Collection[EngineSequence]) -> list[EngineSequence]:
        """Count a crash and return the suspects that must fail. Resubmit the others, then call `next`."""
        begun = [sequence for sequence in orphans if sequence.has_begun]
        trial = self._trial
        accused = [trial] if trial is not None and trial in begun else begun
        if trial in orphans:
            self._forget()
        most = _STUCK if len(accused) == 1 else _STUCK_WITH_OTHERS
        for sequence in accused:
            sequence.stuck += 1
        for sequence in begun:
            sequence.deaths += 1
            sequence.has_begun = False
        return [sequence for sequence in begun if sequence.stuck >= most or sequence.deaths >= _MAX_DEATHS]

    def passed(self, sequence: EngineSequence) -> None:
        sequence.stuck = 0
        self._end(sequence)

    def leave(self, sequence: EngineSequence) -> None:
        self.held.pop(sequence.id, None)
        self._end(sequence)

    def next(self) -> None:
        while self.held and self._trial is None:
            self._go_on(self.held.pop(next(iter(self.held))))

    def _end(self, sequence: EngineSequence) -> None:
        if self._trial is sequence:
            self._forget()
            self.next()

    def _forget(self) -> None:
        assert self._timer is not None
        self._timer.cancel()
        self._trial = None
