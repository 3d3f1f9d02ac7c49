"""Plans as messages: the driver's side, which knows the live requests, and the ranks' side, which mirrors them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from skipjoin.core.request import Request
from skipjoin.core.step import Direction, Move, Slice, StepPlan
from skipjoin.exec.ranks.messages import (
    CHECKSUM_BYTES,
    FIRST_CHECKSUM,
    KnownTokens,
    MovePart,
    NewRequest,
    PlanMessage,
    SlicePart,
    checksum_after,
)
from skipjoin.exec.sampling import Sampling

# With every plan so many requests more than it has slices are looked at in turn, whether they ended: more than can end
# with a plan, so that the ranks forget requests faster than they learn of them.
_LOOKS = 8


class OutOfStepError(Exception):
    """A rank did not get the same plans as the others, each once and in order."""


@dataclass(slots=True)
class _Told:
    """What the ranks know of a request. tokens: generated ones. table: the last one sent."""

    number: int
    tokens: int = 0
    table: tuple[int, ...] = ()


class PlanWriter:
    """Writes plans for ranks that read all of them, in order. checksum: of those written so far."""

    def __init__(self) -> None:
        self.checksum = FIRST_CHECKSUM
        self._told: dict[Request, _Told] = {}
        self._to_look_at: deque[Request] = deque()
        self._requests = 0
        self._encoder = msgspec.msgpack.Encoder()

    def write(self, plan: StepPlan) -> bytes:
        """The message to every rank."""
        new: list[NewRequest] = []
        known: list[KnownTokens] = []
        message = PlanMessage(
            id=plan.id,
            slices=[self._slice(piece, new, known) for piece in plan.slices],
            blocking=[self._move(move, new) for move in plan.blocking],
            overlapped=[self._move(move, new) for move in plan.overlapped],
            new=new,
            known=known,
            ended=self._ended(len(plan.slices) + _LOOKS),
        )
        body = self._encoder.encode(message)
        self.checksum = checksum_after(self.checksum, body)
        return self.checksum + body

    def _slice(self, piece: Slice, new: list[NewRequest], known: list[KnownTokens]) -> SlicePart:
        told, blocks = self._tell(piece.request, new), piece.blocks
        output = piece.request.output
        if len(output) > told.tokens:
            known.append(KnownTokens(told.number, output[told.tokens :]))
            told.tokens = len(output)
        kept = len(told.table)
        if blocks is not told.table:
            if blocks[:kept] != told.table:
                kept = 0
            told.table = blocks
        return SlicePart(
            request=told.number,
            start=piece.start,
            tokens=piece.tokens,
            samples=piece.samples,
            awaits=piece.awaits,
            kept=kept,
            blocks=list(blocks[kept:]),
        )

    def _move(self, move: Move, new: list[NewRequest]) -> MovePart:
        number = self._tell(move.request, new).number
        return MovePart(move.direction is Direction.OUT, number, list(move.source), list(move.target))

    def _tell(self, request: Request, new: list[NewRequest]) -> _Told:
        told = self._told.get(request)
        if told is None:
            told = self._told[request] = _Told(self._requests)
            self._requests += 1
            self._to_look_at.append(request)
            sampling: Sampling = request.sampling  # type: ignore[assignment]
            new.append(
                NewRequest(
                    number=told.number,
                    id=request.id,
                    prompt=list(request.prompt),
                    params=sampling.params,
                    seed=sampling.seed,
                    eos_token_ids=tuple(sampling.eos_token_ids),
                )
            )
        return told

    def _ended(self, looks: int) -> list[int]:
        """Requests that the ranks need not know any more. Who ended is in no later plan."""
        ended = []
        for _ in range(min(looks, len(self._to_look_at))):
            request = self._to_look_at.popleft()
            if request.finish_reason is None:
                self._to_look_at.append(request)
            else:
                ended.append(self._told.pop(request).number)
        return ended


@dataclass(slots=True)
class _Mirrored:
    request: Request
    table: tuple[int, ...] = ()


class PlanReader:
    """Reads plans on a rank. Their requests are its own copies of the driver's: prompt, output and sampling are true as
    far as the plans need them, everything else is not. checksum: of the plans read so far."""

    def __init__(self) -> None:
        self.checksum = FIRST_CHECKSUM
        self._requests: dict[int, _Mirrored] = {}
        self._moves: dict[Move, int] = {}
        self._next_move = 0
        self._decoder = msgspec.msgpack.Decoder(PlanMessage)

    def read(self, message: bytes) -> StepPlan:
        """The plan of a message. Raises `OutOfStepError` unless it is the next one."""
        sent, body = message[:CHECKSUM_BYTES], message[CHECKSUM_BYTES:]
        found = checksum_after(self.checksum, body)
        if sent != found:
            raise OutOfStepError(
                f"the checksum of all plans up to this one is {found.hex()} here and {sent.hex()} at the sender: "
                "a plan was missed, repeated, reordered or changed on its way"
            )
        self.checksum = found
        plan = self._decoder.decode(body)
        for new in plan.new:
            sampling = Sampling(new.params, new.seed, new.eos_token_ids)
            self._requests[new.number] = _Mirrored(Request(new.id, 0.0, new.prompt, 1, sampling=sampling))
        for known in plan.known:
            self._requests[known.request].request.output.extend(known.tokens)
        slices = tuple(self._slice(part) for part in plan.slices)
        blocking, overlapped = self._read_moves(plan.blocking), self._read_moves(plan.overlapped)
        # A move on its way keeps its request.
        for number in plan.ended:
            del self._requests[number]
        return StepPlan(plan.id, slices, blocking, overlapped)

    def numbers_of(self, ended: Sequence[Move]) -> list[int]:
        """Of moves that ended, which are forgotten by this."""
        return [self._moves.pop(move) for move in ended]

    def _slice(self, part: SlicePart) -> Slice:
        held = self._requests[part.request]
        if part.blocks or part.kept != len(held.table):
            held.table = (*held.table[: part.kept], *part.blocks)
        return Slice(
            request=held.request,
            start=part.start,
            tokens=part.tokens,
            samples=part.samples,
            awaits=part.awaits,
            blocks=held.table,
        )

    def _read_moves(self, parts: Sequence[MovePart]) -> tuple[Move, ...]:
        moves = []
        for part in parts:
            direction = Direction.OUT if part.is_out else Direction.IN
            move = Move(direction, self._requests[part.request].request, tuple(part.source), tuple(part.target))
            self._moves[move] = self._next_move
            self._next_move += 1
            moves.append(move)
        return tuple(moves)
