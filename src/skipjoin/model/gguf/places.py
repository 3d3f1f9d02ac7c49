from __future__ import annotations

from typing import NamedTuple

from skipjoin.model.gguf.architecture import JOINED_QKV, QKV, Heads
from skipjoin.model.gguf.file import Gguf, StoredTensor


class Place(NamedTuple):
    """Tensor, its dimensions before a matrix's, and the row at which the wanted one begins, with `rows` of its own."""

    tensor: StoredTensor
    lead: tuple[int, ...]
    first: int = 0
    rows: int | None = None


def place_of(file: Gguf, name: str, lead: tuple[int, ...], expert: int, heads: Heads) -> Place | None:
    """Return where a file has a tensor: alone, in one of queries, keys and values, or for each expert."""
    if (tensor := file.tensors.get(name)) is not None:
        return Place(tensor, lead)
    part, kind = name.rpartition(".")[::2]
    if lead and (tensor := file.tensors.get(f"{part.removesuffix('_exps')}.{expert}.{kind}")) is not None:
        return Place(tensor, ())
    layer, _, inner = part.rpartition(".")
    if inner not in QKV or (tensor := file.tensors.get(f"{layer}.{JOINED_QKV}.{kind}")) is None:
        return None
    size = tensor.shape[0] // (heads.queries + 2 * heads.keys)
    counts = {"attn_q": heads.queries, "attn_k": heads.keys, "attn_v": heads.keys}
    before = {"attn_q": 0, "attn_k": heads.queries, "attn_v": heads.queries + heads.keys}
    return Place(tensor, (), before[inner] * size, counts[inner] * size)
