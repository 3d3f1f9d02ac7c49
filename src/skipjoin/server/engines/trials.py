"""Which sequences may be the cause where engines end, and in what order they continue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from skipjoin.server.engines.sequences import EngineSequence

# Engines that may end while one and the same sequence runs. It fails at the second without a token in between; at a
# later one if others may have been the cause as well; and at the last one even if it got tokens in between.
_STUCK, _STUCK_WITH_OTHERS, _MOST_DEATHS = 2, 4, 8
# Most seconds that the trial of one sequence keeps others from theirs: it may wait in its engine's queue.
TRIAL_S = 2.0


class Trials:
    """Lets sequences that ran when an engine ended continue one at a time, each on trial until it has another token.

    go_on: sends a sequence to an engine, once it has its turn. held: those that wait for theirs, by id.
    """

    def __init__(self, go_on: Callable[[EngineSequence], None]) -> None:
        self._go_on = go_on
        self.held: dict[int, EngineSequence] = {}
        self._trial: EngineSequence | None = None
        self._timer: asyncio.TimerHandle | None = None

    def enter(self, sequence: EngineSequence) -> bool:
        """Whether a sequence may be sent to an engine now; if not, it is held until its turn."""
        if not sequence.stuck:
            return True
        if self._trial is not None:
            self.held[sequence.id] = sequence
            return False
        self._trial = sequence
        self._timer = asyncio.get_running_loop().call_later(TRIAL_S, self._end, sequence)
        return True

    def blame(self, orphans: Collection[EngineSequence]) -> list[EngineSequence]:
        """Count the end of an engine against those of its sequences that may be its cause. Returns those that had
        enough: they are not to be tried again. `next` follows once the others have been placed."""
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
        return [one for one in begun if one.stuck >= most or one.deaths >= _MOST_DEATHS]

    def passed(self, sequence: EngineSequence) -> None:
        """It has another token: it did not end its engine."""
        sequence.stuck = 0
        self._end(sequence)

    def leave(self, sequence: EngineSequence) -> None:
        """It has ended."""
        self.held.pop(sequence.id, None)
        self._end(sequence)

    def next(self) -> None:
        """Let the next sequence continue that waits for its trial; all of them if there is no engine."""
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
