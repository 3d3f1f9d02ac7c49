#!/usr/bin/env bash
# Finding: transformers reads a GGUF file's tokenizer without an error and gives other tokens than the model's own tokenizer, if it does not know how the file splits text.
# Version: transformers 5.23.0, gguf 0.19.0, torch 2.13.0
# Guess: A tokenizer.ggml.pre that the converter does not know, such as SmolLM2's, is refused; or it has no effect, because merges were learned on digits that stand alone.
# What happens: Text is split as by GPT-2. Two spaces before a digit become two tokens instead of one. SentencePiece files get a space before the text although add_space_prefix is false.
# Why it matters: A model gets tokens that it was not trained on, and nothing says so. Skipjoin makes tokenizers of GGUF files itself, by the schemes of llama.cpp, and refuses others.
source "$(dirname "$0")/support.bash"
packages transformers==5.23.0 gguf==0.19.0 torch==2.13.0
"$PYTHON" - 2>/dev/null <<'PY' | expect "its own: a ĠĠ 2
of the file: a Ġ Ġ 2
without a prefix: ▁ h i"
import tempfile
from pathlib import Path

import gguf
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer


def converted(model, tokens, types, **more):
    path = Path(tempfile.mkdtemp()) / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in more.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    architecture, described, _ = get_gguf_tokenizer(str(path))
    return convert_gguf_tokenizer(architecture, described)[0]


tokens = ["a", "2", "Ġ", "ĠĠ"]
own = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, [("Ġ", "Ġ")]))
own.pre_tokenizer = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
)
print("its own:", *own.encode("a  2").tokens)
file = converted("gpt2", tokens, [1] * 4, tokenizer_pre="smollm", token_merges=["Ġ Ġ"])
print("of the file:", *file.encode("a  2").tokens)
pieces = ["<unk>", "▁", "h", "i"]
plain = converted("llama", pieces, [2, 1, 1, 1], token_scores=[0.0, -1.0, -2.0, -3.0], add_space_prefix=False)
print("without a prefix:", *plain.encode("hi").tokens)
PY
