"""A decoder-only language model over packed batches."""

from __future__ import annotations

from typing import Protocol

import torch

from skipjoin.model.attention.base import AttentionBackend
from skipjoin.model.batch import PackedBatch
from skipjoin.model.config import ModelConfig
from skipjoin.model.families.gpt_neox import GPTNeoXDecoder
from skipjoin.model.families.llama import LlamaDecoder
from skipjoin.model.families.opt import OPTDecoder
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.layers import Builder, Step, Weights
from skipjoin.model.ops.base import LayerOps


class Decoder(Protocol):
    """What a family provides between token ids and the output projection."""

    embedding: torch.Tensor

    def hidden(self, step: Step) -> torch.Tensor: ...

    def finish(self, hidden: torch.Tensor) -> torch.Tensor: ...


_FAMILIES = {"llama": LlamaDecoder, "opt": OPTDecoder, "gpt_neox": GPTNeoXDecoder}
_OUTPUT_NAMES = {"gpt_neox": "embed_out.weight"}


class CausalLM:
    """A loaded model: weights on one device, in one type, with the attention back end it runs on."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        ops: LayerOps,
        attention: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """weights: in `dtype` and on `device`. Raises `ModelError` if one is missing or of another shape."""
        self.config = config
        self.dtype = dtype
        self.device = device
        self.ops = ops
        self.attention = attention
        builder = Builder(config, weights, ops)
        self._decoder: Decoder = _FAMILIES[config.family](builder, device)
        if config.tie_embeddings:
            output = self._decoder.embedding
        else:
            name = _OUTPUT_NAMES.get(config.family, "lm_head.weight")
            output = weights.take(name, config.vocab_size, config.embed_dim)
        self._output = builder.finish_linear(output, None)
        self.weight_bytes = builder.weight_bytes
        if config.tie_embeddings and getattr(self._output, "weight", None) is output:
            self.weight_bytes -= output.nbytes  # held once, counted twice

    @torch.inference_mode()
    def forward(self, batch: PackedBatch, kv: PagedKV) -> torch.Tensor:
        """One step: computes the batch's tokens, writes their keys and values into `kv`.

        Returns float32 logits [batch.num_rows, vocab_size], only of the rows that the batch wants. Raises
        `ValueError` for a position, block or block size that this model or cache does not have: compiled code
        would read and write elsewhere. Token ids outside the vocabulary raise `IndexError` on a CPU.
        """
        if batch.max_context > self.config.max_positions:
            raise ValueError(f"context of {batch.max_context} tokens, the model has {self.config.max_positions}")
        if batch.block_size != kv.block_size or batch.max_block >= kv.num_blocks:
            raise ValueError(
                f"the batch has block {batch.max_block} of {batch.block_size} tokens, "
                f"the cache {kv.num_blocks} of {kv.block_size}"
            )
        hidden = self._decoder.hidden(Step(batch, kv, self.attention))
        if batch.num_rows == 0:  # a chunk of a prompt, not its end
            return hidden.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        if batch.logit_rows is not None:
            hidden = hidden[batch.logit_rows]
        return self._output(self._decoder.finish(hidden)).float()
