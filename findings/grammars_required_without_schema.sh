#!/usr/bin/env bash
# Finding: xgrammar and outlines-core enforce objects without a property that the schema requires, if it is not among
#   "properties", and exclude all objects that have it; lm-format-enforcer then accepts no object at all.
# Version: xgrammar 0.2.9, outlines-core 0.2.14, lm-format-enforcer 0.11.3, llguidance 1.9.1
# Guess: such a property is required with any value, as JSON Schema says, or the schema is refused.
# What happens: with "a" in properties and "b" required, the first two accept {"a":1}, which is invalid. None of the
#   three accepts {"a":1,"b":1}, and there is no error and no warning. llguidance accepts only the valid one.
# Why it matters: schemas written by hand, or joined from parts, have such names; each output that is allowed is then
#   refused by a validator, or the object never ends. vLLM enforces schemas by any of the four. Skipjoin uses
#   llguidance.
source "$(dirname "$0")/support.bash"
packages xgrammar==0.2.9 torch==2.13.0 outlines-core==0.2.14 lm-format-enforcer==0.11.3 llguidance==1.9.1
byte_tokens
"$PYTHON" - 2>/dev/null <<'PY' | expect 'xgrammar: {"a":1}
outlines-core: {"a":1}
lm-format-enforcer: none
llguidance: {"a":1,"b":1}'
import json
import re

import byte_tokens
import xgrammar
from lmformatenforcer import JsonSchemaParser
from outlines_core.json_schema import build_regex_from_schema

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", "b"]}
info = xgrammar.TokenizerInfo([bytes([byte]) for byte in range(256)], xgrammar.VocabType.RAW, stop_token_ids=[0])
compiled = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA))
regex = re.compile(build_regex_from_schema(json.dumps(SCHEMA)))


def by_xgrammar(text):
    matcher = xgrammar.GrammarMatcher(compiled)
    return matcher.accept_string(text) and matcher.accept_token(0)


def by_format_enforcer(text):
    parser = JsonSchemaParser(SCHEMA)
    for character in text:
        if character not in parser.get_allowed_characters():
            return False
        parser = parser.add_character(character)
    return parser.can_end()


found = {
    "xgrammar": by_xgrammar,
    "outlines-core": regex.fullmatch,
    "lm-format-enforcer": by_format_enforcer,
    "llguidance": lambda text: byte_tokens.accepts(SCHEMA, text),
}
for name, accepts in found.items():
    accepted = [text for text in ('{"a":1}', '{"a":1,"b":1}') if accepts(text)]
    print(f"{name}:", *(accepted or ["none"]))
PY
