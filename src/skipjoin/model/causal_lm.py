from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open

from skipjoin.kv_format import CacheFormat
from skipjoin.model.adapters import Adapters
from skipjoin.model.attention.base import AttentionBackend, LayerInputs
from skipjoin.model.batch import PackedBatch
from skipjoin.model.builder import Builder
from skipjoin.model.config import DenseSettings, ModelConfig, PoolingSettings
from skipjoin.model.errors import ModelError
from skipjoin.model.family import family_named
from skipjoin.model.kv_cache import AUTO, PagedKV
from skipjoin.model.modules import Embedding
from skipjoin.model.ops.base import LayerOps, Linear
from skipjoin.model.parallel import Group, check_shards
from skipjoin.model.weights import Weights
from skipjoin.pooling import Task


class Decoder(Protocol):
    EMBEDDING: str
    OUTPUT: str
    embedding: Embedding | None

    def __init__(self, builder: Builder, device: torch.device | str) -> None: ...

    def embed(self, batch: PackedBatch) -> torch.Tensor: ...

    def advance(self, x: torch.Tensor, step: LayerInputs) -> torch.Tensor: ...

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [rows, hidden] to the input of the output projection."""
        ...


@runtime_checkable
class HasOutput(Protocol):
    """A decoder with an output projection of its own."""

    output: Linear


class HeadLayers(NamedTuple):
    """Names of the layers between a hidden state and its score; `norm` follows the activation."""

    dense: str | None
    out: str
    activation: Callable[[torch.Tensor], torch.Tensor] = torch.tanh
    norm: str | None = None


_OF_ROBERTA = HeadLayers("classifier.dense", "classifier.out_proj")
HEADS = {
    "bert": HeadLayers("bert.pooler.dense", "classifier"),
    "roberta": _OF_ROBERTA,
    "mpnet": _OF_ROBERTA,
    "jina-v3": _OF_ROBERTA,
    "deberta": HeadLayers("pooler.dense", "classifier", F.gelu),
    "electra": _OF_ROBERTA._replace(activation=F.gelu),
    "distilbert": HeadLayers("pre_classifier", "classifier", F.relu),
    "modernbert": HeadLayers("head.dense", "classifier", F.gelu, "head.norm"),
    "nomic-bert": HeadLayers("nomic_bert.pooler.dense", "classifier"),
    "gte": HeadLayers("gte.pooler.dense", "classifier"),
    "decoder": HeadLayers(None, "score"),
}


class Head:
    def __init__(
        self,
        dense: Callable[[torch.Tensor], torch.Tensor] | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._dense, self._weight, self._bias, self._dtype = dense, weight.double(), bias, dtype

    def __call__(self, row: torch.Tensor) -> torch.Tensor:
        if self._dense is not None:
            row = self._dense(row.to(self._dtype))
        # In float64, because the order of torch's additions may depend on the rows' number.
        found = (row.double() * self._weight).sum(-1)
        return found if self._bias is None else found + self._bias.double()


def make_head(builder: Builder, settings: PoolingSettings, output: str) -> Head:
    hidden, vocab = builder.config.hidden_size, builder.config.vocab_size
    if settings.answers:
        yes, no = (builder.tensor(output, vocab, hidden, rows=range(answer, answer + 1)) for answer in settings.answers)
        # The softmax of two logits is the sigmoid of their difference.
        return Head(None, yes.double() - no.double(), None)
    names = HEADS[settings.head or ""]
    weight = builder.tensor(f"{names.out}.weight", 1, hidden)
    if names.dense is None:
        return Head(None, weight, None)
    product = builder.linear(names.dense, (hidden,), hidden, settings.head_bias, takes_adapters=False)
    norm = None if names.norm is None else builder.layer_norm(names.norm, bias=builder.config.norm_bias)

    def dense(row: torch.Tensor) -> torch.Tensor:
        found = names.activation(product(row))
        return found if norm is None else norm(found)

    return Head(dense, weight, builder.tensor(f"{names.out}.bias", 1), builder.dtype)


class Dense:
    def __init__(self, of: DenseSettings, device: torch.device) -> None:
        try:
            with safe_open(of.file, framework="pt") as file:
                names = ["linear.weight", *(["linear.bias"] if of.has_bias else [])]
                tensors = [file.get_tensor(name).float().to(device) for name in names]
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{of.file} cannot be read: {error}") from error
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if shapes != [(of.outputs, of.inputs), (of.outputs,)][: len(shapes)]:
            raise ModelError(f"{of.file} has a matrix of {shapes[0]}, and its config.json {of.outputs, of.inputs}")
        self._tensors, self._activation = tensors, getattr(torch.nn, of.activation)()

    def __call__(self, row: torch.Tensor) -> torch.Tensor:
        # One row at a time, so that its bits do not depend on the batch.
        found: torch.Tensor = self._activation(F.linear(row.float(), *self._tensors))
        return found


class CausalLM:
    """Decoder or encoder with its output; `head` makes scores, and `dense` are layers of pooled vectors."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        ops: LayerOps,
        attention: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
        group: Group,
        kv_format: CacheFormat = AUTO,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.kv_format = kv_format
        self.device = device
        self.ops = ops
        self.attention = attention
        self.group = group
        self.shard = group.shard
        check_shards(config, self.shard.tp_size, self.shard.pp_size)
        family = family_named(config.family)
        self.adapters = Adapters(
            ops,
            prefix=family.prefix,
            layers=self.shard.layers(config),
            num_layers=config.num_layers,
            dtype=dtype,
            device=device,
        )
        builder = Builder(config, weights, ops, attention, group, dtype=dtype, adapters=self.adapters)
        self._decoder: Decoder = family.decoder(builder, device)
        self._vocabulary = self.shard.vocabulary_sizes(config)
        self._output: Linear | None = None
        self.head: Head | None = None
        self.dense = [Dense(of, device) for of in config.pooling.dense] if config.pooling is not None else []
        if self.shard.is_last and config.pooling is None:
            self._output = self._make_output(builder)
        elif self.shard.is_last and config.pooling is not None and config.pooling.task is Task.SCORE:
            decoder = self._decoder
            output = decoder.EMBEDDING if config.tie_embeddings else decoder.OUTPUT
            self.head = make_head(builder, config.pooling, output)
        self.weight_bytes, self.expert_bytes = builder.weight_bytes, builder.expert_bytes
        self.parameters = builder.parameters
        self.weight_label = weights.label

    def _make_output(self, builder: Builder) -> Linear:
        config, decoder = self.config, self._decoder
        if isinstance(decoder, HasOutput):
            return decoder.output
        if config.tie_embeddings and decoder.embedding is not None:
            table = decoder.embedding.table
            if not isinstance(table, torch.Tensor):
                return table
            output = builder.finish_linear(table, None)
            if getattr(output, "weight", None) is table:
                builder.weight_bytes -= table.nbytes  # stored once, counted twice
                builder.parameters -= table.numel()
            return output
        own = self.shard.vocabulary(config)
        name = (decoder.EMBEDDING if config.tie_embeddings else decoder.OUTPUT).removesuffix(".weight")
        return builder.linear(name, (config.vocab_size,), config.embed_dim, False, rows=(own,), takes_adapters=False)

    def check(self, batch: PackedBatch, kv: PagedKV) -> None:
        """Raise ValueError for positions or blocks outside the model or cache: compiled code does not check."""
        if batch.max_context > self.config.max_positions:
            raise ValueError(f"context of {batch.max_context} tokens, the model has {self.config.max_positions}")
        if batch.block_size != kv.block_size or batch.max_block >= kv.num_blocks:
            raise ValueError(
                f"the batch has block {batch.max_block} of {batch.block_size} tokens, "
                f"the cache {kv.num_blocks} of {kv.block_size}"
            )

    @torch.inference_mode()
    def forward(self, batch: PackedBatch, kv: PagedKV, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return float32 logits of the wanted rows, none before the last stage, and write the tokens' KV into `kv`.

        All ranks run the same batches in the same order.

        Raises:
            IndexError: If a token id is outside the vocabulary, on a CPU.
            GroupError: If another rank is lost.
        """
        rows = self.wanted_rows(batch, kv)
        if not len(rows):  # a chunk that does not end its prompt, or a stage that is not the last
            return rows.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        logits = self.logits(rows)
        return logits.float() if out is None else out.copy_(logits)

    @torch.inference_mode()
    def wanted_rows(self, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        self.check(batch, kv)
        received = None if self.shard.is_first else self.receive(self.hidden_buffer(batch.num_tokens))
        found = self.compute(received, batch, kv)
        if self.shard.is_last:
            return found
        self.group.send(found)
        return found[:0]

    def hidden_buffer(self, tokens: int) -> torch.Tensor:
        return torch.empty((tokens, self.config.hidden_size), dtype=self.dtype, device=self.device)

    def receive(self, hidden: torch.Tensor) -> torch.Tensor:
        self.group.receive(hidden)
        return hidden

    @torch.inference_mode()
    def compute(self, received: torch.Tensor | None, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        self.adapters.select(batch)
        entered = self._decoder.embed(batch) if received is None else received
        hidden = self._decoder.advance(entered, LayerInputs(batch, kv, self.attention))
        if not self.shard.is_last:
            return hidden
        if batch.num_rows == 0:
            return hidden[:0]
        return self._decoder.finish(hidden if batch.logit_rows is None else hidden[batch.logit_rows])

    @property
    def logits_dtype(self) -> torch.dtype:
        adjusts = self.config.logit_scale != 1 or self.config.logit_cap
        return torch.float32 if adjusts else self.dtype

    @torch.inference_mode()
    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits of rows, or `rows` without an output layer; all ranks of the stage must call it."""
        if self._output is None:
            return rows
        logits, config = self.group.gather(self._output(rows), self._vocabulary), self.config
        if config.logit_scale != 1 or config.logit_cap:
            logits = logits.float().mul_(config.logit_scale)
        if config.logit_cap:
            logits.div_(config.logit_cap).tanh_().mul_(config.logit_cap)
        return logits
