#!/usr/bin/env bash
# Finding: llguidance lets numbers pass a bound of 16 or 17 digits, and an exclusive one that they round to.
# Version: llguidance 1.9.1
# Guess: Bounds of decimals are exact, since the grammar compares digits: those of 15 digits are.
# What happens: A number beyond the bound 0.9999999999999999 is accepted. 0.99999999999999999999 is below 1, but each
#   reader of doubles has 1 for it, which the schema excludes.
# Why it matters: A probability below 1 comes out as 1, and only the client's validator sees it. Skipjoin writes such
#   bounds as rules of their texts, and an exclusive one as the nearest decimal of 15 digits.
source "$(dirname "$0")/support.bash"
packages llguidance==1.9.1
byte_tokens
"$PYTHON" - <<'PY' | expect '{"maximum": 0.999999999999999} 0.9999999999999999 False
{"maximum": 0.9999999999999999} 0.99999999999999999 True
{"exclusiveMaximum": 1} 0.99999999999999999999 True'
import json

from byte_tokens import accepts

for bound, text in (
    ({"maximum": 0.999999999999999}, "0.9999999999999999"),
    ({"maximum": 0.9999999999999999}, "0.99999999999999999"),
    ({"exclusiveMaximum": 1}, "0.99999999999999999999"),
):
    print(json.dumps(bound), text, accepts({"type": "number", **bound}, text))
PY
