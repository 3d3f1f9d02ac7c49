from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from skipjoin.core.kv.block_pool import BlockPool, LedgerError
from skipjoin.core.kv.moves import Copy, move_of
from skipjoin.core.kv.request_blocks import Holders, RequestBlocks, SharedBlock
from skipjoin.core.kv.transfers import Transfers
from skipjoin.core.request import Request
from skipjoin.core.step import Direction, Move, Span


class SharedBlocks:
    """Blocks that a real-time and a best-effort request fill from both ends (BROS section 5).

    The best-effort owner shares blocks while no plan contains it. Before the borrower overwrites a slot of the owner,
    the slot is saved to a CPU-tier block (a lazy checkpoint). The owner runs again once all of its KV is on the device:
    in place if the borrower has left, otherwise in its own block. A shared block counts in its owner's reservation, and
    has at most one borrower and no key.
    """

    def __init__(
        self,
        requests: Mapping[Request, RequestBlocks],
        device: BlockPool,
        cpu: BlockPool,
        holders: Holders,
        transfers: Transfers,
        *,
        block_size: int,
        hold: Callable[[Request], RequestBlocks],
    ) -> None:
        self.of: dict[int, SharedBlock] = {}
        self._requests = requests
        self._device, self._cpu = device, cpu
        self._holders = holders
        self._transfers = transfers
        self._size = block_size
        self._hold = hold

    @property
    def bidirectional_blocks(self) -> int:
        return sum(shared.borrower is not None for shared in self.of.values())

    def copies(self) -> Iterator[int]:
        return (shared.copy for shared in self.of.values() if shared.copy is not None)

    def can_share(self, owner: Request, borrower: Request) -> bool:
        owned, borrowed = self._requests.get(owner), self._requests.get(borrower)
        if owned is None or not owner.progress.reverse or borrower.progress.reverse or owner.progress.in_flight:
            return False
        return owned.moving is None and (borrowed is None or not (borrowed.moving or borrowed.swapped_out))

    def in_the_way(self, request: Request, tokens: int) -> Iterator[Request]:
        held = self._requests.get(request)
        for shared in held.sharing.borrowed.values() if held is not None else ():
            reach = self._slots(shared.at, tokens)
            if reach > shared.split and reach > self._limit(shared):
                yield shared.owner.request

    def extra(self, held: RequestBlocks, tokens: int) -> int:
        return sum(self._is_contested(shared, tokens) for shared in held.sharing.owned.values())

    def saved_blocks(self, request: Request, tokens: int, others: Iterable[Request]) -> int:
        held = self._requests.get(request)
        if held is None or not held.sharing.owned:
            return 0
        own = held.sharing.owned.values()
        contested = [shared.borrower for shared in own if self._is_contested(shared, tokens)]
        some = {self._requests.get(other) for other in others}
        return sum(borrower in some for borrower in contested)

    def tokens_there(self, request: Request) -> int:
        held = self._requests[request]
        there = min(request.progress.computed, len(held.device) * self._size)
        return there - sum(shared.saved for shared in held.sharing.owned.values())

    def share(self, owner: Request, keep: int, borrower: Request) -> bool:
        # The last blocks go first, because they have the most empty slots. Each needs one CPU-tier block.
        own = self._requests[owner]
        some: list[int] = []
        for index in range(len(own.device) - 1, keep - 1, -1):
            block = own.device[index]
            shared = self.of.get(block)
            if shared is None and self._holders.is_shared(block):
                return False
            if shared is None or shared.borrower is None:
                some.append(index)
        if sum(index not in own.sharing.owned for index in some) > self._cpu.free:
            return False
        theirs = self._hold(borrower)
        for index in some:
            self._share(own, index, theirs)
        own.refresh()
        theirs.refresh()
        return True

    def _share(self, owner: RequestBlocks, index: int, borrower: RequestBlocks) -> None:
        block = owner.device[index]
        shared = self.of.get(block)
        if shared is None:
            if self._holders.of.pop(block, None) is not None:
                self._device.unname(block)
            owner.keyed = min(owner.keyed, index)
            (copy,) = self._cpu.take(1)
            shared = self.of[block] = owner.sharing.owned[index] = SharedBlock(block, owner, index, copy)
        shared.borrower, shared.at, shared.split = borrower, len(borrower.device), self._limit(shared)
        borrower.device.append(block)
        borrower.sharing.borrowed[shared.at] = shared
        self._holders.add(block, owner)
        self._holders.add(block, borrower)

    def take_slots(self, request: Request, tokens: int) -> list[Move]:
        held, moves = self._requests[request], []
        for shared in held.sharing.borrowed.values():
            need = self._slots(shared.at, tokens)
            if need <= shared.split:
                continue
            if (count := need - self._limit(shared)) > 0:
                moves.append(self._save(shared, count))
                shared.split = need
            else:  # divide the remaining slots equally
                shared.split = (need + self._limit(shared) + 1) // 2
            shared.owner.refresh_room()
        held.refresh_room()
        return moves

    def _save(self, shared: SharedBlock, count: int) -> Move:
        owner = shared.owner
        assert shared.copy is not None
        move = move_of(Direction.OUT, owner.request, [(shared.block, shared.copy, Span(self._limit(shared), count))])
        owner.sharing.overwritten += not shared.saved
        shared.saved += count
        return self._transfers.begin_saving(owner, move, shared.index)

    def move_out(self, held: RequestBlocks, keep: int) -> Move | None:
        """Swap out the blocks from index `keep`; saved slots stay where they are."""
        copies, target, size = list[Copy](), list[int](), self._size
        for index in range(keep, len(held.device)):
            shared, saved, copy = held.sharing.owned.get(index), 0, None
            if shared is not None:
                saved, copy, shared.copy = shared.saved, shared.copy, None
            if copy is None:
                (copy,) = self._cpu.take(1)
            target.append(copy)
            if rest := self.filled_slots(held, index) - saved:
                copies.append((held.device[index], copy, Span(size - rest, rest)))
        held.cpu[:0] = target
        return move_of(Direction.OUT, held.request, copies) if copies else None

    def take_back(self, request: Request, tokens: int, more: Sequence[Copy] = ()) -> list[Move]:
        # Slots that a borrower has taken are replaced in other blocks.
        # more: copies of all that the request has on the CPU tier.
        held = self._requests[request]
        if not (held.sharing.owned or more):
            return []
        within, back = self._settle(held, tokens)
        held.refresh()
        moves = []
        if within:
            moves.append(self._transfers.begin_aside(held, move_of(Direction.WITHIN, request, within)))
        if back:
            held.cpu[:0] = [source for source, _, _ in back]
            moves.append(self._transfers.begin(held, move_of(Direction.IN, request, [*back, *more])))
        return moves

    def _settle(self, held: RequestBlocks, tokens: int) -> tuple[list[Copy], list[Copy]]:
        """Give the request slots for `tokens` tokens.

        Returns:
            Copies from device blocks and from the CPU tier, whose blocks the caller takes over.
        """
        within, back = list[Copy](), list[Copy]()
        for index, shared in sorted(held.sharing.owned.items()):
            filled, size = self.filled_slots(held, index), self._size
            if self._is_contested(shared, tokens):
                (held.device[index],) = self._device.take(1)
                if rest := filled - shared.saved:
                    within.append((shared.block, held.device[index], Span(size - rest, rest)))
            elif shared.borrower is not None:
                if (need := self._slots(shared.index, tokens)) > size - shared.split:
                    shared.split = (self._taken(shared) + size - need) // 2
                    shared.borrower.refresh_room()
                continue
            if shared.saved:
                assert shared.copy is not None
                back.append((shared.copy, held.device[index], Span(size - filled, shared.saved)))
                shared.copy = None
            if shared.borrower is not None:  # it keeps the block alone
                self.remove(shared.block, held)
            else:
                self._leave(shared, held)
        return within, back

    def filled_slots(self, held: RequestBlocks, index: int) -> int:
        """Return how many of the block's slots have KV of the request: in place, saved, or planned."""
        return max(0, self._slots(index, held.request.progress.planned))

    def _limit(self, shared: SharedBlock) -> int:
        return self._size - self.filled_slots(shared.owner, shared.index) + shared.saved

    def _slots(self, index: int, tokens: int) -> int:
        return min(self._size, tokens - index * self._size)

    def _taken(self, shared: SharedBlock) -> int:
        borrower = shared.borrower
        return max(0, self._slots(shared.at, borrower.request.progress.planned)) if borrower is not None else 0

    def _is_contested(self, shared: SharedBlock, tokens: int) -> bool:
        if shared.borrower is None:
            return False
        return shared.saved > 0 or self._slots(shared.index, tokens) > self._size - self._taken(shared)

    def remove(self, block: int, held: RequestBlocks) -> bool:
        stays = self._holders.remove(block, held)
        if (shared := self.of.get(block)) is not None:
            self._holders.of.pop(block, None)
            self._leave(shared, held)
        return stays

    def _leave(self, shared: SharedBlock, held: RequestBlocks) -> None:
        owner, borrower = shared.owner, shared.borrower
        if borrower is not None:
            del borrower.sharing.borrowed[shared.at]
        if held is borrower:
            shared.borrower = None
            if not shared.saved:
                self._forget(shared)
            owner.refresh_room()
            return
        self._forget(shared)
        if borrower is not None:
            borrower.refresh_room()

    def _forget(self, shared: SharedBlock) -> None:
        del self.of[shared.block]
        sharing = shared.owner.sharing
        del sharing.owned[shared.index]
        sharing.overwritten -= shared.saved > 0
        if shared.copy is not None:
            self._cpu.put([shared.copy])

    def check(self) -> None:
        known = set[int]()
        for request, held in self._requests.items():
            sharing = held.sharing
            if not (sharing.owned or sharing.borrowed or sharing.overwritten):
                continue
            known.update(id(shared) for shared in (*sharing.owned.values(), *sharing.borrowed.values()))
            if sharing.overwritten != sum(shared.saved > 0 for shared in sharing.owned.values()):
                raise LedgerError(f"request {request.id} counts other blocks as overwritten than are")
        if known != set(map(id, self.of.values())):
            raise LedgerError("a request knows of other shared blocks than there are")
        for block, shared in self.of.items():
            if problem := self._problem_of(block, shared):
                raise LedgerError(f"block {block}, which two requests share, {problem}")

    def _problem_of(self, block: int, shared: SharedBlock) -> str:
        owner, borrower = shared.owner, shared.borrower
        filled = self.filled_slots(owner, shared.index)
        owned = owner.sharing.owned.get(shared.index)
        if not owner.request.progress.reverse or owned is not shared or owner.device[shared.index] != block:
            return "is not its owner's"
        if shared.copy is None or not filled or shared.saved > filled:
            return "has slots saved that are not filled"
        if borrower is None:
            return "" if shared.saved else "is used by its owner alone"
        borrowed = borrower.sharing.borrowed.get(shared.at)
        if borrower.request.progress.reverse or borrowed is not shared or borrower.device[shared.at] != block:
            return "is not its borrower's"
        taken = max(0, self._slots(shared.at, borrower.request.progress.computed))
        if taken > shared.split or shared.split > self._limit(shared):
            return "has slots that both may fill"
        return ""
