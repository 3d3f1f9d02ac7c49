#!/usr/bin/env bash
# Finding: llguidance leaves out a backslash at the end of a pattern, which is no regular expression.
# Version: llguidance 1.9.1
# Guess: The pattern ^a\ is an error, as an open group or class is.
# What happens: It is compiled as ^a, so that texts without a backslash are accepted.
# Why it matters: A pattern that lost a character, often by wrong quoting, constrains to something else. Skipjoin
#   refuses it.
source "$(dirname "$0")/support.bash"
packages llguidance==1.9.1
byte_tokens
"$PYTHON" - <<'PY' | expect 'a True
ab True
b False'
import json

from byte_tokens import accepts

for text in ("a", "ab", "b"):
    print(text, accepts({"type": "string", "pattern": "^a\\"}, json.dumps(text)))
PY
