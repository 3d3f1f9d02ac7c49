#!/usr/bin/env bash
# Finding: llguidance finds no multiple of 0.1 from 0.3 to 0.3.
# Version: llguidance 1.9.1
# Guess: Multiples of decimal numbers are exact, because the grammar computes with their digits.
# What happens: The bounds are compared in doubles, where three times 0.1 is more than 0.3, so the schema counts as unsatisfiable.
# Why it matters: Prices and percentages with bounds are refused. Skipjoin writes multiples with bounds as rules of their texts.
source "$(dirname "$0")/support.bash"
packages llguidance==1.9.1
byte_tokens
"$PYTHON" - <<'PY' | expect 'Unsatisfiable schema: range [0.30000000000000004, 0.2] does not contain a multiple of 0.1'
from byte_tokens import matcher

print(matcher({"type": "number", "minimum": 0.3, "maximum": 0.3, "multipleOf": 0.1}).get_error())
PY
