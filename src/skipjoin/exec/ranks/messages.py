"""What the driver and the ranks of a model say to each other: msgspec structs of declared types, as msgpack.

A plan travels as the changes to what the ranks know already: a request's prompt and sampling once, then the tokens that
became known and the blocks that its table gained. Before the plan's bytes stands a checksum over these and over
all plans before it, so that a rank that missed, repeated or reordered one notices before it computes anything.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from skipjoin.sampling import SamplingParams, TokenDetail

CHECKSUM_BYTES = 8
# Of no plan at all.
FIRST_CHECKSUM = bytes(CHECKSUM_BYTES)


class NewRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request, before the first plan that has it. number: unique for ever, unlike ids. id: for people."""

    number: int
    id: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...]


class KnownTokens(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Generated tokens of a request that the ranks were not told before, in order."""

    request: int
    tokens: list[int]


class SlicePart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """See `Slice`. Its blocks are the first `kept` of the last table that was sent for the request, then `blocks`."""

    request: int
    start: int
    tokens: int
    samples: bool
    awaits: bool
    kept: int
    blocks: list[int]


class MovePart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """See `Move`. Moves are numbered from 0 over all plans, in each first the blocking ones, then the overlapped."""

    is_out: bool
    request: int
    source: list[int]
    target: list[int]


class PlanMessage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A plan. ended: requests that no plan from this one on has."""

    id: int
    slices: list[SlicePart]
    blocking: list[MovePart] = []
    overlapped: list[MovePart] = []
    new: list[NewRequest] = []
    known: list[KnownTokens] = []
    ended: list[int] = []


class Done(msgspec.Struct, frozen=True, tag="done", array_like=True, gc=False):
    """A rank's part of a step. plan: its id. checksum: of all plans so far. tokens: empty on a rank that does not
    sample. details: on one of those that do. idle: see `StageTime`. See `StepResult` for the rest; landed, failed:
    numbers of moves."""

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
    """The rank cannot go on. lost_peer: only because another one did not. out_of_step: it got other plans than the
    others, so that nothing it computes can be trusted."""

    text: str
    lost_peer: bool
    out_of_step: bool = False


FromRank = Done | RankFailed


def checksum_after(before: bytes, body: bytes) -> bytes:
    """The checksum of all plans up to the one with that body."""
    return blake2b(before + body, digest_size=CHECKSUM_BYTES).digest()
