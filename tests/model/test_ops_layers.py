"""All layers in one call of compiled code have the bits of their operations one by one."""

from __future__ import annotations

import pytest
import torch
from test_ops_invariance import TARGETS, compiled

from skipjoin.model.attention.base import LayerInputs
from skipjoin.model.attention.cpp_backend import CppAttention
from skipjoin.model.attention.torch_backend import TorchAttention
from skipjoin.model.batch import PackedBatch, Segment
from skipjoin.model.causal_lm import CausalLM
from skipjoin.model.config import ModelConfig
from skipjoin.model.kv_cache import PagedKV
from skipjoin.model.layers import advance
from skipjoin.model.ops.calls import CPP_DTYPES
from skipjoin.model.ops.cpp_ops import CppOps, has_dtype
from skipjoin.model.parallel import Group
from skipjoin.model.weights import RandomWeights
from support.worlds import checkered

SHAPE = {
    "vocab_size": 90, "hidden_size": 72, "intermediate_size": 100, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 20, "max_position_embeddings": 256,
}  # fmt: skip
# Qwen3 has norms of queries and keys, Qwen2 biases and a window in its last layer, Gemma 3 norms after parts.
ARCHITECTURES = {
    "Qwen3ForCausalLM": {"model_type": "qwen3"},
    "Qwen2ForCausalLM": {
        "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2,
    },
    "Gemma3ForCausalLM": {
        "model_type": "gemma3_text", "sliding_window": 9, "sliding_window_pattern": 2, "attn_logit_softcapping": 2.0,
    },
    "Qwen3MoeForCausalLM": {"num_experts": 300, "num_experts_per_tok": 3, "moe_intermediate_size": 30},
}  # fmt: skip
BATCHES = {
    "decodes": [Segment([i], 20 + i, list(range(5 * i, 5 * i + 5))) for i in range(19)],
    "a prompt, a shared block and a decode": [
        Segment([2] * 40, 0, list(range(8))),
        Segment([3], 9, [8, 9], reverse=True),
        Segment([4], 30, list(range(10, 14))),
    ],
}


def model_of(architecture: str, dtype: torch.dtype, library, attention=CppAttention) -> CausalLM:
    config = ModelConfig.from_dict(SHAPE | ARCHITECTURES[architecture] | {"architectures": [architecture]})
    ops, cpu = CppOps(library, dtype), torch.device("cpu")
    backend = attention(library) if attention is CppAttention else attention()
    weights = RandomWeights(0, dtype, cpu)
    return CausalLM(config, weights, ops=ops, attention=backend, dtype=dtype, device=cpu, group=Group())


@pytest.mark.parametrize(("path", "dtype"), checkered([*TARGETS], CPP_DTYPES), ids=str)
@torch.inference_mode()
def test_layers_in_one_call_have_the_bits_of_single_calls(path, dtype):
    library = compiled(path)
    if not has_dtype(library, dtype):
        pytest.skip("this processor does not convert the type")
    for architecture in ARCHITECTURES:
        model = model_of(architecture, dtype, library)
        decoder = model._decoder
        for name, segments in BATCHES.items():
            batch, results = PackedBatch.build(segments, 8), []
            for run in (decoder.advance, lambda x, step: decoder._norm(advance(decoder._layers, x, step))):  # noqa: B023
                kv = PagedKV(100, 8, model.config, dtype, "cpu")
                kv.tensor.copy_(torch.randn(kv.tensor.shape, generator=torch.Generator().manual_seed(1)))
                results.append((run(decoder.embed(batch), LayerInputs(batch, kv, model.attention)), kv.tensor))
            (ours, our_kv), (expected, expected_kv) = results
            assert ours.isfinite().all()
            assert torch.equal(ours, expected), (architecture, name)
            assert torch.equal(our_kv, expected_kv), (architecture, name)
        assert decoder._fused is not None


def test_layers_with_parts_of_torch_run_one_by_one():
    model = model_of("Qwen3ForCausalLM", torch.float32, compiled("generic"), attention=TorchAttention)
    assert model._decoder._fused is None
