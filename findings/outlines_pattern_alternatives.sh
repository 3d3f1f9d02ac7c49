#!/usr/bin/env bash
# Finding: outlines-core writes a string whose pattern has alternatives with one quote only.
# Version: outlines-core 0.2.14
# Guess: the pattern ^yes|no$ allows "yes" and "no", each within quotes.
# What happens: the pattern is put between quotes without parentheses, so the quotes become parts of the alternatives:
#   what it allows is "yes without the second quote, and no" without the first. With parentheses in the pattern it is
#   right.
# Why it matters: no output is JSON, and nothing says so. vLLM offers this library for schemas. Skipjoin uses
#   llguidance, which allows both strings.
source "$(dirname "$0")/support.bash"
packages outlines-core==0.2.14
"$PYTHON" - <<'PY' | expect '^yes|no$ allows "yes no"
^(yes|no)$ allows "yes" "no"'
import json
import re

from outlines_core.json_schema import build_regex_from_schema

for pattern in ("^yes|no$", "^(yes|no)$"):
    regex = build_regex_from_schema(json.dumps({"type": "string", "pattern": pattern}))
    texts = ('"yes', 'no"', '"yes"', '"no"')
    print(pattern, "allows", *(text for text in texts if re.fullmatch(regex, text)))
PY
