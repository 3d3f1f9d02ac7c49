#!/usr/bin/env bash
# Finding: OpenVINO GenAI reads no GGUF file without general.file_type, which the format calls optional, and none whose
#   vocabulary is SentencePiece's.
# Version: openvino-genai 2026.4.1.0, gguf 0.19.0, on a CPU
# Guess: the types of tensors stand with the tensors, so the key is a label, as for llama.cpp, which reads such files; and a
#   vocabulary of the kind "llama" is read, since most files of Llama 2 and Mistral have one.
# What happens: the same file loads with the key; without it, loading raises IndexError "unordered_map::at", which names
#   neither the key nor the file. With tokenizer.ggml.model "llama" it raises a RuntimeError about 'model == "gpt2"'.
# Why it matters: files that tools other than llama.cpp's converter write load in llama.cpp and in Skipjoin, and fail here
#   with a message that does not lead to the cause. Our benchmarks write both (benchmarks/random_gguf.py).
source "$(dirname "$0")/support.bash"
packages openvino-genai==2026.4.1.0 openvino==2026.4.1 openvino-tokenizers==2026.4.1.0 gguf==0.19.0 numpy==2.3.5
"$PYTHON" - 2>/dev/null <<'PY' | expect 'complete: loads
without general.file_type: IndexError: unordered_map::at
vocabulary of the kind llama: RuntimeError: Check '\''model == "gpt2"'\'' failed'
import tempfile
from pathlib import Path

import gguf
import numpy as np
import openvino_genai

WIDTH, WORDS = 64, 512


def write(path, *, has_type=True, kind="gpt2"):
    draw = np.random.default_rng(0)
    file = gguf.GGUFWriter(path, "llama")
    file.add_context_length(128)
    file.add_embedding_length(WIDTH)
    file.add_block_count(1)
    file.add_feed_forward_length(WIDTH)
    file.add_head_count(2)
    file.add_head_count_kv(2)
    file.add_rope_dimension_count(WIDTH // 2)
    file.add_layer_norm_rms_eps(1e-6)
    file.add_rope_freq_base(10_000.0)
    file.add_vocab_size(WORDS)
    if has_type:
        file.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    file.add_tokenizer_model(kind)
    file.add_tokenizer_pre("qwen2")
    file.add_token_list(["<unk>", "<s>", "</s>", "w", "3", "w3", *(f"w{n}" for n in range(6, WORDS))])
    file.add_token_scores([-float(n) for n in range(WORDS)])
    file.add_token_types([2, 3, 3, *[1] * (WORDS - 3)])
    file.add_token_merges(["w 3"])
    file.add_bos_token_id(1)
    file.add_eos_token_id(2)
    names = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
    for name, rows in [("token_embd", WORDS), ("output", WORDS), *((f"blk.0.{name}", WIDTH) for name in names)]:
        file.add_tensor(f"{name}.weight", draw.normal(size=(rows, WIDTH)).astype(np.float16))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        file.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


CASES = {
    "complete": {},
    "without general.file_type": {"has_type": False},
    "vocabulary of the kind llama": {"kind": "llama"},
}
with tempfile.TemporaryDirectory() as folder:
    for name, change in CASES.items():
        path = Path(folder) / "model.gguf"
        write(path, **change)
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 1
        try:
            openvino_genai.ContinuousBatchingPipeline(str(path), scheduler, "CPU", {})
            print(f"{name}: loads")
        except (IndexError, RuntimeError) as error:
            print(f"{name}: {type(error).__name__}: {str(error).partition(' at ')[0]}")
PY
