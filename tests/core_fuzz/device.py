from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence
from itertools import chain
from typing import NamedTuple
from weakref import WeakKeyDictionary

from skipjoin.core.kv.block_pool import BlockPool
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.prefixes import ContentPrefix, Key
from skipjoin.core.request import Request
from skipjoin.core.step import Direction, Move, Slice, StepPlan, StepResult

SLICE_ERROR = "out of memory"
# Sampled by slices that read KV other than their own. The vocabulary has no such token.
POISON = -1
VOCABULARY = 11
# Content of a slot that no slice may read. Tags are larger, and markers of copies in transit exceed all tags.
GARBAGE = 0
_TAGS = 1 << 60
_ORDER = (Direction.OUT, Direction.WITHIN, Direction.IN)

Fails = Callable[[Move], bool]
Pool = list[list[int]]


class FindingError(AssertionError):
    """The core broke an invariant."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class _Copy(NamedTuple):
    """An overlapped move in transit: the content of its source when it began, and the marker of its target slots."""

    move: Move
    values: list[int]
    marker: int


class Device:
    """Runs plans as `exec.worker.Worker` does, on tags instead of tensors.

    The tag of a token is a hash of all tokens up to it, so two slots hold the same tag only if their KV is the same. A
    slice writes the tags of its tokens if it read the tags of all tokens before, and garbage otherwise. An overlapped
    move may copy at any time until its end is reported, so it carries only slots that did not change in between. KV
    that went through a lossy CPU tier, or was computed from such KV, has the negative tag: only its own request may
    read it.

    Args:
        voids: Whether all slices of a request fail after one did, as in the worker; otherwise those that await no token
            are computed from the KV there is. The core must work with both.
    """

    def __init__(self, kv: KVLedger, *, is_exact: bool, voids: bool) -> None:
        self._kv = kv
        self._size = kv.block_size
        self._is_exact = is_exact
        self._voids = voids
        self._tags: MutableMapping[Request, list[int]] = WeakKeyDictionary()
        self._prefixes: MutableMapping[Request, ContentPrefix] = WeakKeyDictionary()
        self._content: dict[Key, list[int]] = {}  # of the block of each prefix-cache key
        self._marker = _TAGS
        self.clear()

    def clear(self) -> None:
        self._device: Pool = [[GARBAGE] * self._size for _ in range(self._kv.device_total)]
        self._cpu: Pool = [[GARBAGE] * self._size for _ in range(self._kv.tiers.cpu_total)]
        self._transit: deque[_Copy] = deque()
        # The tokens that the latest plan with slices sampled: their positions, and whether they are correct.
        self._rows: MutableMapping[Request, tuple[int, bool]] = WeakKeyDictionary()
        self._failed: set[Request] = set()
        self.tainted: dict[int, str] = {}

    def meet(self, request: Request, salt: int) -> None:
        """Register a request. Requests without a prefix share KV with no others."""
        shares = request.prefix is not None
        self._tags[request] = [_tag(_tag(shares, salt if shares else request.id), request.progress.reverse)]
        if shares:
            self._prefixes[request] = ContentPrefix(self._size, salted(salt))

    def fill(self, request: Request, start: int = 0) -> None:
        """Write the KV of the request's computed tokens after the first `start`, as if it came from elsewhere."""
        tags = self._tags_of(request, request.progress.computed)
        self._write(request, tags, self._kv.blocks_of(request).table, start, request.progress.computed)

    def run(
        self, plan: StepPlan, seconds: float, *, fails_slices: Collection[int], fails: Fails, held: int
    ) -> StepResult:
        """Run a plan.

        Args:
            fails_slices: Ids of the requests whose slices fail.
            fails: Whether a move fails; called at its end.
            held: Number of the latest overlapped moves of each direction that do not end yet.
        """
        ended = sorted(plan.blocking, key=lambda move: _ORDER.index(move.direction))
        failed = [move for move in ended if self._copy(move, fails)]
        for move in plan.overlapped:
            self._begin(move)
        self.tainted = {}
        tokens: list[int | None] = [None] * len(plan.slices)
        errors = self._compute(plan.slices, fails_slices, tokens) if plan.slices else {}
        for copy in self._due(held):
            ended.append(copy.move)
            if self._end(copy, fails):
                failed.append(copy.move)
        completed = [move for move in ended if not any(move is other for other in failed)]
        return StepResult(plan, tokens, seconds, completed=completed, failed=failed, dropped=errors)

    def follow(self, result: StepResult) -> None:
        """Repeat what another executor has done. Slices that read KV other than their own are in `tainted`."""
        plan, failed = result.plan, result.failed

        def fails(move: Move) -> bool:
            return any(move is other for other in failed)

        for move in sorted(plan.blocking, key=lambda move: _ORDER.index(move.direction)):
            self._copy(move, fails)
        for move in plan.overlapped:
            self._begin(move)
        self.tainted = {}
        fails_slices = {plan.slices[index].request.id for index in result.dropped}
        if plan.slices:
            self._compute(plan.slices, fails_slices, [None] * len(plan.slices))
        ended = [*result.completed, *failed]
        for copy in [copy for copy in self._transit if any(copy.move is move for move in ended)]:
            self._end(copy, fails)

    def lose(self, moves: Iterable[Move]) -> None:
        """Undo blocking moves whose failure is reported late, except slots that were overwritten since."""
        for move in moves:
            tags = set(self._tags_of(move.request, move.request.progress.computed))
            for _, target, slot in self._pairs(move):
                if target[slot] in tags:
                    target[slot] = GARBAGE

    # -- slices -------------------------------------------------------------------------------------------

    def _compute(
        self, slices: Sequence[Slice], fails_slices: Collection[int], tokens: list[int | None]
    ) -> dict[int, str]:
        errors: dict[int, str] = {}
        rows: dict[Request, tuple[int, bool]] = {}
        written: list[tuple[int, Slice, list[int]]] = []
        for index, piece in enumerate(slices):
            request, end = piece.request, piece.start + piece.tokens
            is_right = True
            if request in self._failed and (self._voids or piece.awaits):
                errors[index] = "an earlier slice of this request failed"
                continue
            if piece.awaits:
                row = self._rows.get(request)
                if row is None or row[0] != end - 1:
                    raise FindingError(
                        "awaits", f"request {request.id} awaits a token that the latest plan did not sample"
                    )
                is_right = row[1]
            if request.id in fails_slices:
                errors[index] = SLICE_ERROR
                self._failed.add(request)
                continue
            tags = self._tags_of(request, end)
            problem = self._problem(request, tags, piece.blocks, piece.start)
            if problem or not is_right or len(tags) <= end:
                # A finished request never gets the token that it awaited.
                self.tainted[index] = problem or "a token that it awaited is wrong or was not kept"
            written.append((index, piece, tags))
            if piece.samples:
                is_tainted = index in self.tainted
                tokens[index] = POISON if is_tainted else tags[end] % VOCABULARY
                rows[request] = (end, not is_tainted)
        for index, piece, tags in written:
            end = piece.start + piece.tokens
            self._write(piece.request, [] if index in self.tainted else tags, piece.blocks, piece.start, end)
        for index, piece, tags in written if len(written) > 1 else ():
            end = piece.start + piece.tokens
            if index not in self.tainted and (text := self._problem(piece.request, tags, piece.blocks, end)):
                raise FindingError("race", f"two slices of one plan use a slot: {text}")
        self._rows = WeakKeyDictionary(rows)
        return errors

    def _tags_of(self, request: Request, end: int) -> list[int]:
        """Return tags of the request, where index i is that of its first i tokens, for up to `end` known tokens."""
        if request not in self._tags:
            self.meet(request, 0)
        tags = self._tags[request]
        have = len(tags) - 1
        if have < end:
            for token in request.tokens(have, end):
                tags.append(_tag(tags[-1], token))
        return tags

    def _problem(self, request: Request, tags: list[int], blocks: Sequence[int], count: int) -> str:
        """Return what is wrong with the KV of the request's first `count` tokens, or an empty string."""
        size, step = self._size, -1 if request.progress.reverse else 1
        n_blocks = -(-count // size)
        if not request.progress.reverse:  # the usual case, compared at once
            found = list(chain.from_iterable(map(self._device.__getitem__, blocks[:n_blocks])))
            if found[:count] == tags[1 : 1 + count]:
                return ""
        for index in range(n_blocks):
            want = tags[1 + index * size : 1 + min(count, (index + 1) * size)]
            got = self._device[blocks[index]][::step][: len(want)]
            if got != want and (self._is_exact or [abs(tag) for tag in got] != want):
                at = next(at for at, (one, other) in enumerate(zip(got, want, strict=False)) if abs(one) != other)
                return f"block {blocks[index]} lacks position {index * size + at} of request {request.id}"
        return ""

    def _write(self, request: Request, tags: list[int], blocks: Sequence[int], start: int, end: int) -> None:
        size, device, reverse = self._size, self._device, request.progress.reverse

        def slot_of(position: int) -> tuple[list[int], int]:
            index, slot = divmod(position, size)
            return device[blocks[index]], size - 1 - slot if reverse else slot

        if tags and not self._is_exact:
            was_lossy = any(block[slot] < 0 for block, slot in map(slot_of, range(start)))
            tags = [-tag for tag in tags] if was_lossy else tags
        for position in range(start, end):
            block, slot = slot_of(position)
            block[slot] = tags[position + 1] if tags else GARBAGE

    # -- moves --------------------------------------------------------------------------------------------

    def _pools(self, move: Move) -> tuple[Pool, Pool]:
        here = self._cpu if move.direction is Direction.IN else self._device
        return here, self._cpu if move.direction is Direction.OUT else self._device

    def _pairs(self, move: Move) -> Iterator[tuple[list[int], list[int], int]]:
        """Yield each source block, its target block and the slot that is copied."""
        here, there = self._pools(move)
        for index, (source, target) in enumerate(zip(move.source, move.target, strict=True)):
            first, count = move.spans[index] if move.spans else (0, self._size)
            for slot in range(first, first + count):
                yield here[source], there[target], slot

    def _carried(self, move: Move, value: int) -> int:
        return value if self._is_exact or move.direction is Direction.WITHIN else -abs(value)

    def _copy(self, move: Move, fails: Fails) -> bool:
        has_failed = fails(move)
        for source, target, slot in self._pairs(move):
            target[slot] = GARBAGE if has_failed else self._carried(move, source[slot])
        return has_failed

    def _begin(self, move: Move) -> None:
        self._marker += 1
        values = [source[slot] for source, _, slot in self._pairs(move)]
        for _, target, slot in self._pairs(move):
            target[slot] = self._marker
        self._transit.append(_Copy(move, values, self._marker))

    def _end(self, copy: _Copy, fails: Fails) -> bool:
        has_failed = fails(copy.move)
        for value, (source, target, slot) in zip(copy.values, self._pairs(copy.move), strict=True):
            is_there = not has_failed and source[slot] == value and target[slot] == copy.marker
            target[slot] = self._carried(copy.move, value) if is_there else GARBAGE
        self._transit.remove(copy)
        return has_failed

    def _due(self, held: int) -> list[_Copy]:
        """Return the overlapped moves that end now, in order for each direction."""
        due: list[_Copy] = []
        for direction in (Direction.OUT, Direction.IN):
            lane = [copy for copy in self._transit if copy.move.direction is direction]
            due += lane[: max(0, len(lane) - held)]
        return due

    # -- the prefix cache ---------------------------------------------------------------------------------

    def check_keys(self) -> None:
        """Raise `FindingError` unless every block with a prefix-cache key holds the KV of that key."""
        for name, pool, blocks in (("device", self._kv.device, self._device), ("CPU", self._kv.cpu, self._cpu)):
            self._check_pool(name, pool, blocks)

    def _check_pool(self, name: str, pool: BlockPool, blocks: Pool) -> None:
        for block, key in pool._keys.items():
            if key not in self._content:
                self._learn_keys()
            if (want := self._content.get(key)) is None:
                raise FindingError("unknown key", f"{name} block {block} has a key of no request's tokens")
            if blocks[block] != want:
                raise FindingError(
                    "wrong key", f"{name} block {block} holds {blocks[block]}, its key stands for {want}"
                )

    def _learn_keys(self) -> None:
        size = self._size
        for request, prefix in self._prefixes.items():
            tags = self._tags_of(request, request.progress.known)
            for index, key in enumerate(
                prefix.keys(request.tokens, request.progress.known, reverse=request.progress.reverse)
            ):
                if key not in self._content:
                    want = tags[1 + index * size : 1 + (index + 1) * size]
                    self._content[key] = want[::-1] if request.progress.reverse else want


def salted(salt: int) -> bytes:
    return bytes((salt,))


def _tag(before: int, token: int) -> int:
    return hash((before, token)) % (_TAGS - 1) + 1
