#!/usr/bin/env bash
# Finding: In xgrammar, the pattern of a JSON schema must match the whole string.
# Version: xgrammar 0.2.9, llguidance 1.9.1, torch 2.13.0
# Guess: As JSON Schema says, the pattern b is found anywhere in the string, so "abc" is allowed.
# What happens: xgrammar allows only "b" for it. llguidance allows both. For ^b$ both allow only "b".
# Why it matters: vLLM takes either of them, and xgrammar first. A schema whose pattern has no anchors, such as \d{4} for
# a text with a year, lets a model say less inside vLLM than on Skipjoin's server, which uses llguidance.
source "$(dirname "$0")/support.bash"
packages torch==2.13.0 xgrammar==0.2.9 llguidance==1.9.1
byte_tokens
"$PYTHON" - <<'PY' | expect 'b xgrammar: "b" True, "abc" False
b llguidance: "b" True, "abc" True
^b$ xgrammar: "b" True, "abc" False
^b$ llguidance: "b" True, "abc" False'
import json

import byte_tokens
import xgrammar

tokens = [*(bytes([byte]) for byte in range(256)), b"<eos>"]
vocabulary = xgrammar.TokenizerInfo(tokens, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[256])
compiler = xgrammar.GrammarCompiler(vocabulary)


def accepts(schema, text):
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema)))
    return all(matcher.accept_token(byte) for byte in [*text.encode(), 256])


for pattern in ("b", "^b$"):
    schema = {"type": "string", "pattern": pattern}
    for name, accepted in (("xgrammar", accepts), ("llguidance", byte_tokens.accepts)):
        print(f"{pattern} {name}: " + ", ".join(f"{text} {accepted(schema, text)}" for text in ('"b"', '"abc"')))
PY
