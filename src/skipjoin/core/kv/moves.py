from __future__ import annotations

from collections.abc import Sequence

from skipjoin.core.request import Request
from skipjoin.core.step import Direction, Move, Span

# Source block, target block and the slots to copy, at least one.
Copy = tuple[int, int, Span]


def move_of(direction: Direction, request: Request, copies: Sequence[Copy]) -> Move:
    source, target, spans = zip(*copies, strict=True)
    return Move(direction, request, source, target, sum(span.slots for span in spans), spans)


def joined(first: Move, second: Move, block_size: int) -> Move:
    if first.spans or second.spans:
        first, second = _spanned(first, block_size), _spanned(second, block_size)
    return first._replace(
        source=first.source + second.source,
        target=first.target + second.target,
        tokens=first.tokens + second.tokens,
        spans=first.spans + second.spans,
    )


def _spanned(move: Move, block_size: int) -> Move:
    if move.spans:
        return move
    assert move.request is not None
    reverse = move.request.progress.reverse
    counts = [min(block_size, move.tokens - index * block_size) for index in range(len(move.source))]
    return move._replace(spans=tuple(Span(block_size - count if reverse else 0, count) for count in counts))
