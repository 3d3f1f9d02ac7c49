#!/usr/bin/env bash
# Finding: llguidance takes an escaped spelling of a named property for an additional property.
# Version: llguidance 1.9.1
# Guess: A property of the schema appears at most once, and its value follows its schema.
# What happens: The name `a`, written with a Unicode escape, counts as another name, whose value may be anything. A parser
# keeps the last value, which has another type than the schema says.
# Why it matters: An output that the grammar accepts does not validate. Skipjoin turns additional properties into those of
# a pattern, whose texts have one spelling.
source "$(dirname "$0")/support.bash"
packages llguidance==1.9.1
byte_tokens
"$PYTHON" - <<'PY' | expect '{"a":1,"a":"x"} False
{"a":1,"\u0061":"x"} True'
from byte_tokens import accepts

schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
for text in ('{"a":1,"a":"x"}', '{"a":1,"\\u0061":"x"}'):
    print(text, accepts(schema, text))
PY
