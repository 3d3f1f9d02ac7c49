#!/usr/bin/env bash
# Finding: llama.cpp reads a Phi-3 file's sliding window and attends to all tokens, and rounds the bounds of YaRN's ramp to whole pairs of dimensions, which gpt-oss must not do.
# Version: xllamacpp 2026.10.11549, gguf 0.19.0
# Guess: phi3.attention.sliding_window bounds attention as in the model; YaRN interpolates between exact bounds where config.json of gpt-oss says "truncate": false.
# What happens: Logits of a Phi-3 file with a window of 4 are those without one, to the last bit. Logits of a file with YaRN do not change with the original length while the bounds round to the same pair; no key in GGUF says that they must not be rounded.
# Why it matters: Answers to prompts beyond Phi-3's window, and all of gpt-oss, differ from those of the same weights elsewhere. Skipjoin applies the window and gpt-oss's exact bounds, so its logits of these files are the models' own and not llama.cpp's.
source "$(dirname "$0")/support.bash"
packages xllamacpp==2026.10.11549 gguf==0.19.0
"$PYTHON" - 2>/dev/null <<'PY' | expect "phi3, window 4 and none: equal
yarn, original length 33 and 36: equal
yarn, original length 33 and 128: different"
import json
import tempfile
import urllib.request
from pathlib import Path

import gguf
import numpy as np
import xllamacpp

WIDTH, HEADS, VOCAB = 32, 2, 64


def written(architecture, **settings):
    path = Path(tempfile.mkdtemp()) / "m.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(2)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10000.0)
    for name, value in settings.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"w{index}" for index in range(3, VOCAB))])
    writer.add_token_scores([-float(index) for index in range(VOCAB)])
    writer.add_token_types([2, 3, 3, *[1] * (VOCAB - 3)])
    random = np.random.default_rng(1)

    def add(name, *shape):
        writer.add_tensor(name, random.normal(0, 0.3, shape).astype(np.float32))

    add("token_embd.weight", VOCAB, WIDTH)
    add("output.weight", VOCAB, WIDTH)
    add("output_norm.weight", WIDTH)
    for layer in range(2):
        for norm in ("attn_norm", "ffn_norm"):
            add(f"blk.{layer}.{norm}.weight", WIDTH)
        for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_down"):
            if architecture == "llama" or part in ("attn_output", "ffn_down"):
                add(f"blk.{layer}.{part}.weight", WIDTH, WIDTH)
        if architecture == "phi3":
            add(f"blk.{layer}.attn_qkv.weight", 3 * WIDTH, WIDTH)
        add(f"blk.{layer}.ffn_up.weight", WIDTH * (2 if architecture == "phi3" else 1), WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logprobs(path):
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(path)
    parameters.n_ctx, parameters.n_parallel, parameters.warmup = 256, 1, False
    server = xllamacpp.Server(parameters)
    body = {"prompt": [3 + index * 7 % 61 for index in range(40)], "n_predict": 1, "temperature": 0, "n_probs": VOCAB}
    asked = urllib.request.Request(
        f"{server.listening_address}/completion", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(asked) as answer:
        return {one["id"]: one["logprob"] for one in json.load(answer)["completion_probabilities"][0]["top_logprobs"]}


def compare(name, *files):
    first, second = map(logprobs, files)
    print(f"{name}:", "equal" if first == second else "different", flush=True)


def yarn(length):
    scaling = {"rope_scaling_type": gguf.RopeScalingType.YARN, "rope_scaling_factor": 4.0}
    return written("llama", **scaling, rope_scaling_orig_ctx_len=length)


compare("phi3, window 4 and none", written("phi3", sliding_window=4), written("phi3"))
compare("yarn, original length 33 and 36", yarn(33), yarn(36))
compare("yarn, original length 33 and 128", yarn(33), yarn(128))
PY
