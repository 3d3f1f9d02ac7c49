#!/usr/bin/env bash
# Finding: safetensors writes the same tensors and metadata as different bytes each time, if the metadata have two
#   entries or more.
# Version: safetensors 0.8.0, numpy 2.4.6
# Guess: the format has one order of its tensors, so equal content gives equal files, whose hashes can be compared.
# What happens: the order of the metadata is random. Twenty saves of three entries give more than one file of the same
#   size; with one entry there is one.
# Why it matters: caches, mirrors and signatures by the hash of a file take equal weights for different ones, and
#   store them twice. Skipjoin's converter writes one entry, and its copies are equal to the last bit.
source "$(dirname "$0")/support.bash"
packages safetensors==0.8.0 numpy==2.4.6
"$PYTHON" - <<'PY' | expect "1 entry: 1 file
3 entries: several files
in any order: 1 content"
import json

import numpy
from safetensors.numpy import save

tensors = {"a": numpy.zeros(4, numpy.float32)}
one = {save(tensors, {"format": "pt"}) for _ in range(20)}
three = {save(tensors, {"format": "pt", "step": "1", "loss": "2"}) for _ in range(20)}
print("1 entry:", len(one), "file")
print("3 entries:", "1 file" if len(three) == 1 else "several files")
headers = {json.dumps(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]), sort_keys=True) for data in three}
print("in any order:", len(headers), "content")
PY
