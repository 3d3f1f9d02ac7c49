#!/usr/bin/env bash
# Finding: asking a configuration of Gemma 4 for `head_dim` raises an error that no default of getattr() prevents.
# Version: transformers 5.23.0
# Guess: `getattr(config, "head_dim", default)`, by which programs tell models with a head width of their own, returns
#   the width, or the default.
# What happens: layers with and without a window have heads of two widths, and the attribute raises an error that is no
#   AttributeError, so getattr() with a default and hasattr() raise as well. `to_dict()` and a configuration of one layer
#   have it.
# Why it matters: code that is written for any model ends with Gemma 4 where it reads the width of heads. Skipjoin reads
#   config.json, and the widths of each layer (`model/families/gemma4.py`).
source "$(dirname "$0")/support.bash"
packages transformers==5.23.0
"$PYTHON" - 2>/dev/null <<'PY' | expect "getattr with a default: AmbiguousGlobalPerLayerAttributeError
hasattr: AmbiguousGlobalPerLayerAttributeError
to_dict: 256
first and last layer: 256, 512
Gemma3TextConfig: 256"
from transformers import Gemma3TextConfig, Gemma4TextConfig

config = Gemma4TextConfig(num_hidden_layers=6)
for name, ask in (
    ("getattr with a default", lambda: getattr(config, "head_dim", None)),
    ("hasattr", lambda: hasattr(config, "head_dim")),
    ("to_dict", lambda: config.to_dict()["head_dim"]),
    ("first and last layer", lambda: f"{config.per_layer_config[0].head_dim}, {config.per_layer_config[5].head_dim}"),
    ("Gemma3TextConfig", lambda: Gemma3TextConfig().head_dim),
):
    try:
        print(f"{name}: {ask()}")
    except Exception as error:
        print(f"{name}: {type(error).__name__}")
PY
