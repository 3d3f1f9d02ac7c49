"""Serve a Llama or Qwen3-MoE in a Hugging Face folder, or a GGUF file, with llama.cpp, in the environment of its peer.

    PYTHON benchmarks/llamacpp_server.py FOLDER --port PORT [--parallel 16]

The weights of a folder are first converted to GGUF, in their own type, in a temporary folder. The file has a vocabulary
of one word per id, so prompts must be token ids.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path

import gguf
import torch
import xllamacpp
from safetensors.torch import load_file

from gguf_words import add_words

# Maximum tokens of one request.
CONTEXT = 1024
# Names of the tensors of a layer in llama.cpp and in transformers.
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
MLP = {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
EXPERTS = {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate_inp": "mlp.gate",
    **{f"ffn_{part}_exps": f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")},
}


def convert(folder: Path, target: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    weights = {
        name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    experts = config.get("num_local_experts", 0)
    writer = gguf.GGUFWriter(target, "qwen3moe" if experts else "llama")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    add_words(writer, config["vocab_size"])
    add(writer, "token_embd.weight", weights["model.embed_tokens.weight"])
    add(writer, "output_norm.weight", weights["model.norm.weight"])
    add(writer, "output.weight", weights["lm_head.weight"])
    for layer in range(config["num_hidden_layers"]):
        for theirs, ours in (LAYER | (EXPERTS if experts else MLP)).items():
            name = f"model.layers.{layer}.{ours}.weight"
            is_stacked = "{}" in name
            tensor = torch.stack([weights[name.format(n)] for n in range(experts)]) if is_stacked else weights[name]
            if theirs in ("attn_q", "attn_k") and not experts:
                tensor = interleaved(tensor, heads if theirs == "attn_q" else kv_heads)
            add(writer, f"blk.{layer}.{theirs}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor) -> None:
    """Add a tensor: matrices in their own type, others in float32."""
    if tensor.dim() > 1 and tensor.dtype == torch.bfloat16:
        writer.add_tensor(name, tensor.view(torch.uint8).numpy(), raw_dtype=gguf.GGMLQuantizationType.BF16)
    else:
        writer.add_tensor(name, tensor.float().numpy())


def interleaved(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Permute rows for llama.cpp, which rotates adjacent elements of a head where transformers rotates its halves."""
    out, width = tensor.shape
    return tensor.view(heads, 2, out // heads // 2, width).transpose(1, 2).reshape(out, width).contiguous()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--parallel", type=int, default=16)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="skipjoin-bench-") as scratch:
        file: Path = args.model
        if file.is_dir():
            file = Path(scratch) / "model.gguf"
            convert(args.model, file)
        print(xllamacpp.get_system_info(), file=sys.stderr)
        params = xllamacpp.CommonParams()
        params.model.path = str(file)
        params.model_alias = {args.model.name}
        params.port = args.port
        params.n_parallel = args.parallel
        params.n_ctx = args.parallel * CONTEXT
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
        server = xllamacpp.Server(params)
        print(f"serving at {server.listening_address}", file=sys.stderr, flush=True)
        ended = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: ended.set())
        ended.wait()


if __name__ == "__main__":
    main()
