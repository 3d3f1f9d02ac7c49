#!/usr/bin/env bash
# Finding: llguidance enforces another integer than the constant of a schema from 2^53 on.
# Version: llguidance 1.9.1
# Guess: A constant is a text in the grammar, so any integer comes out as it is, or the schema is refused.
# What happens: Numbers become doubles. The only text of the constant 1234567890123456789 is 1234567890123456768.
# Why it matters: Ids of 64 bits in an enum come out as other ids, without an error. Skipjoin writes such numbers as
# rules of their texts.
source "$(dirname "$0")/support.bash"
packages llguidance==1.9.1
byte_tokens
"$PYTHON" - <<'PY' | expect '1234567890123456789 False
1234567890123456768 True'
from byte_tokens import accepts

for text in ("1234567890123456789", "1234567890123456768"):
    print(text, accepts({"const": 1234567890123456789}, text))
PY
