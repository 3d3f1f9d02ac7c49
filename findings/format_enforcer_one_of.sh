#!/usr/bin/env bash
# Finding: lm-format-enforcer allows only an object where a schema says oneOf, whatever its alternatives are.
# Version: lm-format-enforcer 0.11.3
# Guess: oneOf is treated as anyOf, or refused, since a grammar cannot count matches.
# What happens: for oneOf an integer and a string, the first character must be a brace, and an empty object is
#   accepted. With anyOf, the integer and the string are.
# Why it matters: OpenAPI documents and other languages' generators write oneOf for unions of plain values. Each
#   output is then invalid, without an error. vLLM offers this library for schemas. Skipjoin enforces oneOf of
#   alternatives that exclude each other, and refuses others.
source "$(dirname "$0")/support.bash"
packages lm-format-enforcer==0.11.3
"$PYTHON" - 2>/dev/null <<'PY' | expect 'anyOf: 1 "x"
oneOf: {}'
from lmformatenforcer import JsonSchemaParser


def accepts(schema, text):
    parser = JsonSchemaParser(schema)
    for character in text:
        if character not in parser.get_allowed_characters():
            return False
        parser = parser.add_character(character)
    return parser.can_end()


for kind in ("anyOf", "oneOf"):
    schema = {kind: [{"type": "integer"}, {"type": "string"}]}
    print(f"{kind}:", *(text for text in ("1", '"x"', "{}") if accepts(schema, text)))
PY
