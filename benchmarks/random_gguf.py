"""Write a GGUF file with random weights of one of the shapes of random_model.py.

    python benchmarks/random_gguf.py FILE.gguf [--shape qwen3-0.6b] [--kind Q4_K_M]

llama.cpp's mixture Q4_K_M has blocks of Q4_K, and of Q6_K for the embedding, which is the output, too, and for values
and down projections of the first and last eighth of the layers and of every third layer between. In Q8_0 all blocks are
of that type. Vectors are float32. Blocks are random bytes with scales for which weights are about as large as those of
random_model.py. The vocabulary has one word per id, so prompts must be token ids.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np

from gguf_words import add_words
from random_model import SHAPES

Kind = gguf.GGMLQuantizationType
# About the largest weight, as transformers draws weights.
LARGEST = 0.06
# Where a block has its scales, as halves, and their values: of quants from 0 to 15 with a factor of at most 63, of what
# is subtracted with such a factor, of quants from -32 to 31 with a factor from -128 to 127, and of quants of 8 bits.
SCALES = {
    Kind.Q4_K: {0: 2 * LARGEST / (15 * 63), 2: LARGEST / 63},
    Kind.Q6_K: {208: LARGEST / (32 * 128)},
    Kind.Q8_0: {0: LARGEST / 128},
}
# Types of most matrices, and of those that get more bits.
KINDS = {"Q4_K_M": (Kind.Q4_K, Kind.Q6_K), "Q8_0": (Kind.Q8_0, Kind.Q8_0)}
FILE_TYPES = {"Q4_K_M": gguf.LlamaFileType.MOSTLY_Q4_K_M, "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}
ARCHITECTURES = ("qwen3",)


def blocks(rows: int, columns: int, kind: Kind, random: np.random.Generator) -> np.ndarray:
    """Return a random matrix (rows, bytes of a row) in blocks of this kind."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    found = random.integers(0, 256, (rows * columns // elements, size), dtype=np.uint8)
    for place, scale in SCALES[kind].items():
        halves = (random.uniform(0.5, 1, len(found)) * scale).astype(np.float16)
        found[:, place : place + 2] = halves.view(np.uint8).reshape(-1, 2)
    return found.reshape(rows, -1)


def has_more_bits(layer: int, layers: int) -> bool:
    eighth = layers // 8
    return layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2


def write(file: Path, shape: str, seed: int = 0, *, kind: str = "Q4_K_M") -> None:
    """Write the model, in one of `KINDS`.

    Raises:
        ValueError: The shape is of an architecture, or has separate output weights, that this does not write.
    """
    config = SHAPES[shape]
    if config["model_type"] not in ARCHITECTURES or not config.get("tie_word_embeddings"):
        raise ValueError(f"shape {shape!r} is not written as GGUF; these are: {', '.join(shapes())}")
    random = np.random.default_rng(seed)
    most, better = KINDS[kind]
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads, kv_heads, width = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    writer = gguf.GGUFWriter(file, config["model_type"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(FILE_TYPES[kind])  # without which OpenVINO reads no file
    add_words(writer, config["vocab_size"])

    def add(name: str, rows: int, columns: int, kind: Kind) -> None:
        writer.add_tensor(f"{name}.weight", blocks(rows, columns, kind, random), raw_dtype=kind)

    def add_ones(name: str, count: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(count, np.float32))

    add("token_embd", config["vocab_size"], hidden, better)
    add_ones("output_norm", hidden)
    for layer in range(layers):
        at = f"blk.{layer}"
        more = better if has_more_bits(layer, layers) else most
        add(f"{at}.attn_q", heads * width, hidden, most)
        add(f"{at}.attn_k", kv_heads * width, hidden, most)
        add(f"{at}.attn_v", kv_heads * width, hidden, more)
        add(f"{at}.attn_output", hidden, heads * width, most)
        add(f"{at}.ffn_gate", inner, hidden, most)
        add(f"{at}.ffn_up", inner, hidden, most)
        add(f"{at}.ffn_down", hidden, inner, more)
        for name, count in (
            ("attn_norm", hidden),
            ("ffn_norm", hidden),
            ("attn_q_norm", width),
            ("attn_k_norm", width),
        ):
            add_ones(f"{at}.{name}", count)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def shapes() -> list[str]:
    return [
        name
        for name, config in SHAPES.items()
        if config["model_type"] in ARCHITECTURES and config.get("tie_word_embeddings")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--shape", choices=shapes(), default="qwen3-0.6b")
    parser.add_argument("--kind", choices=list(KINDS), default="Q4_K_M")
    args = parser.parse_args()
    write(args.file, args.shape, kind=args.kind)


if __name__ == "__main__":
    main()
