from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from skipjoin.model.adapters import Adapters
from skipjoin.model.attention.base import AttentionBackend
from skipjoin.model.config import ModelConfig
from skipjoin.model.modules import Embedding, ProjectionNorm, SpreadNorm, SummedLinear
from skipjoin.model.ops.base import HeadNorm, LayerOps, Linear, LookedUp, Norm
from skipjoin.model.parallel import Group, Shard
from skipjoin.model.weights import Matrix, Weights


@dataclass
class Builder:
    config: ModelConfig
    weights: Weights
    ops: LayerOps
    attention: AttentionBackend
    group: Group
    dtype: torch.dtype
    adapters: Adapters
    weight_bytes: int = 0
    # Of these, those of experts; parameters are those that a token uses.
    expert_bytes: int = 0
    parameters: int = 0

    @property
    def shard(self) -> Shard:
        return self.group.shard

    def tensor(self, name: str, *shape: int, rows: range | None = None) -> torch.Tensor:
        return self.counted(self.weights.take(name, *shape, rows=rows))

    def counted(self, taken: torch.Tensor) -> torch.Tensor:
        self.weight_bytes += taken.nbytes
        self.parameters += taken.numel()
        return taken

    def linear(
        self,
        names: str | Sequence[str],
        outs: Sequence[int],
        inputs: int,
        bias: bool,
        *,
        rows: Sequence[range] | None = None,
        orders: Sequence[torch.Tensor | None] | None = None,
        activation: str | None = None,
        takes_adapters: bool = True,
    ) -> Linear:
        """Fuse matrices with the same input.

        Args:
            outs: Rows of the whole matrices, of which this rank has `rows` (Megatron).
            orders: Which of the rank's rows each output has.
            takes_adapters: Whether the input is all tokens of a batch.
        """
        names = [names] if isinstance(names, str) else names
        parts = zip(names, outs, rows or map(range, outs), orders or [None] * len(outs), strict=True)
        matrices = [Matrix(*part) for part in parts]
        self.parameters += sum(len(matrix.rows) for matrix in matrices) * inputs
        product = self.weights.linear(self.ops, matrices, inputs, bias=bias, activation=activation)
        if takes_adapters:
            return self._counted(self.adapters.adapted(product, matrices, inputs, None, activation))
        return self._counted(product)

    def summed_linear(
        self, name: str, out: int, inputs: int, bias: bool, *, columns: range, begins: bool = True, ends: bool = True
    ) -> Linear:
        """Make a product with a split input (Megatron's row parallelism), summed over ranks; rank 0 adds the bias."""
        matrices = [Matrix(name, out, range(out))]
        self.parameters += out * len(columns)
        has_bias = bias and self.shard.tp_rank == 0
        product = self.weights.linear(self.ops, matrices, inputs, bias=has_bias, columns=columns)
        linear = self._counted(self.adapters.adapted(product, matrices, inputs, columns, None))
        return SummedLinear(linear, self.group, begins, ends) if self.shard.tp_size > 1 else linear

    def mlp(
        self, up: str | Sequence[str], down: str, activation: str, *, is_joined: bool = False, begins: bool = True
    ) -> tuple[Linear, Linear]:
        config, own = self.config, self.shard.columns(self.config)
        hidden, width, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        names = [up] if isinstance(up, str) else up
        sizes, rows = [width] * len(names), [own] * len(names)
        if is_joined:
            names, sizes = [*names, *names], [2 * width] * 2
            rows = [own, range(width + own.start, width + own.stop)]
        return (
            self.linear(names, sizes, hidden, bias, rows=rows, activation=activation),
            self.summed_linear(down, hidden, width, bias, columns=own, begins=begins),
        )

    def finish_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        self.parameters += weight.numel()
        return self._counted(self.weights.product(self.ops, weight, bias))

    def _counted(self, linear: Linear) -> Linear:
        self.weight_bytes += linear.weight_bytes
        return linear

    def embedding(self, name: str) -> Embedding:
        config, own = self.config, self.shard.vocabulary(self.config)
        matrix = Matrix(name.removesuffix(".weight"), config.vocab_size, own)
        table = self.weights.table(self.ops, matrix, config.embed_dim)
        if config.tie_embeddings and self.shard.is_last and config.pooling is None and isinstance(table, torch.Tensor):
            # The largest matrix is packed, and its tensor released, before the others need memory.
            output = self.weights.product(self.ops, table, None)
            table = output if isinstance(output, LookedUp) else table
        self.weight_bytes += table.nbytes if isinstance(table, torch.Tensor) else table.weight_bytes
        self.parameters += len(own) * config.embed_dim
        return Embedding(table, own, config.vocab_size, self.group, config.embedding_scale)

    def rms_norm(self, name: str, width: int | None = None) -> Norm:
        weight = self.tensor(f"{name}.weight", width or self.config.hidden_size)
        return self.ops.rms_norm(weight, self.config.norm_eps, self.config.norm_offset)

    def projection_norm(self, name: str, rows: range, total: int) -> HeadNorm:
        config, weight = self.config, self.tensor(f"{name}.weight", total, rows=rows)
        if len(rows) == total:
            return ProjectionNorm(self.ops.rms_norm(weight, config.norm_eps, config.norm_offset))
        return SpreadNorm(weight, config.norm_eps, len(rows) * self.shard.tp_size, self.group)

    def layer_norm(self, name: str, *, bias: bool = True) -> Norm:
        width, weight, shift = self.config.hidden_size, None, None
        if self.config.norm_affine:
            weight, shift = self.tensor(f"{name}.weight", width), self.tensor(f"{name}.bias", width) if bias else None
        return self.ops.layer_norm(width, weight, shift, self.config.norm_eps)
