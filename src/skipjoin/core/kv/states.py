from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from skipjoin.core.kv.block_pool import LedgerError
from skipjoin.core.prefixes import Key
from skipjoin.core.request import Request
from skipjoin.core.step import Capture, Direction, Move, Slice, StateMove, StatePlan, StateSizes, StepPlan

# Borders at which one prompt leaves snapshots for others.
_MAX_SHARED = 4


class StateSlots:
    """Slots for state of a request that is no KV block, such as that of linear attention.

    A request has one on the device, or on the CPU tier with its swapped-out KV, or both during a move. State cannot
    return to an earlier token, so a request with one loses all of its KV or none.
    """

    def __init__(self, sizes: StateSizes) -> None:
        self.name, device, cpu, snapshots, self.blocks = sizes
        self.total, self.cpu_total = device, cpu
        self._empty = {Direction.IN: _downward(device), Direction.OUT: _downward(cpu)}
        self._of: dict[Request, int] = {}
        self._cpu_of: dict[Request, int] = {}
        self.snapshots = Snapshots(range(device, device + snapshots))

    @property
    def free(self) -> int:
        return len(self._empty[Direction.IN])

    @property
    def cpu_free(self) -> int:
        return len(self._empty[Direction.OUT])

    def slot_of(self, request: Request) -> int | None:
        return self._of.get(request)

    def reserve(self, request: Request) -> None:
        self._of[request] = self._take(Direction.IN, request)

    def release(self, request: Request) -> None:
        for direction, slots in ((Direction.IN, self._of), (Direction.OUT, self._cpu_of)):
            self._put(direction, slots, request)
        self.snapshots.forget(request)

    # -- moves, whose `state` is the slots from and to which they copy ------------------------------------

    def begin(self, move: Move, *, blocking: bool) -> Move:
        """Return the move with the state of its request, which leaves its slot at once if the move is blocking."""
        request = move.request
        assert request is not None
        if move.direction is Direction.OUT:
            target = self._cpu_of[request] = self._take(Direction.OUT, request)
            move = move._replace(state=StateMove(self._of[request], target, self.blocks))
            if blocking:
                self._put(Direction.IN, self._of, request)
        elif move.direction is Direction.IN and request in self._cpu_of:
            self.reserve(request)
            move = move._replace(state=StateMove(self._cpu_of[request], self._of[request], self.blocks))
        return move

    def end(self, move: Move, *, is_complete: bool) -> None:
        """Free the slot that a move has left, or that it could not fill if a copy remains."""
        if move.state is None or (request := move.request) is None:
            return
        is_out = move.direction is Direction.OUT
        if is_out and is_complete:
            self._put(Direction.IN, self._of, request)
        elif (is_out and request in self._of) or (not is_out and is_complete):
            self._put(Direction.OUT, self._cpu_of, request)

    # -- plans --------------------------------------------------------------------------------------------

    def plan(self, slices: Sequence[Slice], block_size: int) -> StatePlan:
        captured = self.snapshots.capture(slices, block_size)
        return StatePlan(tuple(self._of[slice_.request] for slice_ in slices), self.restored(), captured)

    def restored(self) -> tuple[tuple[int, int], ...]:
        return tuple((source, self._of[request]) for request, source in self.snapshots.take_restored())

    def settle(self, plan: StepPlan, block_size: int, void: Collection[Request]) -> None:
        self.snapshots.settle(plan, block_size, void)

    def check(self, holders: Collection[Request]) -> None:
        if self._of.keys() | self._cpu_of.keys() != set(holders):
            raise LedgerError(f"slots for {self.name} belong to other requests than hold blocks")
        for direction, slots, total in (
            (Direction.IN, self._of, self.total),
            (Direction.OUT, self._cpu_of, self.cpu_total),
        ):
            if sorted((*self._empty[direction], *slots.values())) != list(range(total)):
                raise LedgerError(f"a slot for {self.name} leaked or doubled")
        self.snapshots.check(self.name)

    def _take(self, direction: Direction, request: Request) -> int:
        if not self._empty[direction]:
            raise LedgerError(f"request {request.id} needs a slot for its {self.name}, and none is free")
        return self._empty[direction].pop()

    def _put(self, direction: Direction, slots: dict[Request, int], request: Request) -> None:
        if (slot := slots.pop(request, None)) is not None:
            self._empty[direction].append(slot)


