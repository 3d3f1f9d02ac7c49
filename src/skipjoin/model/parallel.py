"""Model sharding over ranks, and their communication during a step. Does not import torch.

Tensor parallelism follows Megatron-LM: each rank of a stage has some heads, some columns of the MLP or of each expert,
and some of the vocabulary, so that ranks have equal work. A pipeline stage has consecutive layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skipjoin.model.config import ModelConfig
from skipjoin.model.errors import ModelError
from skipjoin.model.family import family_named

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Shard:
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    def __post_init__(self) -> None:
        for kind in ("tp", "pp"):
            rank, size = getattr(self, f"{kind}_rank"), getattr(self, f"{kind}_size")
            if size < 1:
                raise ValueError(f"{kind}_size must be at least 1, got {size}")
            if not 0 <= rank < size:
                raise ValueError(f"{kind}_rank must be in [0, {size - 1}], got {rank}")

    @classmethod
    def of_rank(cls, rank: int, tp_size: int, pp_size: int) -> Shard:
        if not 0 <= rank < tp_size * pp_size:
            raise ValueError(f"rank must be in [0, {tp_size * pp_size - 1}], got {rank}")
        return cls(rank % tp_size, tp_size, rank // tp_size, pp_size)

    @property
    def rank(self) -> int:
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def ranks(self) -> int:
        return self.tp_size * self.pp_size

    @property
    def is_first(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @property
    def name(self) -> str:
        return (
            f"rank {self.rank} (stage {self.pp_rank} of {self.pp_size}, tensor rank {self.tp_rank} of {self.tp_size})"
        )

    def heads(self, config: ModelConfig) -> range:
        return _part(config.num_heads, self.tp_rank, self.tp_size)

    def kv_heads(self, config: ModelConfig) -> range:
        first = self.tp_rank * config.num_kv_heads // self.tp_size
        return range(first, first + max(1, config.num_kv_heads // self.tp_size))

    def query_rows(self, config: ModelConfig) -> range:
        return scaled(self.heads(config), config.head_dim)

    def kv_rows(self, config: ModelConfig) -> range:
        return scaled(self.kv_heads(config), config.head_dim)

    def columns(self, config: ModelConfig) -> range:
        return _part(config.intermediate_size, self.tp_rank, self.tp_size)

    def experts(self, config: ModelConfig) -> range:
        assert config.experts is not None
        return _part(config.experts.count, self.tp_rank, self.tp_size)

    def expert_counts(self, config: ModelConfig) -> list[int]:
        assert config.experts is not None
        return [len(_part(config.experts.count, rank, self.tp_size)) for rank in range(self.tp_size)]

    def expert_columns(self, config: ModelConfig) -> range:
        assert config.experts is not None
        return _part(config.experts.width, self.tp_rank, self.tp_size)

    def vocabulary(self, config: ModelConfig) -> range:
        return _part(config.vocab_size, self.tp_rank, self.tp_size)

    def vocabulary_sizes(self, config: ModelConfig) -> list[int]:
        return [len(_part(config.vocab_size, rank, self.tp_size)) for rank in range(self.tp_size)]

    def layers(self, config: ModelConfig) -> range:
        return _part(config.num_layers, self.pp_rank, self.pp_size)

    def kv_layers(self, config: ModelConfig) -> Sequence[int]:
        own, of = self.layers(config), config.states
        if config.kv_sources:
            return [layer for layer in own if config.kv_source(layer) == layer]
        return own if of is None else [layer for layer in own if layer not in of.layers]

    def state_layers(self, config: ModelConfig) -> Sequence[int]:
        of = config.states
        return [] if of is None else [layer for layer in self.layers(config) if layer in of.layers]


WHOLE = Shard()


def scaled(part: range, size: int) -> range:
    return range(part.start * size, part.stop * size)


def _part(total: int, rank: int, size: int) -> range:
    return range(total * rank // size, total * (rank + 1) // size)


def check_shards(config: ModelConfig, tp_size: int, pp_size: int) -> None:
    if (ranks := tp_size * pp_size) > 1 and not family_named(config.family).is_native:
        raise ModelError(
            f"{config.architecture} runs through transformers on one rank only, got {ranks}: set tensor_parallel_size "
            "and pipeline_parallel_size to 1"
        )
    if ranks > 1 and config.states is not None:
        raise ModelError(
            f"{config.architecture}, whose layers have states, runs on one rank only, got {ranks}: set "
            "tensor_parallel_size and pipeline_parallel_size to 1"
        )
    if ranks > 1 and not config.has_plain_kv:
        raise ModelError(
            f"{config.architecture}, whose KV is not that of equal heads, runs on one rank only, got {ranks}: "
            "set tensor_parallel_size and pipeline_parallel_size to 1"
        )
    heads, kv_heads, width, of = config.num_heads, config.num_kv_heads, config.intermediate_size, config.experts
    has_mlp = of is None or len(of.layers) < config.num_layers or config.shared_width > 0
    rules: list[tuple[Callable[[int], bool], str]] = [
        (lambda size: 1 <= size <= heads, f"be in [1, {heads}], the number of the model's attention heads"),
        (lambda size: heads % size == 0, f"divide the model's {heads} attention heads"),
        (
            lambda size: kv_heads % size == 0 or size % kv_heads == 0,
            f"divide the model's {kv_heads} key-value heads, or be a multiple of them",
        ),
        (lambda size: not has_mlp or width % size == 0, f"divide the {width} columns of the model's MLP"),
        (lambda size: size <= config.vocab_size, f"be at most {config.vocab_size}, the model's vocabulary"),
    ]
    if of is not None:
        columns, count = of.width, of.count
        rules.append((lambda size: columns % size == 0, f"divide the {columns} columns of the model's experts"))
        rules.append((lambda size: size <= count, f"be at most {count}, the number of the model's experts"))
    fitting = [size for size in range(1, heads + 1) if all(fits(size) for fits, _ in rules)]
    broken = next((rule for fits, rule in rules if not fits(tp_size)), None)
    if broken is not None:
        raise ModelError(f"tensor_parallel_size must {broken}, got {tp_size}; {_nearest(tp_size, fitting)}")
    layers = config.num_layers
    if not 1 <= pp_size <= layers:
        bound = f"be in [1, {layers}], the number of the model's layers"
        nearest = _nearest(pp_size, range(1, layers + 1))
        raise ModelError(f"pipeline_parallel_size must {bound}, got {pp_size}; {nearest}")


def _nearest(size: int, fitting: Sequence[int]) -> str:
    below, above = [count for count in fitting if count < size][-1:], [count for count in fitting if count > size][:1]
    return "the nearest that fits is " + " or ".join(map(str, below + above))


class GroupError(Exception):
    pass


class Group:
    """Communication of a model's ranks, which make the same calls in order. A rank whose call raises has failed.

    This base class has no connections, for a stage of one rank or a planned model.
    """

    def __init__(self, shard: Shard = WHOLE) -> None:
        self.shard, self.waited_s = shard, 0.0

    def count_once(self, total: torch.Tensor) -> None:
        """Clear a total except on one rank, before adding to it, so that `all_reduce` counts it once."""

    def all_reduce(self, x: torch.Tensor) -> None:
        """Replace `x` by its sum over the ranks of the stage. Each element's sum depends on these elements only."""

    def gather(self, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Concatenate the parts [n, sizes[r]] of the stage's ranks r along columns."""
        return part

    def send(self, x: torch.Tensor) -> None:
        """Send `x`, which must not change afterward, to the next stage; may return before it arrives."""
        raise GroupError("there is no next stage")

    def receive(self, x: torch.Tensor) -> None:
        raise GroupError("there is no previous stage")

    def close(self) -> None:
        pass
