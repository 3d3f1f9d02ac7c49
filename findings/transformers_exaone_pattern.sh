#!/usr/bin/env bash
# Finding: EXAONE 4's and K-EXAONE's configurations document the pattern of their windows as a text, and raise on it.
# Version: transformers 5.23.0
# Guess: `sliding_window_pattern="LLLG"` means the same as 4, as the class documents and its type allows.
# What happens: the number makes three layers with a window and one without, in turn. The text raises a TypeError, since
#   the number of each layer is divided by it, unless `layer_types` is given too.
# Why it matters: a config.json in the documented form, without `layer_types`, loads in no program that uses these
#   classes. Skipjoin reads both forms itself (`model/families/olmo.py`).
source "$(dirname "$0")/support.bash"
packages transformers==5.23.0
"$PYTHON" - 2>/dev/null <<'PY' | expect "Exaone4Config 4: LLLGLLLG
Exaone4Config 'LLLG': TypeError
ExaoneMoeConfig 4: LLLGLLLG
ExaoneMoeConfig 'LLLG': TypeError"
import transformers

for name in ("Exaone4Config", "ExaoneMoeConfig"):
    kind = getattr(transformers, name)
    for pattern in (4, "LLLG"):
        try:
            layers = kind(num_hidden_layers=8, sliding_window_pattern=pattern).layer_types
            found = "".join("L" if layer == "sliding_attention" else "G" for layer in layers)
        except TypeError as error:
            found = type(error).__name__
        print(f"{name} {pattern!r}: {found}")
PY
