#!/usr/bin/env bash
# Finding: transformers 5 refuses rotary scaling of type "su", as the first files of Phi-3's long models have it.
# Version: transformers 5.23.0
# Guess: Phi3Config renames "su" to "longrope", so both mean the same, as in transformers 4.
# What happens: it renames the type after it has moved original_max_position_embeddings into the rotary settings of
#   "longrope" only, and then misses that value. With "longrope" in the file, the same settings are read.
# Why it matters: the folder of such a model loads elsewhere and not here. Skipjoin reads "su" as "longrope".
source "$(dirname "$0")/support.bash"
packages transformers==5.23.0
"$PYTHON" - 2>/dev/null <<'PY' | expect "longrope: 4096
su: KeyError 'original_max_position_embeddings'"
from transformers import Phi3Config

shape = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 131072}
for kind in ("longrope", "su"):
    scaling = {"type": kind, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    settings = {**shape, "rope_scaling": scaling, "original_max_position_embeddings": 4096}
    try:
        print(f"{kind}:", Phi3Config.from_dict(settings).rope_parameters["original_max_position_embeddings"])
    except KeyError as error:
        missed = str(error).rpartition("{")[2].partition("}")[0]
        print(f"{kind}: {type(error).__name__} {missed}")
PY
