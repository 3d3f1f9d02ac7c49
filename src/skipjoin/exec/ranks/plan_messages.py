from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from skipjoin.core.request import Request, RequestOptions
from skipjoin.core.step import Direction, Move, Slice, StepPlan
from skipjoin.exec.ranks.messages import (
    CHECKSUM_BYTES,
    FIRST_CHECKSUM,
    TO_RANK_DECODER,
    AdapterMessage,
    KnownTokens,
    MaskMessage,
    MovePart,
    NewRequest,
    PlanMessage,
    SlicePart,
    ToRank,
    checksum_after,
)
from skipjoin.exec.sampling import Sampling

_DIRECTIONS = tuple(Direction)


class OutOfStepError(Exception):
    """A rank did not receive every plan once and in order."""


@dataclass(slots=True)
class _SentState:
    number: int
    tokens: int = 0
    table: tuple[int, ...] = ()


class PlanWriter:
    def __init__(self) -> None:
        self.checksum = FIRST_CHECKSUM
        self._sent: dict[Request, _SentState] = {}
        self._new: list[NewRequest] = []
        self._known: list[KnownTokens] = []
        self._ended: list[int] = []
        self._requests = 0
        self._encoder = msgspec.msgpack.Encoder()

    def write(self, plan: StepPlan) -> bytes:
        slices = [self._slice(slice_) for slice_ in plan.slices]
        blocking, overlapped = ([self._move(move) for move in moves] for moves in (plan.blocking, plan.overlapped))
        return self._sealed(PlanMessage(plan.id, slices, blocking, overlapped, *self._untold()))

    def write_mask(self, request: Request) -> tuple[int, bytes]:
        number = self._updated(request).number
        return number, self._sealed(MaskMessage(number, *self._untold()))

    def write_adapter(self, message: AdapterMessage) -> bytes:
        return self._sealed(message)

    def on_finished(self, request: Request) -> None:
        if (sent := self._sent.pop(request, None)) is not None:
            self._ended.append(sent.number)

    def _untold(self) -> tuple[list[NewRequest], list[KnownTokens], list[int]]:
        untold = self._new, self._known, self._ended
        self._new, self._known, self._ended = [], [], []
        return untold

    def _sealed(self, message: ToRank) -> bytes:
        body = self._encoder.encode(message)
        self.checksum = checksum_after(self.checksum, body)
        return self.checksum + body

    def _slice(self, slice_: Slice) -> SlicePart:
        sent, blocks = self._updated(slice_.request), slice_.blocks
        kept = len(sent.table)
        if blocks is not sent.table:
            if blocks[:kept] != sent.table:
                kept = 0
            sent.table = blocks
        return SlicePart(
            request=sent.number,
            start=slice_.start,
            tokens=slice_.tokens,
            samples=slice_.samples,
            awaits=slice_.awaits,
            kept=kept,
            blocks=list(blocks[kept:]),
        )

    def _move(self, move: Move) -> MovePart:
        return MovePart(
            direction=_DIRECTIONS.index(move.direction),
            request=self._state_of(move.request).number if move.request is not None else None,
            source=list(move.source),
            target=list(move.target),
            tokens=move.tokens,
            spans=list(move.spans),
        )

    def _updated(self, request: Request) -> _SentState:
        sent, output = self._state_of(request), request.progress.output
        if len(output) > sent.tokens:
            self._known.append(KnownTokens(sent.number, output[sent.tokens :]))
            sent.tokens = len(output)
        return sent

    def _state_of(self, request: Request) -> _SentState:
        sent = self._sent.get(request)
        if sent is None:
            sent = self._sent[request] = _SentState(self._requests)
            self._requests += 1
            sampling: Sampling = request.sampling  # type: ignore[assignment]
            self._new.append(
                NewRequest(
                    number=sent.number,
                    id=request.id,
                    prompt=list(request.prompt),
                    params=sampling.params,
                    seed=sampling.seed,
                    eos_token_ids=tuple(sampling.eos_token_ids),
                    reverse=request.progress.reverse,
                    client=request.options.client,
                    cache_salt=request.options.cache_salt,
                    adapter=request.options.adapter,
                )
            )
        return sent


class MaskOrder(NamedTuple):
    number: int
    request: Request


@dataclass(slots=True)
class _Mirrored:
    request: Request
    table: tuple[int, ...] = ()


class PlanReader:
    """Reads plan messages on a rank, into copies of the requests that are correct only as far as plans need."""

    def __init__(self) -> None:
        self.checksum = FIRST_CHECKSUM
        self.finished: list[Request] = []
        self._requests: dict[int, _Mirrored] = {}
        self._moves: dict[Move, int] = {}
        self._next_move = 0

    def read(self, message: bytes) -> StepPlan | MaskOrder | AdapterMessage:
        sent, body = message[:CHECKSUM_BYTES], message[CHECKSUM_BYTES:]
        found = checksum_after(self.checksum, body)
        if sent != found:
            raise OutOfStepError(
                f"the checksum of all plans up to this one is {found.hex()} here and {sent.hex()} at the sender: "
                "a plan was missed, repeated, reordered or changed in transit"
            )
        self.checksum = found
        plan = TO_RANK_DECODER.decode(body)
        if isinstance(plan, AdapterMessage):
            self.finished = []
            return plan
        self._read_requests(plan)
        if isinstance(plan, MaskMessage):
            request = self._requests[plan.request].request
            self._end(plan)
            return MaskOrder(plan.request, request)
        slices = tuple(self._slice(part) for part in plan.slices)
        blocking, overlapped = self._read_moves(plan.blocking), self._read_moves(plan.overlapped)
        self._end(plan)
        return StepPlan(plan.id, slices, blocking, overlapped)

    def _read_requests(self, message: PlanMessage | MaskMessage) -> None:
        for new in message.new:
            sampling = Sampling(new.params, new.seed, new.eos_token_ids)
            options = RequestOptions(client=new.client, cache_salt=new.cache_salt, adapter=new.adapter)
            request = Request(new.id, 0.0, new.prompt, 1, options=options, sampling=sampling)
            if new.reverse:
                request.progress.fill_down()
            self._requests[new.number] = _Mirrored(request)
        for known in message.known:
            self._requests[known.request].request.progress.extend(known.tokens)

    def _end(self, message: PlanMessage | MaskMessage) -> None:
        # Moves in flight keep references to their requests.
        self.finished = [self._requests.pop(number).request for number in message.ended]

    def numbers_of(self, ended: Sequence[Move]) -> list[int]:
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
            request = self._requests[part.request].request if part.request is not None else None
            direction = _DIRECTIONS[part.direction]
            move = Move(direction, request, tuple(part.source), tuple(part.target), part.tokens, tuple(part.spans))
            self._moves[move] = self._next_move
            self._next_move += 1
            moves.append(move)
        return tuple(moves)
