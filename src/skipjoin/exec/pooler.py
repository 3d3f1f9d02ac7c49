from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from skipjoin.core.step import Slice
from skipjoin.exec.request_state import RequestState
from skipjoin.exec.sampling import Sampling
from skipjoin.model.batch import PackedBatch
from skipjoin.model.causal_lm import CausalLM
from skipjoin.model.transfer import CpuCopy, to_device
from skipjoin.pooling import Pooling

# Token of a request that has a vector in its place.
PLACEHOLDER = 0
_TINY = 1e-12  # length below which a vector is not normalized, as in torch
# Vectors of slices by their index in the plan.
Vectors = CpuCopy[list[tuple[int, bytes]]]
_DEFAULT = Pooling()


class Pooler:
    """Makes vectors of the hidden states that leave a forward pass.

    Requests are pooled one by one and in float64, so that no bit depends on the batch. A mean is a sum in the order of
    positions, kept per block, so that chunks and evictions do not change it.
    """

    def __init__(self, model: CausalLM, block_size: int) -> None:
        assert model.config.pooling is not None
        self._model, self._settings, self._block_size = model, model.config.pooling, block_size

    @property
    def reads_all(self) -> bool:
        return self._settings.how != "last"

    def typed(self, batch: PackedBatch, slices: Sequence[Slice]) -> PackedBatch:
        seconds = [_asked(slice_).second for slice_ in slices]
        if not self._model.config.is_encoder or not any(seconds):
            return batch
        types = torch.zeros(batch.num_tokens, dtype=torch.int64)
        first = 0
        for slice_, second in zip(slices, seconds, strict=True):
            if second:
                types[first + max(0, second - slice_.start) : first + slice_.tokens] = 1
            first += slice_.tokens
        return replace(batch, types=to_device(types, self._model.device))

    def pool(
        self, parts: Sequence[tuple[int, Slice, RequestState]], rows: torch.Tensor, row_starts: Sequence[int]
    ) -> Vectors:
        """Return the vectors of the slices that end their prompts. A part has a slice's index in the plan."""
        found: list[tuple[int, torch.Tensor]] = []
        for (index, slice_, state), first, end in zip(parts, row_starts, row_starts[1:], strict=False):
            own = rows[first:end]
            if self._settings.how == "mean":
                row = self._add(slice_, state, own) / (slice_.start + slice_.tokens)
            elif not slice_.samples:
                continue
            else:
                row = own[0] if self._settings.how == "cls" else own[-1]
            if slice_.samples:
                found.append((index, self._vector(row, _asked(slice_))))
        indexes = [index for index, _ in found]

        def made(vectors: list[torch.Tensor]) -> list[tuple[int, bytes]]:
            return [(at, vector.numpy().astype("<f4").tobytes()) for at, vector in zip(indexes, vectors, strict=True)]

        return CpuCopy([vector for _, vector in found], made)

    def _vector(self, row: torch.Tensor, asked: Pooling) -> torch.Tensor:
        if (head := self._model.head) is not None:
            score = head(row[None])
            return (score.sigmoid() if self._settings.squashes else score).float()
        for dense in self._model.dense:
            row = dense(row)
        vector = row.double()[: asked.dimensions]
        return (vector / vector.norm().clamp_min(_TINY) if self._settings.normalize else vector).float()

    def _add(self, slice_: Slice, state: RequestState, rows: torch.Tensor) -> torch.Tensor:
        start, end = slice_.start, slice_.start + slice_.tokens
        if self._model.config.is_encoder:  # the slice is the whole prompt
            return rows.sum(0, dtype=torch.float64)
        before = state.sums.get(start)
        if before is None:  # the first token, or a measurement that starts anywhere
            before = rows.new_zeros(rows.shape[1], dtype=torch.float64)
        sums = torch.cat([before[None], rows.double()]).cumsum(0)
        size = self._block_size
        kept = [*range(-(-(start + 1) // size) * size, end, size), end]
        state.sums = {at: value for at, value in state.sums.items() if at <= start}
        state.sums.update((at, sums[at - start].clone()) for at in kept)
        return sums[-1]


def _asked(slice_: Slice) -> Pooling:
    sampling: Sampling = slice_.request.sampling  # type: ignore[assignment]
    return sampling.params.pooling or _DEFAULT
