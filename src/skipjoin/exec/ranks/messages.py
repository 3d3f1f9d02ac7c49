"""The messages between the driver and the ranks of a model: msgspec structs of declared types, encoded as msgpack.

A plan message holds changes to what the ranks know: a request's prompt and sampling once, then newly known tokens and
blocks added to its table. A checksum over this and all earlier plans precedes the plan's bytes, so that a rank detects
a missed, repeated or reordered plan before it computes anything.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from skipjoin.core.step import Span
from skipjoin.sampling import SamplingParams, TokenDetail

CHECKSUM_BYTES = 8
# The checksum before the first plan.
FIRST_CHECKSUM = bytes(CHECKSUM_BYTES)


class NewRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request, sent before the first plan that has it. number: never reused, unlike ids. id: for log messages."""

    number: int
    id: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...]
    reverse: bool = False


class KnownTokens(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Generated tokens of a request that were not sent before, in order."""

    request: int
    tokens: list[int]


class SlicePart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """See `Slice`. Its blocks are the first `kept` of the last table sent for the request, then `blocks`."""

    request: int
    start: int
    tokens: int
    samples: bool
    awaits: bool
    kept: int
    blocks: list[int]


class MovePart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """See `Move`. direction: its place among all directions. Moves are numbered from 0 over all plans; in each plan
    blocking moves come first."""

    direction: int
    request: int | None
    source: list[int]
    target: list[int]
    tokens: int
    spans: list[Span] = []


class PlanMessage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A plan. ended: requests that appear in no plan from this one on."""

    id: int
    slices: list[SlicePart]
    blocking: list[MovePart] = []
    overlapped: list[MovePart] = []
    new: list[NewRequest] = []
    known: list[KnownTokens] = []
    ended: list[int] = []


class Done(msgspec.Struct, frozen=True, tag="done", array_like=True, gc=False):
    """A rank's result of a plan. plan: its id. checksum: of all plans so far. tokens: empty on a rank that does not
    sample. details: set on one of the ranks that sample. idle: see `StageTime`. landed, failed: numbers of moves. See
    `StepResult` for the rest."""

    plan: int
    checksum: bytes
    tokens: list[int | None]
    seconds: float
    idle: float
    moving: float
    landed: list[int]
    failed: list[int]
    details: dict[int, TokenDetail] = {}


class RankFailed(msgspec.Struct, frozen=True, tag="failed", array_like=True, gc=False):
    """The rank failed. lost_peer: only because it lost another rank. out_of_step: its plans differ from the sender's,
    so that its results are invalid. out_of_memory: the step took more memory than there is."""

    text: str
    lost_peer: bool
    out_of_step: bool = False
    out_of_memory: bool = False


FromRank = Done | RankFailed

# Made with the import, by one thread: while a struct's first decoder is made, a second thread's reads through null.
PLAN_DECODER = msgspec.msgpack.Decoder(PlanMessage)
FROM_RANK_DECODER = msgspec.msgpack.Decoder(FromRank)


def checksum_after(before: bytes, body: bytes) -> bytes:
    """The checksum of all plans up to the one with this body."""
    return blake2b(before + body, digest_size=CHECKSUM_BYTES).digest()