class Snapshots:
    """States at block borders of cached prefixes; the least recently used one is replaced.

    A slice leaves one at the last border of its prompt, which requests with the same prompt and more turns can use, and
    one where its prompt parts from cached KV, or from the prompts of waiting requests.
    """

    def __init__(self, slots: range) -> None:
        self.changes = 0  # number of keys that were added or lost
        self._slots = slots
        self._empty = list(reversed(slots))
        self._of: dict[Key, int] = {}  # least recently used first
        self._shared: dict[Request, set[int]] = {}  # tokens where prompts part from those of others
        self._inexact: set[Request] = set()  # whose KV was swapped in, and is not exact
        self._restored: dict[Request, int] = {}  # slots to copy from in the plan that is being decided

    def longest(self, keys: Sequence[Key], found: int) -> int:
        return next((count for count in range(found, 0, -1) if keys[count - 1] in self._of), 0)

    def share(self, request: Request, tokens: int) -> None:
        if tokens and self._slots and len(self.borders_of(request)) < _MAX_SHARED:
            self._shared.setdefault(request, set()).add(tokens)

    def borders_of(self, request: Request) -> Collection[int]:
        return self._shared.get(request, ())

    def exclude(self, request: Request) -> None:
        self._inexact.add(request)

    def restore(self, request: Request, key: Key) -> None:
        slot = self._restored[request] = self._of.pop(key)
        self._of[key] = slot  # now the most recently used one

    def take_restored(self) -> list[tuple[Request, int]]:
        found = list(self._restored.items())
        self._restored.clear()
        return found

    def forget(self, request: Request) -> None:
        self._shared.pop(request, None)
        self._inexact.discard(request)
        self._restored.pop(request, None)

    def capture(self, slices: Sequence[Slice], block_size: int) -> tuple[Capture, ...]:
        captured = []
        for index, slice_ in enumerate(slices) if self._slots else ():
            for tokens in self._borders(slice_, block_size):
                if (slot := self._take()) is not None:
                    captured.append(Capture(index, tokens - slice_.start, slot))
        return tuple(captured)

    def _borders(self, slice_: Slice, block_size: int) -> Iterator[int]:
        request = slice_.request
        if request.prefix is None or request in self._inexact or slice_.start >= len(request.prompt):
            return
        # A hit leaves the last token of a prompt to compute.
        last = (len(request.prompt) - 1) // block_size * block_size
        for border in sorted({*self.borders_of(request), last}):
            if slice_.start < border <= slice_.start + slice_.tokens:
                keys = request.keys(border)
                if len(keys) * block_size >= border and keys[border // block_size - 1] not in self._of:
                    yield border

    def settle(self, plan: StepPlan, block_size: int, void: Collection[Request]) -> None:
        for index, tokens, slot in plan.states.captured if plan.states is not None else ():
            slice_ = plan.slices[index]
            border = slice_.start + tokens
            key = slice_.request.keys(border)[border // block_size - 1]
            if slice_.request in void or slice_.request in self._inexact or key in self._of:
                self._empty.append(slot)
            else:
                self._of[key] = slot
                self.changes += 1

    def _take(self) -> int | None:
        if self._empty:
            return self._empty.pop()
        if not self._of:
            return None  # plans in flight write all of them
        self.changes += 1
        return self._of.pop(next(iter(self._of)))

    def check(self, name: str) -> None:
        found = [*self._empty, *self._of.values()]  # and those that plans in flight write
        if len(set(found)) != len(found) or not set(found) <= set(self._slots):
            raise LedgerError(f"a snapshot of {name} leaked or doubled")


def _downward(total: int) -> list[int]:
    # Popped from the end, so the lowest numbers go first.
    return list(range(total - 1, -1, -1))
