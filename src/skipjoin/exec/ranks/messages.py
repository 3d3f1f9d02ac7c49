"""Messages between the driver and the ranks, encoded as msgpack.

They hold what a rank does not know yet of each request, after a checksum over this and all earlier messages, so that a
rank detects a missed, repeated or reordered one.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from skipjoin.core.step import Span
from skipjoin.sampling import SamplingParams, TokenDetail

CHECKSUM_BYTES = 8
# Checksum before the first plan.
FIRST_CHECKSUM = bytes(CHECKSUM_BYTES)


class NewRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    number: int
    id: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...]
    reverse: bool = False
    client: str = ""
    cache_salt: str = ""
    adapter: int = 0


class KnownTokens(msgspec.Struct, frozen=True, array_like=True, gc=False):
    request: int
    tokens: list[int]


class SlicePart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Encoded `Slice`. Its blocks are the first `kept` of the request's last sent table, followed by `blocks`."""

    request: int
    start: int
    tokens: int
    samples: bool
    awaits: bool
    kept: int
    blocks: list[int]


class MovePart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Encoded `Move`. Moves are numbered from 0 over all plans; in each plan blocking moves come first."""

    direction: int
    request: int | None
    source: list[int]
    target: list[int]
    tokens: int
    spans: list[Span] = []


class PlanMessage(msgspec.Struct, frozen=True, tag="plan", array_like=True, gc=False):
    id: int
    slices: list[SlicePart]
    blocking: list[MovePart] = []
    overlapped: list[MovePart] = []
    new: list[NewRequest] = []
    known: list[KnownTokens] = []
    ended: list[int] = []


class MaskMessage(msgspec.Struct, frozen=True, tag="mask", array_like=True, gc=False):
    """Order to compute the mask after a request's output, and its grammar if new, outside of the steps."""

    request: int
    new: list[NewRequest] = []
    known: list[KnownTokens] = []
    ended: list[int] = []


class StepMasks(msgspec.Struct, frozen=True, array_like=True, gc=False):
    slice: int
    is_slow: bool
    seconds: float


class AdapterMessage(msgspec.Struct, frozen=True, tag="adapter", array_like=True, gc=False):
    """Order to load an adapter, which is answered, or to unload it if there is no folder."""

    number: int
    name: str = ""
    folder: str = ""


class Done(msgspec.Struct, frozen=True, tag="done", array_like=True, gc=False):
    plan: int
    checksum: bytes
    tokens: list[int | None]
    seconds: float
    idle: float
    moving: float
    completed: list[int]
    failed: list[int]
    details: dict[int, TokenDetail] = {}
    dropped: dict[int, str] = {}
    refused: list[int] = []
    masks: list[StepMasks] = []


class MaskBegun(msgspec.Struct, frozen=True, tag="begun", array_like=True, gc=False):
    request: int


class MaskDone(msgspec.Struct, frozen=True, tag="masked", array_like=True, gc=False):
    request: int
    is_slow: bool
    seconds: float


class AdapterDone(msgspec.Struct, frozen=True, tag="adapted", array_like=True, gc=False):
    number: int
    bytes: int
    error: str = ""


class RankFailed(msgspec.Struct, frozen=True, tag="failed", array_like=True, gc=False):
    text: str
    lost_peer: bool
    out_of_step: bool = False
    out_of_memory: bool = False


ToRank = PlanMessage | MaskMessage | AdapterMessage
FromRank = Done | MaskBegun | MaskDone | AdapterDone | RankFailed

# Created at import, in one thread: while a struct's first decoder is created, a second thread's would dereference null.
TO_RANK_DECODER: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
FROM_RANK_DECODER: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)


def checksum_after(before: bytes, body: bytes) -> bytes:
    return blake2b(before + body, digest_size=CHECKSUM_BYTES).digest()
