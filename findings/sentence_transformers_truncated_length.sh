#!/usr/bin/env bash
# Finding: vectors that sentence-transformers truncates to fewer dimensions are shorter than 1, although the model
#   ends with a normalization.
# Version: sentence-transformers 6.2.0, transformers 5.23.0, torch 2.13.0
# Guess: a model with Normalize among its modules returns unit vectors for any truncate_dim, as OpenAI's `dimensions`
#   does.
# What happens: truncation comes after all modules. The length of a vector of 8 of 16 dimensions differs from 1 and
#   between texts; only normalize_embeddings=True normalizes again.
# Why it matters: a store that compares by inner product ranks other documents first than one with the vectors of a
#   server that normalizes what is left, such as Skipjoin. For comparisons, both must be normalized.
source "$(dirname "$0")/support.bash"
packages sentence-transformers==6.2.0 transformers==5.23.0 torch==2.13.0
cd "$work"
"$PYTHON" - 2>/dev/null <<'PY' | expect "16 dimensions: length 1
8 dimensions: length below 1, not the same for two texts
8 dimensions, normalize_embeddings: length 1"
import numpy
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

torch.manual_seed(0)
words = {word: number for number, word in enumerate(("[PAD]", "[UNK]", "a", "b", "c"))}
backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
backend.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]").save_pretrained("bert")
shape = {"vocab_size": 8, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
BertModel(BertConfig(**shape, initializer_range=0.5)).save_pretrained("bert")
model = SentenceTransformer(modules=[Transformer("bert"), Pooling(16), Normalize()])
asked = {
    "16 dimensions": {},
    "8 dimensions": {"truncate_dim": 8},
    "8 dimensions, normalize_embeddings": {"truncate_dim": 8, "normalize_embeddings": True},
}
for name, options in asked.items():
    lengths = numpy.linalg.norm(model.encode(["a b", "c"], **options), axis=1)
    if numpy.allclose(lengths, 1, atol=1e-3):
        print(f"{name}: length 1")
    elif (lengths < 1).all():
        same = "the same" if numpy.allclose(*lengths, atol=1e-3) else "not the same"
        print(f"{name}: length below 1, {same} for two texts")
PY
