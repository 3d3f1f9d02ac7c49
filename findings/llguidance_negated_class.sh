#!/usr/bin/env bash
# Finding: In llguidance, a pattern that excludes the quote allows it in JSON strings.
# Version: llguidance 1.9.1
# Guess: The pattern ^[^"]$ allows one character that is not a quote, however the string is escaped.
# What happens: The escaped quote is accepted. Other excluded characters, such as a line break, are not.
# Why it matters: Such outputs do not validate against their schema. Skipjoin does not change patterns.
source "$(dirname "$0")/support.bash"
packages llguidance==1.9.1
byte_tokens
"$PYTHON" - <<'PY' | expect 'quote True
line break False
letter True'
import json

from byte_tokens import accepts

for name, char in (("quote", '"'), ("line break", "\n"), ("letter", "x")):
    print(name, accepts({"type": "string", "pattern": '^[^"\n]$'}, json.dumps(char)))
PY
