#!/usr/bin/env bash
# Finding: adding rope_scaling for YaRN to a config.json that transformers 5 saved resets rope_theta to 10,000.
# Version: transformers 5.23.0
# Guess: as the cards of Qwen2.5 and Qwen3 say, rope_scaling is all that one adds, and the other rotary settings stay.
# What happens: the newer form keeps rope_theta within rope_parameters, which rope_scaling replaces as a whole. The
#   default of 10,000 takes the place of 1,000,000, without a warning about it.
# Why it matters: every position is rotated otherwise than in training, and nothing fails. Skipjoin reads the scaling
#   from rope_scaling and keeps the other settings of rope_parameters.
source "$(dirname "$0")/support.bash"
packages transformers==5.23.0
"$PYTHON" - "$work" 2>/dev/null <<'PY' | expect "as saved: default 1000000.0
with rope_scaling: yarn 10000.0"
import json
import pathlib
import sys

from transformers import AutoConfig, Qwen3Config


def show(what):
    rope = AutoConfig.from_pretrained(folder).rope_parameters
    print(f"{what}:", rope["rope_type"], rope["rope_theta"])


folder = pathlib.Path(sys.argv[1], "model")
Qwen3Config(rope_parameters={"rope_type": "default", "rope_theta": 1e6}, max_position_embeddings=40960).save_pretrained(folder)
show("as saved")
file = folder / "config.json"
scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_scaling": scaling}))
show("with rope_scaling")
PY
