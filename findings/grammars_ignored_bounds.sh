#!/usr/bin/env bash
# Finding: outlines-core and lm-format-enforcer ignore the bounds of numbers in a schema, and xgrammar those beside
#   $ref and in allOf, without an error.
# Version: xgrammar 0.2.9, outlines-core 0.2.14, lm-format-enforcer 0.11.3, llguidance 1.9.1
# Guess: a keyword that a library cannot enforce is refused, as llguidance does, so that one knows.
# What happens: the first two accept 9 for an integer of at most 3. xgrammar refuses it there, and accepts it if the
#   bound stands beside a reference, or in a part of allOf. llguidance accepts it nowhere.
# Why it matters: a score from 0 to 10 comes out as 11, and only the client's validator sees it. vLLM enforces schemas
#   by any of the four, and the same request is bounded or not by its setting. Skipjoin uses llguidance.
source "$(dirname "$0")/support.bash"
packages xgrammar==0.2.9 torch==2.13.0 outlines-core==0.2.14 lm-format-enforcer==0.11.3 llguidance==1.9.1
byte_tokens
"$PYTHON" - 2>/dev/null <<'PY' | expect 'maximum: 9 accepted by outlines-core, lm-format-enforcer
beside $ref: 9 accepted by xgrammar, outlines-core, lm-format-enforcer
in allOf: 9 accepted by xgrammar'
import json
import re

import byte_tokens
import xgrammar
from lmformatenforcer import JsonSchemaParser
from outlines_core.json_schema import build_regex_from_schema

info = xgrammar.TokenizerInfo([bytes([byte]) for byte in range(256)], xgrammar.VocabType.RAW, stop_token_ids=[0])
integer = {"type": "integer"}
schemas = {
    "maximum": integer | {"maximum": 3},
    "beside $ref": {"$ref": "#/$defs/count", "maximum": 3, "$defs": {"count": integer}},
    "in allOf": integer | {"allOf": [{"minimum": 0}, {"maximum": 3}]},
}


def by_xgrammar(schema):
    matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(schema)))
    return matcher.accept_string("9") and matcher.accept_token(0)


def by_outlines(schema):
    return re.fullmatch(build_regex_from_schema(json.dumps(schema)), "9") is not None


def by_format_enforcer(schema):
    parser = JsonSchemaParser(schema)
    return "9" in parser.get_allowed_characters() and parser.add_character("9").can_end()


checks = {
    "xgrammar": by_xgrammar,
    "outlines-core": by_outlines,
    "lm-format-enforcer": by_format_enforcer,
    "llguidance": lambda schema: byte_tokens.accepts(schema, "9"),
}
for name, schema in schemas.items():
    accepting = []
    for library, accepts in checks.items():
        try:
            accepting += [library] if accepts(schema) else []
        except Exception:  # two of them raise their own or bare ones for what they cannot do
            continue
    print(f"{name}: 9 accepted by", ", ".join(accepting))
PY
